"""Tokenizer, chat template, end-of-sequence tokens and sampling defaults of a model."""

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from engine.asked.sampling import SamplingParams
from engine.errors import CheckpointError, EngineError, RequestError
from engine.model.gguf import files_of, is_gguf, read_gguf
from engine.text.messages import Messages, plain_messages

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
SAMPLING_DEFAULTS: Final = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Keys of generation_config.json -> parameters of sampling."""


def load_tokenizer(folder: Path | str | None) -> Any | None:
    """Return the folder's transformers tokenizer, or None if it has no tokenizer files.

    Raises:
        EngineError: transformers cannot be imported beside an installed package named kernels.
        CheckpointError: The tokenizer's files are damaged.
    """
    if folder is not None and is_gguf(folder):
        return _of_gguf(Path(folder))
    if folder is None or not any(Path(folder, name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        from transformers import AutoTokenizer  # slow, and not needed for ids
    except ImportError as error:
        raise _clash(error) from error
    try:
        config = _classless_config(Path(folder))
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, config=config)
    except Exception as error:  # the tokenizers library raises nothing narrower
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{folder}: the tokenizer cannot be loaded ({type(error).__name__}: {reason}). Fetch "
            "its files again, or remove them and send token ids."
        ) from error


def _classless_config(folder: Path) -> Any | None:
    """Return config.json without its model's class, whose import takes seconds.

    None where transformers needs the class: tokenizer_config.json names no tokenizer.
    """
    from transformers import PreTrainedConfig

    files = [folder / name for name in ("config.json", "tokenizer_config.json")]
    if not all(file.is_file() for file in files):
        return None
    config, asked = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    if not isinstance(config, dict) or not isinstance(asked, dict):
        return None
    if not asked.get("tokenizer_class"):
        return None
    return PreTrainedConfig.from_dict(config | {"_name_or_path": str(folder)})


def encode(tokenizer: Any | None, text: str) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        RequestError: There is no tokenizer, or it cannot encode the text.
    """
    if tokenizer is None:
        raise RequestError(
            "prompt: expected token ids, got text: this model has no tokenizer. "
            "Pass a list of token ids.",
            param="prompt",
        )
    try:
        return list(tokenizer(text, verbose=False)["input_ids"])  # lengths are checked after
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"prompt: expected text that the tokenizer can encode, got {text[:20]!r} "
            f"({error}). Remove lone surrogates.",
            param="prompt",
        ) from error


def _clash(error: ImportError) -> Exception:
    """Name the package whose name is that of our folder kernels/, where it is installed.

    transformers looks for the package by that name and then takes names from our folder.
    """
    try:
        found = version("kernels")
    except PackageNotFoundError:
        return error
    return EngineError(
        f"tokenizer: transformers failed to import ({error}). The package kernels {found} is "
        "installed, and its name is that of this project's folder. Run: pip uninstall kernels"
    )


def eos_token_ids(folder: Path | None, vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence tokens that generation_config.json or config.json names.

    Ids outside the vocabulary name no token and are left out; -1 is written where there is none.

    Args:
        folder: A checkpoint's folder; None: there is none.
        vocab_size: Token ids are below it.

    Raises:
        CheckpointError: A file is not an object in JSON, or names something else than token ids.
    """
    if folder is None:
        return frozenset()
    if is_gguf(folder):
        metadata = read_gguf(folder).metadata
        ids = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot"))
        return frozenset(i for i in ids if i is not None and 0 <= i < vocab_size)
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.is_file():
            found = _eos_of(file)
            if found is not None:
                return frozenset(i for i in found if 0 <= i < vocab_size)
    return frozenset()


def sampling_defaults(folder: Path | None) -> dict[str, Any]:
    """Return the sampling parameters that generation_config.json names; null names none.

    Raises:
        CheckpointError: It is not an object in JSON, or a value is out of bounds.
    """
    file = None if folder is None or is_gguf(folder) else folder / "generation_config.json"
    if file is None or not file.is_file():
        return {}
    content = _object_of(file)
    found = {
        name: content[key]
        for key, name in SAMPLING_DEFAULTS.items()
        if content.get(key) is not None
    }
    try:
        SamplingParams(**found).check()
    except RequestError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return found


def _object_of(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # bytes that are no text, too
        raise CheckpointError(f"{file}: not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected an object, got {type(content).__name__}.")
    return content


def _eos_of(file: Path) -> frozenset[int] | None:
    value = _object_of(file).get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if any(type(item) is not int for item in ids):
        raise CheckpointError(
            f"{file}: eos_token_id: expected a token id or a list of them, got {value!r}. Fetch it "
            "again."
        )
    return frozenset(ids)


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
"""Kinds of tokenizer.ggml.pre that take a word that is a token whole, whatever its merges."""


def _of_gguf(file: Path) -> Any | None:
    """Return the tokenizer of a GGUF file, None without one."""
    metadata = read_gguf(file).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise _clash(error) from error
    kind, first = metadata.get("tokenizer.ggml.model"), files_of(file)[0]
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


def chat_tokens(tokenizer: Any | None, messages: Messages, /, **template: Any) -> list[int]:
    """Return the tokens of a conversation; arguments and errors are those of `chat_text`."""
    text = chat_text(tokenizer, messages, **template)
    assert tokenizer is not None
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def chat_text(tokenizer: Any | None, messages: Messages, /, **template: Any) -> str:
    """Return a conversation as the text that the model goes on with, special tokens included.

    Args:
        tokenizer: A tokenizer of transformers; None: the model has none.
        messages: One conversation.
        **template: For apply_chat_template.

    Raises:
        RequestError: There is no tokenizer or template, or it refuses the messages.
    """
    if tokenizer is None:
        raise RequestError(
            "messages: expected a model with a tokenizer, this one has none. Use generate with "
            "token ids.",
            param="messages",
        )
    messages = plain_messages(messages)
    given = {"add_generation_prompt": True, **template}
    if not given.get("chat_template") and not tokenizer.chat_template:
        raise RequestError(
            "messages: expected a model with a chat template, this one has none: it was not "
            "trained on conversations. Use generate, or give chat_template.",
            param="messages",
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **given))
    except Exception as error:  # a template raises what it likes
        reason = " ".join(str(error).split())[:300]
        raise RequestError(
            f"messages: the chat template refuses them ({type(error).__name__}: {reason}). Change "
            "the messages, or give another chat_template.",
            param="messages",
        ) from error
