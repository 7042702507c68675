"""The tokenizer that a GGUF file's metadata describes, as transformers' class for it."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from engine.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that text is searched for before it is split."""
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "llama-bpe": _WORDS % r"\p{N}{1,3}",
        "llama3": _WORDS % r"\p{N}{1,3}",
        "llama-v3": _WORDS % r"\p{N}{1,3}",
        "qwen2": _WORDS % r"\p{N}",
    }
)
"""How text is split before merges, by tokenizer.ggml.pre, where it is not as GPT-2 does."""
_LIKE_GPT2: Final = ("default", "gpt-2", "smollm")
_WITHOUT_MERGES: Final = ("llama-bpe", "llama3", "llama-v3")
"""Those that take a word that is a token whole, whatever its merges."""


def gguf_tokenizer(file: Path, first: Path, metadata: Mapping[str, Any]) -> Any:
    """Return the tokenizer of a model.

    Args:
        file: What messages name.
        first: The file that has the metadata.
        metadata: Of the model.

    Raises:
        CheckpointError: It is of a kind that is not supported, or damaged.
    """
    kind = metadata.get("tokenizer.ggml.model")
    try:
        found = _bpe(metadata) if kind == "gpt2" else _of_transformers(first)
        _set_first(found, metadata, is_usual=kind == "llama")
    except Exception as error:  # the tokenizers library raises nothing narrower
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{file}: the tokenizer ({kind}, {metadata.get('tokenizer.ggml.pre')}) cannot be made "
            f"({type(error).__name__}: {reason}). Use the original checkpoint's folder."
        ) from error
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        found.chat_template = template
    return found


def _bpe(metadata: Mapping[str, Any]) -> Any:
    """Return a byte-level BPE."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pre
    from transformers import PreTrainedTokenizerFast

    word = metadata.get("tokenizer.ggml.pre", "default")
    if word not in _SPLITS and word not in _LIKE_GPT2:
        known = ", ".join([*_LIKE_GPT2, *_SPLITS])
        raise ValueError(f"expected tokenizer.ggml.pre among {known}, got {word}")
    words = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    model = models.BPE(
        vocab={text: at for at, text in enumerate(words)},
        merges=merges,
        ignore_merges=word in _WITHOUT_MERGES,
    )
    tokenizer = Tokenizer(model)
    if word == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    before: list[Any] = [pre.Digits(individual_digits=True)] if word == "smollm" else []
    if word in _SPLITS:
        before = [pre.Split(Regex(_SPLITS[word]), "isolated")]
    last = pre.ByteLevel(add_prefix_space=False, use_regex=word not in _SPLITS)
    tokenizer.pre_tokenizer = pre.Sequence([*before, last])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(words))
    for text, kind in zip(words, kinds, strict=True):
        if kind in {_CONTROL, _USER_DEFINED}:
            is_control = kind == _CONTROL
            added = AddedToken(text, special=is_control, normalized=False)
            (tokenizer.add_special_tokens if is_control else tokenizer.add_tokens)([added])
    named = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        at = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if at is not None and 0 <= at < len(words):
            named[f"{name}_token"] = words[at]
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)


def _of_transformers(first: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(first.parent), gguf_file=first.name, local_files_only=True
    )


def _set_first(tokenizer: Any, metadata: Mapping[str, Any], *, is_usual: bool) -> None:
    """Let a text begin with the first token, or not, as the file says."""
    from tokenizers import processors

    token = tokenizer.bos_token
    wanted = metadata.get("tokenizer.ggml.add_bos_token", is_usual) and token is not None
    has = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id] and token is not None
    if wanted == has:
        return
    single = f"{token} $A" if wanted else "$A"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B",
        special_tokens=[(token, tokenizer.bos_token_id)] if wanted else [],
    )
