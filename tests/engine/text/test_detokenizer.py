import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from engine.text import sessions
from engine.text.sessions import WINDOW_TOKENS

LINES = [
    "the cat sat on the mat, and the dog sat on the log.",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002",
    "na\u00efve caf\u00e9 \N{GRINNING FACE}\N{WAVING HAND SIGN}\U0001f3fd",
    "tabs\tand\nnew lines, 12345, \N{REPLACEMENT CHARACTER} kept",
]


def wrap(backend):
    from transformers import PreTrainedTokenizerFast

    backend.add_special_tokens([AddedToken("<|mark|>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )


@pytest.fixture(scope="module")
def byte_level():
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    return wrap(backend)


@pytest.fixture(scope="module")
def byte_fallback():
    words = [
        "<|end|>",
        "\u2581",
        "\u2581\u2581",
        "\u2581the",
        "\u2581cat",
        "s",
        ".",
        "<0x",
        "\u00e9",
    ]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + at for at, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrap(backend)


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


class IncrementalDetokenizer(sessions.IncrementalDetokenizer):
    """Keeps all text that is final."""

    text = ""

    def append(self, token_id):
        piece = super().append(token_id)
        self.text += piece
        return piece

    def finish(self):
        piece = super().finish()
        self.text += piece
        return piece


def run(tokenizer, ids, stop=(), **options):
    """Feed all tokens, up to a stop; check that pieces add up; return (pieces, detokenizer)."""
    found = IncrementalDetokenizer(tokenizer, stop, **options)
    pieces = []
    for token_id in ids:
        if found.stop_reason is not None:
            break
        pieces.append(found.append(token_id))
        assert found.text == "".join(pieces)
    pieces.append(found.finish())
    assert found.text == "".join(pieces)
    return pieces, found


def test_text_comes_as_soon_as_it_is_complete(byte_level):
    for line in LINES:
        ids = byte_level.encode(line)
        assert decode(byte_level, ids) == line
        found = IncrementalDetokenizer(byte_level)
        for at, token_id in enumerate(ids):
            found.append(token_id)
            so_far = decode(byte_level, ids[: at + 1])
            assert found.text == so_far.rstrip("\ufffd")
        found.finish()
        assert found.text == line


def test_emoji_is_held_back_until_its_last_byte(byte_level):
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "\N{WINKING FACE}"
    ids = [byte_level.convert_tokens_to_ids(char) for char in alphabet.pre_tokenize_str(text)[0][0]]
    assert len(ids) == 4
    pieces, _ = run(byte_level, [*ids, byte_level.encode("a")[0]])
    assert pieces == ["", "", "", text, "a", ""]
    pieces, _ = run(byte_level, ids[:3])
    assert pieces == ["", "", "", "\ufffd"]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_whole(byte_level, byte_fallback, data):
    tokenizer = data.draw(st.sampled_from([byte_level, byte_fallback]))
    size = len(tokenizer)
    few = data.draw(st.lists(st.integers(0, size + 2), min_size=1, max_size=6))
    ids = data.draw(
        st.lists(st.integers(0, size + 2), max_size=12)
        | st.lists(st.sampled_from(few), max_size=3 * WINDOW_TOKENS)
    )
    whole = decode(tokenizer, ids)
    pieces, _ = run(tokenizer, ids)
    assert "".join(pieces) == whole


def test_tokens_without_text_do_not_end_a_run_of_bytes(byte_fallback):
    mark, unknown = byte_fallback.convert_tokens_to_ids("<|mark|>"), len(byte_fallback) + 1
    cat = byte_fallback.convert_tokens_to_ids("\u2581cat")
    pieces, _ = run(byte_fallback, [0xC3, mark, unknown, 0xA9, cat, 0x41, unknown, 0x80, cat])
    assert pieces == ["", "", "", "", "\u00e9 cat", "", "", "", "\ufffd\ufffd cat", ""]


@pytest.mark.thorough
@settings(max_examples=15, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_survives(byte_level, byte_fallback, text):
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode(text)
        pieces, _ = run(tokenizer, ids)
        assert "".join(pieces) == decode(tokenizer, ids)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    line=st.sampled_from(LINES),
    stop=st.lists(st.text(alphabet="aehmnost ,.\u4f60\u4e16", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_end_the_text(byte_level, data, line, stop):
    at = data.draw(st.integers(0, len(line) - 1))
    stop = [*stop, line[at : at + data.draw(st.integers(1, 9))]]
    ends = [(line.find(s) + len(s), line.find(s), s) for s in stop if s in line]
    _, cut, reason = min(ends)
    ids = byte_level.encode(line)
    pieces, found = run(byte_level, ids, stop)
    assert ("".join(pieces), found.stop_reason) == (line[:cut], reason)


def test_stop_string_over_several_tokens_and_false_starts(byte_level):
    ids = [byte_level.convert_tokens_to_ids(char) for char in "ababacx"]
    pieces, found = run(byte_level, ids, ["abac"])
    assert (pieces, found.stop_reason) == (["", "", "", "ab", "", "", ""], "abac")
    pieces, found = run(byte_level, ids[:5], ["abac"])
    assert (pieces, found.stop_reason) == (["", "", "", "ab", "", "aba"], None)


def test_the_stop_that_is_complete_first_wins(byte_level):
    ids = byte_level.encode("the cat sat")
    for stop, text, reason in (
        (["cat sat", "cat"], "the ", "cat"),
        (["at", "cat"], "the ", "cat"),
        (["t s", "cat"], "the ", "cat"),
        (["sat", "dog"], "the cat ", "sat"),
    ):
        _, found = run(byte_level, ids, stop)
        assert (found.text, found.stop_reason) == (text, reason)


def test_stop_string_in_text_that_was_held_back_to_the_end(byte_fallback):
    ids = [byte_fallback.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in b"abc"]
    pieces, found = run(byte_fallback, ids, ["bc"])
    assert (pieces, found.stop_reason) == (["", "", "", "a"], "bc")


def test_min_tokens_lets_early_stops_pass(byte_level):
    ids = [byte_level.convert_tokens_to_ids(char) for char in "abab"]
    for min_tokens, text, reason in (
        (0, "", "ab"),
        (2, "", "ab"),
        (3, "ab", "ab"),
        (4, "ab", "ab"),
        (5, "abab", None),
    ):
        _, found = run(byte_level, ids, ["ab"], min_tokens=min_tokens)
        assert (found.text, found.stop_reason) == (text, reason)


def test_early_stop_inside_the_beginning_of_another_stays_passed(byte_level):
    ids = [byte_level.convert_tokens_to_ids(char) for char in "xabcab"]
    _, found = run(byte_level, ids[:4], ["ab", "xabyz"], min_tokens=4)
    assert (found.text, found.stop_reason) == ("xabc", None)
    _, found = run(byte_level, ids, ["ab", "xabyz"], min_tokens=4)
    assert (found.text, found.stop_reason) == ("xabc", "ab")


def byte_ids(tokenizer, values):
    """Tokens of single bytes in the byte-level alphabet."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    chars = {byte: chr(byte) for byte in kept}
    chars |= {byte: chr(0x100 + at) for at, byte in enumerate(moved)}
    return [tokenizer.convert_tokens_to_ids(chars[byte]) for byte in values]


@pytest.mark.parametrize(
    "pattern", [b"\x80", b"\xe2\x82", b"\xf0\x9f\x98", b"\xf0", b"\xe2\x82\x80\x80", b"\xff\xe2"]
)
@pytest.mark.parametrize("end", [b"", b"\xac", b"\x98\x80", b"x"])
def test_broken_bytes_do_not_pile_up(byte_level, pattern, end):
    ids = byte_ids(byte_level, pattern * (400 // len(pattern)))
    found = IncrementalDetokenizer(byte_level)
    for token_id in ids:
        found.append(token_id)
        assert len(found._window) <= WINDOW_TOKENS + 1
    assert len(found.text) >= 400 // len(pattern) - WINDOW_TOKENS
    ids += byte_ids(byte_level, end)
    for token_id in ids[len(ids) - len(end) :]:
        found.append(token_id)
    found.finish()
    assert found.text == decode(byte_level, ids)


MARK, END = "<|mark|>", "<|end|>"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (MARK, "the cat\n"),
        (f"\n{MARK}", "the cat"),
        (f"at\n{MARK}\nthe", "the c"),
        (f"{MARK}\nthe d", "the cat\n"),
        (f"dog{MARK}{END}", "the cat\n\nthe "),
    ],
)
def test_a_stop_string_may_hold_special_tokens(byte_level, byte_fallback, stop, text):
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode(f"the cat\n{MARK}\nthe dog{MARK}{END} and on")
        _, found = run(tokenizer, ids, ["<|ma", "rk|>", "never", stop])
        assert (found.text, found.stop_reason) == (text, stop)


def test_a_special_token_counts_once_enough_tokens_came(byte_level):
    a, mark = byte_level.encode("a")[0], byte_level.encode(MARK)[0]
    for min_tokens, text in ((2, "a"), (3, "aa"), (4, "aa"), (5, "aaa")):
        _, found = run(byte_level, [a, mark, a, mark, a], [MARK], min_tokens=min_tokens)
        assert found.text == text
        assert found.stop_reason == (MARK if min_tokens < 5 else None)


def test_a_special_token_within_the_bytes_of_a_character_hides_nothing(byte_level, byte_fallback):
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False)
    wink = "\N{WINKING FACE}"
    by_char = byte_level.convert_tokens_to_ids(list(alphabet.pre_tokenize_str(wink)[0][0]))
    for tokenizer, bytes_of_it in ((byte_level, by_char), (byte_fallback, [*wink.encode()])):
        mark, cat = tokenizer.encode(MARK)[0], tokenizer.encode("the cat")
        for at in range(1, 4):
            ids = [*bytes_of_it[:at], mark, *bytes_of_it[at:], *cat]
            _, found = run(tokenizer, ids, [MARK + "!"])
            assert (found.text, found.stop_reason) == (decode(tokenizer, ids), None)
            _, found = run(tokenizer, [*ids, mark], [f"t{MARK}"])
            assert (found.text, found.stop_reason) == (decode(tokenizer, ids)[:-1], f"t{MARK}")


def test_plain_text_that_spells_a_special_token_stops_too(byte_level):
    ids = byte_level.convert_tokens_to_ids(list("a" + MARK))
    _, found = run(byte_level, ids, [MARK])
    assert (found.text, found.stop_reason) == ("a", MARK)


@pytest.mark.thorough
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stop_strings_end_the_text_where_it_is_read_with_special_tokens(byte_level, data):
    words = st.sampled_from(["the", " cat", " sat", ".", MARK, END])
    whole = "".join(data.draw(st.lists(words, min_size=1, max_size=12)))
    stop = data.draw(st.lists(st.lists(words, min_size=1, max_size=3).map("".join), max_size=3))
    ends = [(whole.find(s) + len(s), whole.find(s), s) for s in stop if s in whole]
    _, cut, reason = min(ends, default=(0, len(whole), None))
    _, found = run(byte_level, byte_level.encode(whole), stop)
    text = whole[:cut].replace(MARK, "").replace(END, "")
    assert (found.text, found.stop_reason) == (text, reason)
