import pytest

from engine.errors import ConfigError
from harness.config.serve import (
    Arrivals,
    Lengths,
    Objectives,
    OutputLengths,
    PeakSearch,
    Prefixes,
    PromptLengths,
    Seeds,
    TraceSource,
    Turns,
)
from tests.harness.work.traffic.cases import fixed, serve

TRACE = TraceSource(path="a.csv")
SEARCH = PeakSearch(low_per_s=1, high_per_s=4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Arrivals(process="burst"), "arrivals.process: expected one of poisson"),
        (lambda: Arrivals(rate_per_s=0), "rate_per_s: expected a number >= 0.0001"),
        (lambda: Arrivals(rate_per_s=1, burstiness=2), "burstiness: expected null for process=poi"),
        (lambda: Arrivals(process="gamma", rate_per_s=1), "burstiness: expected a value"),
        (lambda: Arrivals(process="at_once", rate_per_s=1), "rate_per_s: expected null"),
        (lambda: Arrivals(process="trace", ramp_up_s=1), "ramp_up_s: expected null"),
        (lambda: Lengths(distribution="zipf"), "distribution: expected one of fixed"),
        (Lengths, "tokens: expected a value for distribution=fixed"),
        (lambda: Lengths(tokens=0), "tokens: expected an integer >= 1"),
        (lambda: Lengths(tokens=3, std=1), "std: expected null"),
        (lambda: PromptLengths(tokens=0), "scenario.serve.prompt.tokens: expected an integer"),
        (
            lambda: OutputLengths(distribution="uniform", tokens=16, low=2, high=4),
            "scenario.serve.output.tokens: expected null for distribution=uniform, got 16. It "
            "would have no effect: set it to null, or remove it.",
        ),
        (lambda: Lengths(distribution="uniform", low=3), "high: expected a value"),
        (lambda: Lengths(distribution="uniform", low=3, high=2), "high: expected at least low=3"),
        (lambda: Lengths(distribution="normal", tokens=8, std=2), "high: expected a value"),
        (lambda: Prefixes(num=2), "both above 0 or both 0"),
        (lambda: Turns(think_s=1), "turns.think_s: expected 0 with one turn"),
        (lambda: Turns(first_tokens=5), "turns.first_tokens: expected null with one turn"),
        (lambda: Turns(num=2, first_tokens=0), "turns.first_tokens"),
        (TraceSource, "trace.path: expected a file"),
        (
            lambda: TraceSource(path="a.txt").check_ending(),
            "trace.format: expected azure or mooncake",
        ),
        (lambda: TraceSource(path="a.csv", time_scale=0), "time_scale: expected a number > 0"),
        (lambda: Seeds(order=-1), "seeds.order: expected an integer >= 0"),
        (lambda: Objectives(ttft_ms=0), "slo.ttft_ms: expected a number > 0"),
        (lambda: PeakSearch(low_per_s=2, high_per_s=2), "high_per_s: expected above low_per_s=2"),
        (lambda: PeakSearch(low_per_s=1, high_per_s=2, good_share=1.5), "good_share"),
        (lambda: serve(num_requests=0), "num_requests: expected an integer >= 1"),
        (lambda: serve(num_requests=10**11), "num_requests: expected an integer >= 1 and <= 1e+06"),
        (lambda: serve(repeats=10**6), "at most 1,000,000 requests in all, got 4,000,000"),
        (
            lambda: serve(num_requests=10**5, prompt=Lengths(tokens=10**4)),
            "at most 250,000,000 prompt tokens in all, got 1,000,000,000",
        ),
        (
            lambda: serve(
                arrivals=Arrivals(),
                slo=Objectives(ttft_ms=1),
                search=PeakSearch(low_per_s=1, high_per_s=1e6, duration_s=1e7),
            ),
            "at most 1,000,000 requests in all, got 10,000,000,000,001. They are built before "
            "anything is sent; lower its search.high_per_s",
        ),
        (
            lambda: Arrivals(process="gamma", rate_per_s=1, burstiness=1e308),
            "burstiness: expected a number >= 0.001 and <= 1e+06",
        ),
        (
            lambda: Lengths(distribution="lognormal", tokens=3, std=1e200, high=9),
            "std: expected a number > 0 and <= 1e+08",
        ),
        (
            lambda: TraceSource(path="a.csv", length_scale=1e308),
            "length_scale: expected a number > 0 and <= 1e+06",
        ),
        (lambda: serve(num_requests=None), "num_requests: expected a number without a trace"),
        (
            lambda: serve(max_duration_s=5, min_duration_s=5),
            "min_duration_s: expected below max_duration_s=5, got 5",
        ),
        (lambda: serve(max_concurrency=0), "max_concurrency: expected an integer >= 1"),
        (lambda: serve(prompt=None), "prompt: expected a value for synthetic prompts"),
        (lambda: serve(prompts_file="a"), "prompt: expected null for a prompts_file"),
        (lambda: serve(prompt=None, prompts_file=" "), "expected a JSONL file or null"),
        (
            lambda: serve(prompt=None, prompts_file="a", turns=Turns(num=2, first_tokens=9)),
            "turns.first_tokens: expected null beside a prompts_file",
        ),
        (
            lambda: serve(prompt=None, prompts_file="a", prefixes=Prefixes(num=1, tokens=1)),
            "prefixes: expected none beside",
        ),
        (lambda: serve(turns=Turns(num=3)), "expected a multiple of turns.num=3, got 4"),
        (lambda: serve(trace=TRACE), "prompt: expected null for a trace"),
        (
            lambda: serve(trace=TRACE, prompt=None, output=None),
            "expected trace exactly where scenario.serve.trace is set, got constant",
        ),
        (lambda: serve(arrivals=Arrivals(process="trace")), "got trace with trace=null"),
        (lambda: serve(arrivals=Arrivals()), "rate_per_s: expected a value for process=poisson"),
        (lambda: serve(search=SEARCH), "rate_per_s: expected null for a search"),
        (lambda: serve(search=SEARCH, arrivals=Arrivals()), "slo: expected at least one bound"),
        (lambda: serve(search=SEARCH, arrivals=Arrivals(process="at_once")), "no rate to search"),
        (lambda: serve(seeds=Seeds(arrivals=1)), "seeds.arrivals: expected 0"),
    ],
)
def test_settings_that_cannot_hold_are_refused(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)


def test_a_trace_refuses_what_its_rows_decide():
    fields = {
        "prompt": None,
        "output": None,
        "trace": TRACE,
        "num_requests": None,
        "arrivals": Arrivals(process="trace"),
    }
    assert serve(**fields).longest_tokens() is None
    for change, words in (
        ({"turns": Turns(num=2)}, "turns.num: expected 1 with a trace"),
        ({"seeds": Seeds(order=1)}, "seeds.order: expected null with a trace"),
    ):
        with pytest.raises(ConfigError, match=words):
            serve(**fields, **change)


@pytest.mark.parametrize(
    ("path", "kind"), [("a.csv", "azure"), ("A.CSV", "azure"), ("b.jsonl", "mooncake")]
)
def test_the_format_follows_the_ending(path, kind):
    assert TraceSource(path=path).kind == kind
    assert TraceSource(path=path, format="mooncake").kind == "mooncake"


def test_a_file_has_rows_for_all_repeats_or_for_the_highest_rate():
    file = {"prompt": None, "prompts_file": "a.jsonl"}
    assert serve(repeats=3, **file).num_rows == 12
    poisson = Arrivals(process="poisson")
    assert serve(search=SEARCH, arrivals=poisson, slo=Objectives(ttft_ms=1), **file).num_rows == 41


def test_the_longest_request_counts_prefix_and_earlier_turns():
    config = serve(
        prompt=Lengths(distribution="normal", tokens=8, std=3, high=20),
        prefixes=Prefixes(num=1, tokens=16),
        turns=Turns(num=2),
    )
    assert config.longest_tokens() == 16 + 2 * (20 + 4)
    assert serve(prompt=fixed(8)).longest_tokens() == 12


@pytest.mark.parametrize(
    ("changes", "arrivals"),
    [
        ({"arrivals": Arrivals(process="poisson", rate_per_s=1)}, 2),
        ({"arrivals": Arrivals(process="constant", rate_per_s=1)}, 0),
        ({"arrivals": Arrivals(process="at_once")}, 0),
        (
            {
                "arrivals": Arrivals(process="trace"),
                "trace": TRACE,
                "prompt": None,
                "output": None,
            },
            0,
        ),
    ],
)
def test_a_repeat_has_seeds_of_its_own_where_something_is_drawn(changes, arrivals):
    seeds = serve(repeats=3, **changes).for_repeat(2).seeds
    assert (seeds.prompts, seeds.arrivals) == (2, arrivals)
