"""What is sent in one part of the scenario: token ids for the engine that is here."""

from collections.abc import Sequence

from harness.prompts import PromptRow, encode_rows, special_ids, synthetic_prompts
from harness.scenarios.drive import Clock, Engine, run_in_turn
from harness.scenarios.outcome import cut_reasons, failure_reasons
from harness.schema import RequestSet


def part_prompts(
    llm: Engine,
    part: str,
    config: RequestSet,
    rows: Sequence[PromptRow] | None,
) -> list[list[list[int]]]:
    """Return the prompts of each repeat; no two repeats share one.

    Args:
        llm: the engine that they are for.
        part: of the scenario; another part has other prompts.
        config: how many, how long, and how often.
        rows: of the file of prompts, enough for all repeats; None: they are synthetic.
    """
    num, repeats = config.num_requests, config.repeats
    if rows is not None:
        encoded = encode_rows(rows, llm.tokenizer)
    else:
        encoded = engine_prompts(
            llm, num * repeats, config.prompt_tokens, seed=config.seed, stream=part
        )
    return [encoded[number * num : (number + 1) * num] for number in range(repeats)]


def engine_prompts(
    llm: Engine, num_prompts: int, num_tokens: int, *, seed: int, stream: str
) -> list[list[int]]:
    """Return synthetic prompts in the vocabulary of an engine, without its special tokens.

    Args:
        llm: the engine.
        num_prompts: how many, all different.
        num_tokens: of each.
        seed: another seed gives other prompts.
        stream: another name gives other prompts.
    """
    return synthetic_prompts(
        num_prompts,
        num_tokens,
        vocab_size=llm.spec.vocab_size,
        seed=seed,
        stream=stream,
        avoid=special_ids(llm.tokenizer),
    )


def warm_up_part(
    llm: Engine, part: str, config: RequestSet, *, clock: Clock, salt: str | None = None
) -> list[str]:
    """Run the requests before a part, one at a time; return what went wrong.

    Args:
        llm: the engine.
        part: of the scenario.
        config: how many and how long; their prompts are of their own.
        clock: seconds.
        salt: begins that of their prefixes in a cache.
    """
    stream, num = f"{part}/warm-up", config.warmup_requests
    prompts = engine_prompts(llm, num, config.prompt_tokens, seed=config.seed, stream=stream)
    requests, _ = run_in_turn(
        llm,
        prompts,
        config.output_tokens,
        clock=clock,
        prefix=f"{part}-warm-up",
        limit_s=config.max_duration_s,
        salt=salt and f"{salt}/warm-up",
    )
    name = f"{part} warm-up"
    cut = cut_reasons(name, requests, num, config.max_duration_s)
    return [*cut, *failure_reasons(name, requests)]
