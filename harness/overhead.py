"""What the harness itself takes per request and per token: `python -m harness.overhead`.

An engine whose steps take no time is driven by the scenarios themselves, in real time, and by a
bare loop that does nothing with its tokens; the difference is the harness's. Then an engine of a
known rate is measured, and what is found is held against that rate.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from engine.config import EngineConfig, EngineSettings, ModelConfig
from engine.sampling_params import SamplingParams
from engine.spec import ModelSpec
from harness.columns import columns
from harness.door import EngineDoor
from harness.fake_config import FakeScript
from harness.measure.statistics import Interval, interval
from harness.request_log import RequestLog
from harness.scenarios.drive import Engine, OnEnd, OnProgress
from harness.scenarios.latency import measure_latency
from harness.scenarios.serve import measure_serve
from harness.scenarios.throughput import measure_throughput
from harness.scenarios.workload import engine_prompts
from harness.state import StateWriter
from harness.systems.fake.door import fake_door
from harness.traffic.load import Load
from harness.traffic.scenario import ServeScenario
from harness.traffic.settings import Arrivals, Lengths
from reports.record.text import number

NUM_REQUESTS: Final = 64
NUM_TOKENS: Final = 64
PROMPT_TOKENS: Final = 16
REPEATS: Final = 5
KNOWN_MS: Final = 5.0
"""Time of every step of the engine of a known rate."""
KNOWN_RATE_S: Final = 50.0
"""Arrivals a second at it."""
BARE: Final = {"latency": "in turn", "throughput": "at once", "serve": "at once"}
"""Part -> the bare loop that sends the same requests in the same order."""
_SPEC: Final = ModelSpec(
    model_type="llama",
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Microseconds of one part of the scenario."""

    per_request_us: Interval
    """Of a request with one token."""
    per_token_us: Interval
    """Of each further token."""


@dataclass(frozen=True, kw_only=True)
class _Reports:
    """What a worker reports to while it measures."""

    on_progress: OnProgress
    on_end: OnEnd


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.overhead",
        description="Measure what the harness itself takes per request and per token, with an "
        "engine that takes no time.",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each figure, 2 or more")
    options = parser.parse_args(argv)
    if options.repeats < 2:
        parser.error(f"--repeats: expected at least 2, got {options.repeats}")
    with tempfile.TemporaryDirectory() as folder:
        state, log = StateWriter(Path(folder), "overhead"), RequestLog(Path(folder))
        reports = _Reports(on_progress=state.running, on_end=log.of("overhead", 0))
        parts = [*dict.fromkeys(BARE.values()), *BARE]
        costs = {part: measure_cost(part, options.repeats, reports) for part in parts}
        known = known_rate(reports)
        log.close()
        state.close()
    if options.json:
        found = {"costs": {part: asdict(cost) for part, cost in costs.items()}, "known_rate": known}
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write("\n".join(table(costs, known)) + "\n")
    return 0


def measure_cost(part: str, repeats: int, reports: _Reports) -> Cost:
    """Return what one part takes, or a bare loop around the engine.

    Args:
        part: a key or a value of BARE.
        repeats: at least 2.
        reports: what the worker reports to.
    """
    requests, tokens = [], []
    for _ in range(repeats):
        one_s = _timed(part, 1, reports)
        all_s = _timed(part, NUM_TOKENS, reports)
        requests.append(1e6 * one_s / NUM_REQUESTS)
        tokens.append(1e6 * (all_s - one_s) / NUM_REQUESTS / (NUM_TOKENS - 1))
    found = [interval(values) for values in (requests, tokens)]
    if found[0] is None or found[1] is None:
        raise ValueError(f"repeats: expected at least 2, got {repeats}.")
    return Cost(per_request_us=found[0], per_token_us=found[1])


def _timed(part: str, output_tokens: int, reports: _Reports) -> float:
    """Return the seconds that NUM_REQUESTS of so many tokens take."""
    door, llm = _open(0.0)
    prompts = engine_prompts(llm, NUM_REQUESTS, PROMPT_TOKENS, seed=0, stream="overhead")
    call: Callable[[], Any]
    if part not in BARE:
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        call = lambda: _bare(llm, prompts, params, in_turn=part == "in turn")  # noqa: E731
    elif part == "serve":
        load = _load(output_tokens, Arrivals(process="at_once"), NUM_REQUESTS)
        call = lambda: _serve(door, llm, load, reports)  # noqa: E731
    else:
        measure = measure_latency if part == "latency" else measure_throughput
        call = lambda: measure(  # noqa: E731
            llm,
            prompts,
            output_tokens,
            clock=door.clock,
            on_progress=reports.on_progress,
            on_end=reports.on_end,
        )
    begin_s = door.clock()
    call()
    return door.clock() - begin_s


def _open(step_ms: float) -> tuple[EngineDoor, Engine]:
    script = FakeScript(clock="real", load_s=0.0, prefill_ms=[step_ms], decode_ms=[step_ms])
    door = fake_door(script)
    config = EngineConfig(
        model=ModelConfig(name="fake", load_format="dummy", spec=_SPEC),
        engine=EngineSettings(max_num_seqs=NUM_REQUESTS),
    )
    factory = door.load_code()
    return door, factory.from_config(config, progress=lambda *_: None, reference=False)


def _bare(
    llm: Engine, prompts: Sequence[list[int]], params: SamplingParams, *, in_turn: bool
) -> None:
    for index, prompt in enumerate(prompts):
        llm.add_request(prompt, params, f"bare-{index}")
        while in_turn and llm.has_unfinished():
            llm.step()
    while llm.has_unfinished():
        llm.step()


def _load(output_tokens: int, arrivals: Arrivals, num_requests: int) -> Load:
    config = ServeScenario(
        num_requests=num_requests,
        warmup_requests=0,
        arrivals=arrivals,
        prompt=Lengths(tokens=PROMPT_TOKENS),
        output=Lengths(tokens=output_tokens),
    )
    return Load(config=config, vocab_size=_SPEC.vocab_size)


def _serve(door: EngineDoor, llm: Engine, load: Load, reports: _Reports) -> Any:
    outcome, _ = measure_serve(
        llm,
        load,
        clock=door.clock,
        wait=door.wait,
        on_progress=reports.on_progress,
        on_end=reports.on_end,
        open_door=door.open_async,
        run_async=door.run_async,
    )
    return outcome


def known_rate(reports: _Reports) -> dict[str, float | None]:
    """Return what the harness finds of an engine whose every step takes KNOWN_MS.

    Args:
        reports: what the worker reports to.
    """
    door, llm = _open(KNOWN_MS)
    prompts = engine_prompts(llm, 16, PROMPT_TOKENS, seed=0, stream="known")
    alone, _ = measure_latency(
        llm,
        prompts,
        16,
        clock=door.clock,
        on_progress=reports.on_progress,
        on_end=reports.on_end,
    )
    door, llm = _open(KNOWN_MS)
    arrivals = Arrivals(process="constant", rate_per_s=KNOWN_RATE_S)
    served = _serve(door, llm, _load(4, arrivals, NUM_REQUESTS), reports)
    names = ("ttft_ms/mean", "tpot_ms/mean", "itl_ms/max")
    lags = ("serve/schedule_lag_ms/mean", "serve/schedule_lag_ms/max", "serve/sent_requests_s")
    return {f"latency/{name}": alone.metrics[f"latency/{name}"] for name in names} | {
        name: served.metrics[name] for name in lags
    }


def table(costs: Mapping[str, Cost], known: Mapping[str, float | None]) -> list[str]:
    """Return the figures as lines of text.

    Args:
        costs: by part, with those of the bare loops.
        known: of `known_rate`.
    """
    count = next(iter(costs.values())).per_token_us.count
    lines = [
        f"{NUM_REQUESTS} requests of {NUM_TOKENS} tokens to an engine that takes no time; "
        f"microseconds, mean of {count}",
        "with half of its 95 % interval; the harness's own is what exceeds a bare loop of the same",
        "",
    ]
    rows = [("", "per request", "per token", "own, request", "own, token")]
    for part, cost in costs.items():
        pair = (cost.per_request_us, cost.per_token_us)
        request, token = (f"{number(i.mean)} +- {number(i.half_width)}" for i in pair)
        if part not in BARE:
            rows.append((f"bare, {part}", request, token, "", ""))
            continue
        bare = costs[BARE[part]]
        own_request = number(pair[0].mean - bare.per_request_us.mean)
        own_token = number(pair[1].mean - bare.per_token_us.mean)
        rows.append((part, request, token, own_request, own_token))
    lines += columns(rows)
    lines += ["", f"an engine of {KNOWN_MS:g} ms a step, and {KNOWN_RATE_S:g} arrivals a second:"]
    figures = {name: "n/a" if value is None else number(value) for name, value in known.items()}
    return [*lines, *columns(list(figures.items()))]


if __name__ == "__main__":
    sys.exit(main())
