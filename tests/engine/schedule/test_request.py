import numpy as np
import pytest

from engine.asked.request import Request, SampledToken, Sequence, check_request
from engine.asked.sampling import SamplingParams
from engine.errors import EngineError, RequestError


def request(ids, **params):
    return Request(request_id="r", prompt_token_ids=ids, params=SamplingParams(**params))


def check(ids, *, max_model_len=8, vocab_size=10, eos=(), **params):
    check_request(request(ids, **params), max_model_len, vocab_size, eos_token_ids=eos)


def test_servable_requests_pass():
    check([0])
    check([9] * 7)
    check([np.int64(3), 1])
    check([1], stop_token_ids=[9], min_tokens=1)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "at least one token"),
        ([1] * 8, "at most 7 tokens"),
        ([1] * 8, "got 8"),
        ([1] * 8, r"max_model_len=8"),
        ([1, 10], "0 to 9"),
        ([1, 10], "got 10 at position 1"),
        ([-1], "got -1"),
        ([1.0], "got 1.0"),
        ([True], "got True"),
        (["a"], "got 'a'"),
        ((1, 2), "got tuple"),
        ("text", "got str"),
    ],
)
def test_bad_prompt_is_refused(ids, words):
    with pytest.raises(RequestError, match="prompt") as caught:
        check(ids)
    assert words in str(caught.value)


def test_bad_params_are_refused():
    with pytest.raises(RequestError, match="temperature"):
        check([1], temperature=-1)
    with pytest.raises(RequestError, match=r"stop_token_ids.*10, got 11"):
        check([1], stop_token_ids=[3, 11])


def test_min_tokens_needs_a_token_that_does_not_stop():
    everything = list(range(9))
    check([1], stop_token_ids=everything, min_tokens=1)
    check([1], stop_token_ids=everything, min_tokens=1, eos=[9], ignore_eos=True)
    check([1], stop_token_ids=everything, min_tokens=1, eos=[-1, 10])
    with pytest.raises(RequestError, match=r"min_tokens=1.*10 stop tokens"):
        check([1], stop_token_ids=everything, min_tokens=1, eos=[9])


def test_request_error_is_both_an_engine_error_and_a_value_error():
    assert issubclass(RequestError, EngineError)
    assert issubclass(RequestError, ValueError)


def test_sequence_views():
    sequence = Sequence(seq_id=0, request=request([5, 6, 7], max_tokens=4))
    assert (sequence.num_tokens, sequence.num_prompt_tokens, sequence.last_token_id) == (3, 3, 7)
    sequence.output_token_ids += [8, 9]
    assert sequence.token_ids == [5, 6, 7, 8, 9]
    assert (sequence.num_tokens, sequence.num_output_tokens, sequence.last_token_id) == (5, 2, 9)
    for start in range(6):
        for stop in range(start, 6):
            assert sequence.tokens(start, stop) == sequence.token_ids[start:stop]
    assert sequence.max_length(100) == 7
    assert sequence.max_length(6) == 6
    sequence.request.params.max_tokens = None
    assert sequence.max_length(100) == 100


def test_completion_is_a_snapshot():
    sequence = Sequence(seq_id=3, request=request([5]), index=1)
    sequence.append(SampledToken(2, -0.5, {2: -0.5}))
    out = sequence.completion("x")
    sequence.append(SampledToken(4, -1.0, {4: -1.0}))
    assert (out.index, out.text, out.token_ids, out.finish_reason) == (1, "x", [2], None)
    assert (out.cumulative_logprob, out.logprobs) == (-0.5, [{2: -0.5}])


def test_tokens_beyond_a_length_are_dropped_with_all_that_is_known_of_them():
    sequence = Sequence(seq_id=0, request=request([5, 6]))
    for token_id, logprob in ((2, -0.1), (3, -0.2), (4, -0.7)):
        sequence.append(SampledToken(token_id, logprob, {token_id: logprob}))
    assert sequence.cumulative_logprob == 0.0 - 0.1 - 0.2 - 0.7
    sequence.cut(4)
    assert (sequence.num_tokens, sequence.output_token_ids) == (4, [2, 3])
    assert sequence.cumulative_logprob == 0.0 - 0.1 - 0.2
    assert sequence.logprobs == [{2: -0.1}, {3: -0.2}]
