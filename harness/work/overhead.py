"""What the harness itself takes of a request, beside an engine whose steps take no time."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from engine.asked.sampling import SamplingParams
from harness.config.serve import Arrivals, OutputLengths, PromptLengths, ServeScenario
from harness.config.study import OverheadScenario
from harness.observe.statistics import Interval, Quantile, interval
from harness.work.drive import Clock, Engine, OnEnd, OnProgress
from harness.work.offline import engine_prompts, measure_latency, measure_throughput
from harness.work.schedule import Load
from harness.work.serve import measure_serve

BARE: Final = {"latency": "in turn", "throughput": "at once", "serve": "at once"}
"""Part -> the bare loop that sends the same requests in the same order."""


def measure_overhead(
    llm: Engine,
    config: OverheadScenario,
    *,
    clock: Clock,
    on_progress: OnProgress,
    on_end: OnEnd,
    served: Mapping[str, Any],
    t: Quantile,
) -> dict[str, Any]:
    """Return microseconds per request of one token, and per further token.

    `parts` has each part and bare loop, `own` what a part takes beyond its bare loop, each as the
    mean and half of its 95 % interval. The engine's steps take no time; `served` are further
    arguments of `measure_serve`.
    """
    prompts = engine_prompts(
        llm, config.num_requests, config.prompt_tokens, seed=0, stream="overhead"
    )
    reports: dict[str, Any] = {"clock": clock, "on_progress": on_progress, "on_end": on_end}

    def timed(part: str, num_tokens: int) -> float:
        run = _runner(part, llm, prompts, num_tokens, reports, served, t)
        begin_s = clock()
        run()
        return clock() - begin_s

    names = [*dict.fromkeys(BARE.values()), *BARE]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(config.repeats):
        for name in names:
            one_s, all_s = timed(name, 1), timed(name, config.output_tokens)
            per_token_s = (all_s - one_s) / (config.output_tokens - 1)
            found[name].append((1e6 * one_s / len(prompts), 1e6 * per_token_s / len(prompts)))
    own = {
        part: [
            (ours[0] - theirs[0], ours[1] - theirs[1])
            for ours, theirs in zip(found[part], found[bare], strict=True)
        ]
        for part, bare in BARE.items()
    }
    return {
        "parts": {name: _intervals(pairs, t) for name, pairs in found.items()},
        "own": {name: _intervals(pairs, t) for name, pairs in own.items()},
        "repeats": config.repeats,
        "num_requests": len(prompts),
        "output_tokens": config.output_tokens,
    }


def _intervals(pairs: Sequence[tuple[float, float]], t: Quantile) -> dict[str, dict[str, float]]:
    columns = dict(zip(("request_us", "token_us"), zip(*pairs, strict=True), strict=True))
    found: dict[str, Interval | None] = {name: interval(v, t) for name, v in columns.items()}
    return {
        name: {"mean": value.mean, "half": value.half_width}
        for name, value in found.items()
        if value is not None
    }


def _runner(
    part: str,
    llm: Engine,
    prompts: Sequence[list[int]],
    num_tokens: int,
    reports: Mapping[str, Any],
    served: Mapping[str, Any],
    t: Quantile,
) -> Callable[[], Any]:
    """Return what sends all requests for so many tokens, by a part or a bare loop."""
    match part:
        case "latency":
            return partial(measure_latency, llm, prompts, num_tokens, **reports, t=t)
        case "throughput":
            return partial(measure_throughput, llm, prompts, num_tokens, **reports)
        case "in turn" | "at once":
            return partial(_bare, llm, prompts, num_tokens, in_turn=part == "in turn")
        case _:
            config = ServeScenario(
                num_requests=len(prompts),
                warmup_requests=0,
                arrivals=Arrivals(process="at_once"),
                prompt=PromptLengths(tokens=len(prompts[0])),
                output=OutputLengths(tokens=num_tokens),
            )
            load = Load(config=config, vocab_size=llm.spec.vocab_size)
            return partial(measure_serve, llm, load, **reports, **served, t=t)


def _bare(llm: Engine, prompts: Sequence[list[int]], num_tokens: int, *, in_turn: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        llm.add_request(prompt, params, f"bare-{index}")
        while in_turn and llm.has_unfinished():
            llm.step()
    while llm.has_unfinished():
        llm.step()
