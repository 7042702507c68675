"""How close a model's tokens are to those of its plain weights: perplexity, greedy agreement.

Both come from log-probabilities of given tokens, such as those of prompts. Only the yardstick
generates tokens: the same model with plain weights, in a process of its own.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from pydoc_data import topics
from statistics import fmean
from typing import Any, Final, NamedTuple, Unpack

from catalogue.files import expanded, read_json
from engine.asked.request import TokenEvent
from engine.asked.sampling import SamplingParams
from engine.errors import RequestError
from engine.text.tokenizer import encode
from harness.config.schema import QualityScenario
from harness.work.correctness import greedy_tokens
from harness.work.drive import Conduct, Engine, OnProgress
from harness.work.prompts import PromptError, TextError, read_text
from reports.record.record import RESULT_NAME, write_text_atomic

OWN_TEXT: Final = "pydoc_data.topics"
"""The text where none is given: prose of Python's language reference, which Python ships."""


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """Greedy tokens of the plain weights."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    """Greedy tokens of each prompt."""
    text_hash: str
    """Hash of the tokens of the text that the prompts are parts of."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, which `of` reads."""
        return {"prompts": self.prompts, "tokens": self.tokens, "text_hash": self.text_hash}

    @classmethod
    def of(cls, content: Any) -> "Yardstick | None":
        """Return what a document holds, else None."""
        if not isinstance(content, dict) or not {"prompts", "tokens", "text_hash"} <= set(content):
            return None
        return cls(**{name: content[name] for name in ("prompts", "tokens", "text_hash")})


class Scored(NamedTuple):
    """One token of a prompt, given those before it."""

    logprob: float
    """Natural logarithm of its probability."""
    is_first: bool
    """Whether none is more probable."""


class TextWindow(NamedTuple):
    """Tokens of a text that are computed together."""

    start: int
    stop: int
    first: int
    """The first that counts: those before it are its context."""


def windows(num_tokens: int, config: QualityScenario) -> list[TextWindow]:
    """Return the windows of a text, each a stride behind the one before; the last may be short.

    A token counts once. The very first one, which nothing precedes, counts nowhere.
    """
    found: list[TextWindow] = []
    start, first = 0, 1
    while first < num_tokens and len(found) < (config.num_windows or num_tokens):
        stop = min(start + config.window_tokens, num_tokens)
        found.append(TextWindow(start, stop, first))
        first, start = stop, start + config.stride_tokens
    return found


def text_file(config: QualityScenario) -> Path | None:
    """Return the file of the text; None: it is OWN_TEXT."""
    return None if config.text_file is None else expanded(config.text_file)


def quality_text(file: Path | None) -> str:
    """Return the text of a file, or OWN_TEXT.

    Raises:
        PromptError: It cannot be read, or is no text in UTF-8.
    """
    if file is None:
        return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    try:
        return read_text(file)
    except TextError as error:
        raise PromptError(f"scenario.quality.text_file {file}: {error}") from error


def _encoded(llm: Engine, text: str) -> list[int]:
    if llm.tokenizer is None:
        raise PromptError(
            "scenario.quality: expected a model with a tokenizer, which its text is split with, "
            "found none. Choose another model, or set scenario.quality=null."
        )
    return encode(llm.tokenizer, text)


def _hash(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def make_yardstick(
    llm: Engine, config: QualityScenario, text: str, **how: Unpack[Conduct]
) -> Yardstick:
    """Return the greedy tokens of prompts that are parts of the text, at even distances.

    Raises:
        PromptError: The text is too short, or the model has no tokenizer.
        RequestError: A prompt was not answered.
    """
    ids = _encoded(llm, text)
    step, size = len(ids) // config.num_prompts, config.prompt_tokens
    if step < size:
        raise PromptError(
            f"scenario.quality: expected a text of at least {config.num_prompts} x {size} tokens "
            f"(num_prompts x prompt_tokens), got {len(ids)}. Give a longer one, or lower them."
        )
    prompts = [ids[at * step : at * step + size] for at in range(config.num_prompts)]
    tokens = greedy_tokens(llm, prompts, config.output_tokens, **how)
    return Yardstick(prompts=prompts, tokens=tokens, text_hash=_hash(ids))


def write_yardstick(path: Path, found: Yardstick) -> None:
    """Store a yardstick in one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, json.dumps(found.to_dict()) + "\n")


def read_yardstick(path: Path) -> Yardstick | None:
    """Return the yardstick of a file, or that which the run of a folder had; None: there is none.

    Args:
        path: A file that was written here, or a folder with a record.
    """
    if not path.is_dir():
        return Yardstick.of(read_json(path))
    quality = read_json(path / RESULT_NAME).get("samples", {}).get("quality") or {}
    return Yardstick.of(quality.get("yardstick"))


def score(llm: Engine, prompt: Sequence[int], request_id: str) -> list[Scored]:
    """Return what a model says of each token of a prompt but the first.

    Raises:
        RequestError: The system refused the prompt, or tells no log-probabilities of prompts.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    llm.add_request(list(prompt), params, request_id)
    found = None
    while llm.has_unfinished():
        for event in llm.step():
            found = found or _told(event)
    if found is None or len(found) != len(prompt):
        raise RequestError(
            "quality: expected the log-probability of each token of a prompt, got none. This "
            "system does not tell them; set scenario.quality=null."
        )
    return [
        Scored(each[token], each[token] >= max(each.values()))
        for token, each in zip(prompt[1:], found[1:], strict=True)
        if each is not None
    ]


def _told(event: TokenEvent) -> list[dict[int, float] | None] | None:
    if event.finish_reason == "error":
        raise RequestError(f"quality: {event.stop_reason}")
    return event.prompt_logprobs


def measure_quality(
    llm: Engine,
    config: QualityScenario,
    text: str,
    yardstick: Yardstick | None,
    *,
    on_progress: OnProgress,
) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Return metrics and what they are made of.

    Args:
        llm: The engine under test.
        config: Settings of the part.
        text: Text whose perplexity is measured.
        yardstick: What greedy tokens are compared with; None: nothing.
        on_progress: Called with prompts done and in all, and output tokens.

    Raises:
        PromptError: The text is too short, or has other tokens than the yardstick's.
        RequestError: The system cannot serve it.
    """
    ids = _encoded(llm, text)
    cut = windows(len(ids), config)
    if not cut:
        raise PromptError(
            f"scenario.quality: expected a text of at least 2 tokens, got {len(ids)}. Give another."
        )
    if yardstick is not None and yardstick.text_hash != _hash(ids):
        raise PromptError(
            "scenario.quality.reference: expected the same text and tokenizer as here, got others. "
            "Compare with the model that this one was made of, and give the same text_file."
        )
    done, total = count(), len(cut) + (0 if yardstick is None else len(yardstick.prompts))

    def scored(prompt: Sequence[int]) -> list[Scored]:
        number = next(done)
        on_progress(number, total, 0)
        return score(llm, prompt, f"quality-{number}")

    losses: list[float] = []
    for window in cut:
        found = scored(ids[window.start : window.stop])
        losses += [-each.logprob for each in found[window.first - window.start - 1 :]]
    metrics: dict[str, float | None] = {"quality/perplexity": math.exp(fmean(losses))}
    samples: dict[str, Any] = {
        "text": config.text_file or OWN_TEXT,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "num_windows": len(cut),
        "num_tokens": len(losses),
        "nats": losses,
    }
    if yardstick is not None:
        agreement, leading = _agreement(yardstick, scored)
        metrics |= agreement
        samples |= {"leading_equal": leading, "yardstick": yardstick.to_dict()}
    on_progress(total, total, 0)
    return metrics, samples


def _agreement(
    yardstick: Yardstick, scored: Callable[[Sequence[int]], list[Scored]]
) -> tuple[dict[str, float], list[int]]:
    """Return metrics of the tokens that equal a yardstick's, and how many of each lead."""
    leading, num_equal, num_tokens = [], 0, 0
    for prompt, tokens in zip(yardstick.prompts, yardstick.tokens, strict=True):
        same = [each.is_first for each in scored([*prompt, *tokens])[-len(tokens) :]]
        num_equal, num_tokens = num_equal + sum(same), num_tokens + len(tokens)
        leading.append(same.index(False) if False in same else len(same))
    return {
        "quality/equal_share": num_equal / num_tokens,
        "quality/first_difference_tokens": fmean(leading),
    }, leading
