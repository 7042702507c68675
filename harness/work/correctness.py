"""Greedy tokens of the engine under test against a reference, compared before anything is timed.

The reference is the same engine with every layer copied on demand, eager, in a process of its own.
Its tokens are kept in TIGHTFIT_HOME/references, keyed by everything that may change them.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Unpack

from catalogue.checkpoint import file_stamps
from catalogue.files import read_json
from catalogue.processes import ROOT
from engine.asked.config import EngineConfig
from engine.errors import RequestError
from harness.work.drive import Conduct, Engine, run_requests
from reports.record.record import write_text_atomic

STREAM: Final = "correctness"
_SOURCE_SUFFIXES: Final = {".py", ".cu", ".cpp", ".h"}
_RATES_ONLY: Final = ("name", "memory_gib", "link_gb_s", "hbm_gb_s", "bf16_tflops")


class WrongTokensError(RuntimeError):
    """The engine under test gave other greedy tokens than the reference."""

    kind = "WrongTokens"


def greedy_tokens(
    llm: Engine, prompts: Sequence[Sequence[int]], output_tokens: int, **how: Unpack[Conduct]
) -> list[list[int]]:
    """Return the greedy tokens of each prompt, run one at a time, or raise RequestError."""
    requests, _ = run_requests(llm, prompts, output_tokens, prefix=STREAM, **how)
    for index, request in enumerate(requests):
        if not request.is_complete or len(request.token_ids) != output_tokens:
            raise RequestError(
                f"correctness: expected {output_tokens} tokens for prompt {index}, got "
                f"{len(request.token_ids)} ({request.error or request.finish_reason})."
            )
    return [request.token_ids for request in requests]


def tokens_of_answered(
    llm: Engine, prompts: Sequence[Sequence[int]], output_tokens: int, **how: Unpack[Conduct]
) -> tuple[dict[int, list[int]], list[str]]:
    """Return prompt -> greedy tokens of the prompts that a peer answered, and why others failed.

    A request that fails says nothing of the others: the run goes on and its failures are counted.
    """
    requests, _ = run_requests(llm, prompts, output_tokens, prefix=STREAM, **how)
    found = {i: request.token_ids for i, request in enumerate(requests) if request.is_complete}
    failed = [request for request in requests if not request.is_complete]
    if not failed:
        return found, []
    return found, [
        f"correctness: {len(failed)} of {len(requests)} prompts were not answered "
        f"({failed[0].error or failed[0].finish_reason}), so they were not compared. Mend the "
        "system, or make it answer every request."
    ]


def compare_tokens(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> None:
    """Raise WrongTokensError at the first prompt and position that differ."""
    for prompt, (want, have) in enumerate(zip(expected, got, strict=True)):
        for position, (token, other) in enumerate(zip(want, have, strict=True)):
            if token != other:
                raise WrongTokensError(
                    f"correctness: expected token {token} at position {position} of prompt "
                    f"{prompt} (the reference: same model, every layer copied on demand, eager), "
                    f"got {other}. The engine is wrong under this configuration, so nothing was "
                    "timed."
                )


def reference_key(
    config: EngineConfig,
    check: Mapping[str, Any],
    environment: Mapping[str, Any],
    engine: str = "native",
) -> str:
    """Return the name of the reference: a hash of everything that may change its tokens.

    `check` says what is compared. Of the environment the device and the versions count; `engine` is
    native, or fake for scripted tokens.
    """
    asked = config.to_dict()
    for name in _RATES_ONLY:
        asked["gpu"].pop(name, None)
    asked["engine"].pop("gpu_memory_utilization")
    asked["engine"].pop("host_reserve_gib")
    asked.pop("offload")
    gpu, path = environment.get("gpu") or {}, config.model.path
    parts = {
        "engine": engine,
        "config": asked,
        "check": dict(check),
        "weights": [] if path is None else file_stamps(Path(path), (".safetensors", ".json")),
        "device": gpu.get("name") or (environment.get("cpu") or {}).get("name"),
        "torch": environment.get("torch"),
        "code": _code_hash(),
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write_reference(
    path: Path, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> None:
    """Store the reference's tokens in one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, json.dumps({"prompts": list(prompts), "tokens": list(tokens)}) + "\n")


def read_reference(path: Path) -> dict[str, list[list[int]]] | None:
    """Return prompts and tokens of a reference, None where there is none that can be read."""
    document = read_json(path)
    is_whole = {"prompts", "tokens"} <= document.keys()
    return {name: document[name] for name in ("prompts", "tokens")} if is_whole else None


def _code_hash() -> str:
    """Return a hash of the sources of engine/ and kernels/."""
    digest = hashlib.sha256()
    for folder in ("engine", "kernels"):
        for parent, _, names in sorted(os.walk(ROOT / folder)):
            for name in sorted(names):
                path = Path(parent) / name
                if path.suffix in _SOURCE_SUFFIXES:
                    digest.update(str(path.relative_to(ROOT)).encode())
                    digest.update(path.read_bytes())
    return digest.hexdigest()
