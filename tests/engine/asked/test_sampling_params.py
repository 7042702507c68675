import copy
import inspect
import math
import pickle

import numpy as np
import pytest

from engine.asked.sampling import MAX_BIASES, MAX_N, NOT_SUPPORTED, SamplingParams
from engine.errors import RequestError


def test_defaults_and_common_values_pass():
    SamplingParams().check()
    SamplingParams(
        n=2,
        temperature=0,
        top_p=np.float64(0.5),
        top_k=-1,
        min_p=1,
        repetition_penalty=1.3,
        frequency_penalty=-2,
        presence_penalty=2,
        logit_bias={0: -100, 9: 100.0},
        seed=-(2**63),
        stop=["a", "bc"],
        stop_token_ids=[0, 7],
        max_tokens=None,
        min_tokens=10_000,
        ignore_eos=True,
        logprobs=0,
        cache_salt="a",
    ).check()


BAD = [
    ("n", 0, ">= 1"),
    ("n", MAX_N + 1, f"<= {MAX_N}"),
    ("n", True, "integer"),
    ("n", 1.0, "integer"),
    ("temperature", -0.1, ">= 0"),
    ("temperature", math.nan, "finite"),
    ("temperature", math.inf, "finite"),
    ("temperature", 10**400, "finite"),
    ("temperature", "1", "number"),
    ("temperature", None, "number"),
    ("temperature", False, "number"),
    ("top_p", 0, "> 0 and <= 1"),
    ("top_p", 1.01, "<= 1"),
    ("top_p", math.nan, "finite"),
    ("top_k", -2, ">= -1"),
    ("top_k", 1.5, "integer"),
    ("min_p", -0.1, ">= 0"),
    ("min_p", 1.1, "<= 1"),
    ("repetition_penalty", 0, "> 0"),
    ("repetition_penalty", -1.0, "> 0"),
    ("repetition_penalty", math.inf, "finite"),
    ("frequency_penalty", 2.1, ">= -2 and <= 2"),
    ("frequency_penalty", math.nan, "finite"),
    ("presence_penalty", -2.1, ">= -2 and <= 2"),
    ("presence_penalty", None, "number"),
    ("logit_bias", {"5": 1}, "integer"),
    ("logit_bias", {-1: 1}, ">= 0"),
    ("logit_bias", {5: 101}, "<= 100"),
    ("logit_bias", {5: math.nan}, "finite"),
    ("logit_bias", [[5, 1]], "dict"),
    ("seed", 2**63, "<= 9.22337e+18"),
    ("seed", 1.5, "integer"),
    ("seed", True, "integer"),
    ("stop", "", "at least one character"),
    ("stop", ["a", ""], "at least one character"),
    ("stop", [1], "at least one character"),
    ("stop", 7, "list of strings"),
    ("stop_token_ids", [-1], ">= 0"),
    ("stop_token_ids", [True], "integer"),
    ("stop_token_ids", 5, "list of token ids"),
    ("max_tokens", 0, ">= 1"),
    ("max_tokens", 2.0, "integer"),
    ("min_tokens", -1, ">= 0"),
    ("min_tokens", None, "integer"),
    ("min_tokens", 17, "max_tokens=16"),
    ("ignore_eos", 1, "True or False"),
    ("cache_salt", "", "at least one character"),
    ("cache_salt", 1, "string"),
    ("logprobs", -1, ">= 0"),
    ("logprobs", 21, "<= 20"),
    ("logprobs", True, "integer"),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD)
def test_a_bad_value_is_refused_at_once_and_when_it_is_set_later(name, value, words):
    with pytest.raises(RequestError, match=name) as at_once:
        SamplingParams(**{name: value})
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(RequestError, match=name) as caught:
        params.copied().check()
    assert str(caught.value) == str(at_once.value)
    message = str(caught.value)
    assert words in message
    assert caught.value.param == name
    shown = (
        [value, *value, *getattr(value, "values", list)()]
        if isinstance(value, (list, dict))
        else [value]
    )
    assert any(f"got {each!r}" in message for each in shown)


def test_many_biases_are_refused():
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES), 1)).check()
    with pytest.raises(RequestError, match="at most 1024 tokens, got 1025") as caught:
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES + 1), 1)).check()
    assert caught.value.param == "logit_bias"


def test_derived_values():
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=1e-300).is_greedy
    assert SamplingParams().stop_strings == []
    assert SamplingParams(stop="ab").stop_strings == ["ab"]
    assert SamplingParams(stop=["a", "b"]).stop_strings == ["a", "b"]


def test_a_name_that_there_is_not_is_refused_with_the_closest_one():
    with pytest.raises(
        RequestError, match=r"unknown parameter 'max_token'\. Did you mean max_tokens\?"
    ):
        SamplingParams(max_token=5)
    with pytest.raises(RequestError, match=r"unknown parameter 'zzz'\. Known: n, temperature, "):
        SamplingParams(zzz=5)


def test_names_of_other_engines_are_refused_with_the_reason():
    assert not NOT_SUPPORTED.keys() & SamplingParams.__dataclass_fields__.keys()
    for name, (_, why) in NOT_SUPPORTED.items():
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: "other"})
        assert str(caught.value) == f"{name}='other': not supported: {why}"
        assert why.endswith(".")


def test_values_of_other_engines_that_change_nothing_are_taken():
    for name, (inert, _) in NOT_SUPPORTED.items():
        for value in inert:
            assert SamplingParams(top_k=3, **{name: value}) == SamplingParams(top_k=3)
    assert "skip_special_tokens" not in inspect.signature(SamplingParams).parameters
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        SamplingParams(0.5)


def test_copies_are_alike():
    params = SamplingParams(n=2, stop=["a"], logit_bias={1: 2.0})
    assert params.copied() == copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert params.copied().stop is not params.stop


def test_only_keyword_arguments():
    with pytest.raises(TypeError):
        SamplingParams(2)


def test_a_field_that_there_is_not_cannot_be_set():
    with pytest.raises(AttributeError, match="max_token"):
        SamplingParams().max_token = 5
