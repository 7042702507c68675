import json

import pytest

from harness.work.prompts import PromptError, encode_rows, read_prompts, synthetic_prompts


def synthetic(count=8, length=16, **changes):
    fields = {"vocab_size": 50, "seed": 3, "stream": "latency", "avoid": [0, 1, 2]}
    return synthetic_prompts(count, length, **(fields | changes))


def test_synthetic_prompts_are_the_same_for_the_same_seed():
    assert synthetic() == synthetic()
    assert synthetic() != synthetic(seed=4)


def test_synthetic_prompts_are_distinct_of_set_length_and_avoid_ids():
    prompts = synthetic(40, 2)
    assert len({tuple(prompt) for prompt in prompts}) == 40
    assert {len(prompt) for prompt in prompts} == {2}
    assert all(3 <= token < 50 for prompt in prompts for token in prompt)


def test_two_streams_share_no_prompt():
    timed = {tuple(prompt) for prompt in synthetic(200, 8)}
    warm = {tuple(prompt) for prompt in synthetic(200, 8, stream="latency/warm-up")}
    assert not timed & warm


def test_every_possible_prompt_can_be_asked_for():
    assert len(synthetic(47, 1)) == 47


def test_more_prompts_than_there_are_is_refused():
    with pytest.raises(PromptError, match="48 distinct prompts of 1 tokens, got 47 usable"):
        synthetic(48, 1)


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_of_text_and_of_ids(tmp_path):
    path = write(tmp_path, '{"prompt": "ab", "extra": 1}', "", '{"prompt_token_ids": [7, 8]}')
    rows = read_prompts(path, 2)
    assert [row.line for row in rows] == [1, 3]

    class Encoder:
        def encode(self, text):
            return [ord(char) for char in text]

    assert encode_rows(rows, Encoder()) == [[97, 98], [7, 8]]
    with pytest.raises(PromptError, match="line 1: the model has no tokenizer"):
        encode_rows(rows, None)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: expected an object, got list"),
        ('{"text": "a"}', "line 2: expected one of prompt and prompt_token_ids"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "line 2: expected one of"),
        ('{"prompt": ""}', "line 2: expected a text that is not empty, got ''"),
        (r'{"prompt": "a \ud800"}', "line 2: expected a text without lone surrogates"),
        ('{"prompt_token_ids": [' + "1" * 5000 + "]}", "line 2: not JSON"),
        ("[" * 100_000, "line 2: brackets nested too deep"),
        ('{"prompt": "a", "prompt": "b"}', "line 2: 'prompt' stands there twice"),
        ('{"prompt": 5}', "line 2: expected a text that is not empty, got 5"),
        ('{"prompt_token_ids": []}', r"line 2: expected whole numbers from 0, got \[\]"),
        ('{"prompt_token_ids": [1, -2]}', r"line 2: expected whole numbers from 0"),
        ('{"prompt_token_ids": [true]}', r"line 2: expected whole numbers from 0"),
    ],
)
def test_a_malformed_row_is_named_by_its_line(tmp_path, line, problem):
    path = write(tmp_path, '{"prompt": "fine"}', line)
    with pytest.raises(PromptError, match=problem):
        read_prompts(path, 1)


def test_a_row_ends_at_the_line_feed_alone(tmp_path):
    path = tmp_path / "prompts.jsonl"
    texts = ["a\u2028b", "c\x85d", "e\u2029f"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8", newline="")
    assert [row.text for row in read_prompts(path, 3)] == texts


def test_too_few_rows_are_refused(tmp_path):
    with pytest.raises(PromptError, match=r"at least 3 rows, .* got 1"):
        read_prompts(write(tmp_path, '{"prompt": "a"}'), 3)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(PromptError, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl", 1)


def test_a_file_in_another_encoding_is_refused_with_its_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(PromptError, match="line 2 has the byte 0xe9"):
        read_prompts(path, 1)
