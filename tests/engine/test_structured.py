"""Outputs in a form: they parse and validate, and neighbours get the tokens that they get alone."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams, StructuredOutput
from engine.errors import RequestError
from engine.text.constraints import MOST_COMPILED, Constraint
from tests.engine.conftest import TinyModels
from tests.engine.groups import with_blocks
from tests.tiny import VOCAB, greedy_params, make_prompt, open_llm, tokens_of

PROMPTS = [make_prompt(length, seed=9) for length in (3, 12, 30)]
DIGITS = StructuredOutput(regex="[0-9]{2,5}x")


def add_byte_tokenizer(folder: Path) -> None:
    """Save a tokenizer of 151 tokens: bytes of ASCII, some pairs, the end of sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["\u0120", "\u010a", *map(chr, range(33, 127))]
    pairs = [(a, b) for a in '"aeot{[' for b in '":ehnr,}']
    merges = pairs[: VOCAB - 1 - len(letters)]
    words = ["</s>", *letters, *(a + b for a, b in merges)]
    assert len(words) == VOCAB
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


@pytest.fixture(scope="module")
def byte_folder(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("bytes") / "llama"
    shutil.copytree(tiny.folder("llama"), copy)
    add_byte_tokenizer(copy)
    return copy


@pytest.fixture(scope="module")
def writer(byte_folder: Path) -> Iterator[LLM]:
    llm = open_llm(byte_folder, max_model_len=400, max_num_seqs=6, offload_group_size=2)
    yield llm
    llm.close()


def write(llm: LLM, form: StructuredOutput, **params: Any) -> tuple[str, str | None]:
    """Return a text in a form, and why it ended."""
    asked = SamplingParams(**{"max_tokens": 350, "structured": form} | params)
    [output] = llm.generate(PROMPTS[0], asked)
    assert output.error is None
    return output.outputs[0].text, output.outputs[0].finish_reason


names = st.text("abcdef", min_size=1, max_size=4)
leaves = st.one_of(
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-50, 50),
        st.integers(0, 99),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(
            st.one_of(st.none(), st.booleans(), st.integers(-9, 9), names), min_size=1, max_size=3
        ),
    ),
    st.just({"type": "boolean"}),
)


def objects(inner: Any) -> Any:
    def build(properties: dict[str, Any], keep: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:keep],
            "additionalProperties": False,
        }

    return st.builds(build, st.dictionaries(names, inner, max_size=3), st.integers(0, 3))


def arrays(inner: Any) -> Any:
    def build(items: Any, least: int, more: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + more}

    return st.builds(build, inner, st.integers(0, 2), st.integers(0, 2))


schemas = objects(st.recursive(leaves, lambda x: objects(x) | arrays(x), max_leaves=3))


def validates(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is what one of the schemas above describes."""
    if "enum" in schema:
        return any(type(value) is type(x) and value == x for x in schema["enum"])
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "string":
        is_text = isinstance(value, str)
        return is_text and schema["minLength"] <= len(value) <= schema["maxLength"]
    if kind == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(validates(x, schema["items"]) for x in value)
    known = schema["properties"]
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= set(value) <= set(known)
        and all(validates(x, known[name]) for name, x in value.items())
    )


@pytest.mark.thorough
@settings(max_examples=6, deadline=None)
@given(schema=schemas, seed=st.integers(0, 99), as_text=st.booleans(), greedy=st.booleans())
def test_outputs_parse_and_validate(
    writer: LLM, schema: dict[str, Any], seed: int, as_text: bool, greedy: bool
) -> None:
    form = StructuredOutput(json_schema=json.dumps(schema) if as_text else schema)
    kind = {"temperature": 0} if greedy else {"temperature": 1.2, "seed": seed}
    text, reason = write(writer, form, **kind)
    assume(reason == "stop")  # whitespace and escapes may be long
    assert validates(json.loads(text), schema)


def test_every_kind_of_form(writer: LLM) -> None:
    for seed in range(1):
        text, reason = write(writer, DIGITS, seed=seed)
        assert (re.fullmatch("[0-9]{2,5}x", text) is not None, reason) == (True, "stop")
        choice = StructuredOutput(choice=["yes", 'no "\\', "maybe"])
        assert write(writer, choice, seed=seed) in [(x, "stop") for x in choice.choice or ()]
        lark = StructuredOutput(grammar='start: "<" WORD ("," WORD){2} ">"\nWORD: /[a-c]{1,4}/')
        text, reason = write(writer, lark, seed=seed)
        assert (re.fullmatch("<[a-c]{1,4}(,[a-c]{1,4}){2}>", text) is not None, reason) == (
            True,
            "stop",
        )
        text, reason = write(writer, StructuredOutput(json_object=True), seed=seed, max_tokens=40)
        assert text.lstrip().startswith("{")
        if reason == "stop":
            assert isinstance(json.loads(text), dict)


@pytest.mark.thorough
def test_choices_may_be_many_and_begin_alike(writer: LLM) -> None:
    many = [f"{at * 7919} of" for at in range(5000)]
    assert write(writer, StructuredOutput(choice=many), seed=1)[0] in many
    alike = ["a", "ab", "abc"]
    found = {write(writer, StructuredOutput(choice=alike), seed=seed) for seed in range(12)}
    assert found <= {(text, "stop") for text in alike}
    assert len(found) > 1


@pytest.mark.thorough
def test_a_form_of_all_that_may_end_ends_with_the_models_own_token(writer: LLM) -> None:
    text, reason = write(writer, StructuredOutput(regex="[a-z]*"), max_tokens=300)
    assert (text.islower() or not text, reason) == (True, "stop")


@pytest.mark.thorough
def test_neighbours_get_the_tokens_that_they_get_alone(writer: LLM) -> None:
    plain = [greedy_params(20), SamplingParams(seed=3, max_tokens=20, ignore_eos=True)]
    alone = tokens_of(writer.generate(PROMPTS[1:], plain))
    alone += tokens_of(writer.generate(PROMPTS[:1], SamplingParams(seed=4, structured=DIGITS)))
    before = writer.stats()["overlapped_steps"]
    mixed = [*plain, SamplingParams(seed=4, structured=DIGITS)]
    assert tokens_of(writer.generate([*PROMPTS[1:], PROMPTS[0]], mixed)) == alone
    assert writer.stats()["overlapped_steps"] - before >= 18  # neighbours are planned ahead


def test_answers_of_one_request_are_followed_apart(writer: LLM) -> None:
    [output] = writer.generate(PROMPTS[0], SamplingParams(seed=1, n=3, structured=DIGITS))
    texts = [x.text for x in output.outputs]
    assert all(re.fullmatch("[0-9]{2,5}x", text) for text in texts)
    assert len(set(texts)) > 1


def test_log_probabilities_are_those_without_the_form(writer: LLM) -> None:
    params = SamplingParams(temperature=0, logprobs=2, max_tokens=3)
    free = writer.generate(PROMPTS[1], params)[0].outputs[0]
    params.structured = DIGITS
    held = writer.generate(PROMPTS[1], params)[0].outputs[0]
    assert free.logprobs is not None
    assert held.logprobs is not None
    assert list(held.logprobs[0].items())[1:] == list(free.logprobs[0].items())[:2]
    assert held.ranks is not None
    assert held.ranks[0] > 1


@pytest.mark.thorough
def test_preempted_sequences_go_on_in_their_form(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_blocks(monkeypatch, 10)
    llm = open_llm(
        byte_folder,
        max_model_len=64,
        max_num_seqs=4,
        block_size=8,
    )
    form = StructuredOutput(regex="[0-9]{30}")
    params = [SamplingParams(seed=at, max_tokens=40, structured=form) for at in range(4)]
    outputs = llm.generate([PROMPTS[1]] * 4, params)
    assert all(re.fullmatch("[0-9]{30}", x.outputs[0].text) for x in outputs)
    assert llm.stats()["preemptions"] > 0
    llm.close()


BAD: list[tuple[Any, str]] = [
    (StructuredOutput(), "exactly one of .* got none"),
    (StructuredOutput(regex="a", json_object=True), "got json_object, regex"),
    ({"regex": "a"}, "expected a StructuredOutput"),
    (StructuredOutput(regex="[0-9"), "unclosed character class"),
    (StructuredOutput(regex=7), "regex: expected a string"),  # type: ignore[arg-type]
    (StructuredOutput(grammar="start: nothing"), "unknown name"),
    (StructuredOutput(choice=[]), "none empty"),
    (StructuredOutput(choice=["a", ""]), "none empty"),
    (StructuredOutput(json_object=1), "True or False"),  # type: ignore[arg-type]
    (StructuredOutput(json_schema={"type": "words"}), "Invalid type"),
    (StructuredOutput(json_schema="{"), "expected JSON"),
    (StructuredOutput(json_schema="[]"), "expected an object"),
    (StructuredOutput(json_schema={"type": {1, 2}}), "expected JSON"),
    (StructuredOutput(json_schema={"type": "array", "uniqueItems": True}), "uniqueItems"),
    (StructuredOutput(json_schema={"type": "string", "minLength": 3, "maxLength": 1}), "Unsatis"),
]


@pytest.mark.parametrize(("form", "words"), BAD)
def test_a_bad_form_is_an_error_of_its_request(writer: LLM, form: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        writer.add_request(PROMPTS[0], SamplingParams(structured=form))
    assert caught.value.param == "structured"
    assert not writer.has_unfinished()


def test_a_deep_schema_is_refused(writer: LLM) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(9000):
        schema = {"type": "array", "items": schema}
    deep = '{"items":' * 9000 + "{}" + "}" * 9000
    for each in (schema, deep):
        params = SamplingParams(structured=StructuredOutput(json_schema=each))
        with pytest.raises(RequestError, match="structured"):
            writer.add_request(PROMPTS[0], params)


def test_a_schema_is_copied(writer: LLM) -> None:
    schema: dict[str, Any] = {"enum": ["abc"]}
    params = SamplingParams(structured=StructuredOutput(json_schema=schema), max_tokens=20)
    writer.add_request(PROMPTS[0], params)
    schema["enum"].clear()
    text = ""
    while writer.has_unfinished():
        text += "".join(event.text for event in writer.step())
    assert text == '"abc"'


def test_what_a_form_cannot_go_with_is_refused(writer: LLM, llm: LLM, tiny: TinyModels) -> None:
    with pytest.raises(RequestError, match="ignore_eos=False"):
        SamplingParams(structured=DIGITS, ignore_eos=True).check()
    with pytest.raises(RequestError, match="cannot use this model's tokenizer"):
        llm.add_request(PROMPTS[0], SamplingParams(structured=DIGITS))
    bare = open_llm(tiny.folder("llama"))
    with pytest.raises(RequestError, match="this model has no tokenizer"):
        bare.add_request(PROMPTS[0], SamplingParams(structured=DIGITS))
    bare.close()


def test_a_form_that_cannot_be_followed_fails_its_request_alone(
    writer: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = Constraint.mask
    calls: list[int] = []

    def failing(self: Constraint) -> Any:
        calls.append(1)
        if len(calls) == 3:
            self._matcher.consume_token(0)  # a token that may not come
        return mask(self)

    monkeypatch.setattr(Constraint, "mask", failing)
    params = [SamplingParams(seed=1, structured=DIGITS), greedy_params(5)]
    failed, other = writer.generate(PROMPTS[:2], params)
    assert failed.error is not None
    assert "a form that can be followed" in failed.error
    assert failed.outputs[0].finish_reason == "error"
    assert len(failed.outputs[0].token_ids) == 2
    assert (other.error, len(other.outputs[0].token_ids)) == (None, 5)


def test_a_form_that_leaves_no_token_fails_its_request(writer: LLM) -> None:
    params = SamplingParams(structured=StructuredOutput(regex="a*"), min_tokens=3, max_tokens=9)
    params.stop_token_ids = [i for i in range(VOCAB) if i != 40]
    [output] = writer.generate(PROMPTS[0], params)
    assert output.error is not None
    assert "got none. Change the form" in output.error


def test_forms_of_requests_that_wait_stay_compiled(
    writer: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the engine keeps by itself: its thread would compile the first ones again."""
    forms = [StructuredOutput(regex=f"[0-9]{{2}}x{n}") for n in range(MOST_COMPILED + 4)]
    held = [writer.prepare_form(form) for form in forms]
    compiled: list[str] = []
    constraints = writer._sessions.constraints
    compile_form = constraints._compile

    def note(grammar: str) -> object:
        compiled.append(grammar)
        return compile_form(grammar)

    monkeypatch.setattr(constraints, "_compile", note)
    for form in forms:
        constraints.make(form, 1)
    assert compiled == []
    del held
    constraints.make(forms[0], 1)
    assert len(compiled) == 1
