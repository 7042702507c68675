"""The keywords of LLM: every field of EngineConfig's classes, and three that stand for several.

`python -m engine.asked.keywords > engine/asked/keyword_types.py` writes their types anew.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from engine.asked.config import EngineConfig, ModelConfig
from engine.asked.kv import KVConfig, KVTransferConfig
from engine.asked.offload import BACKENDS, OffloadConfig
from engine.errors import SPOKEN, ConfigError, EngineError, closest, did_you_mean
from engine.model.spec import ModelSpec
from engine.sealed import Setting, describe_type, from_plain, is_one_of, settings, without_null

COMBINED = {
    "offload_config": "An OffloadConfig or a dict of its fields, in the place of single ones.",
    "kv_transfer_config": "A KVTransferConfig or a dict of its fields, which sizes the host tier "
    "of KV blocks in the place of num_cpu_blocks, cpu_gib and swap_space.",
    "tensor_parallel_size": "1: several GPUs are not available yet.",
}
"""Keywords that are no field of their own."""
_COMBINED_TYPES: Final = {
    "offload_config": "OffloadConfig | dict[str, Any] | None",
    "kv_transfer_config": "KVTransferConfig | dict[str, Any] | None",
    "tensor_parallel_size": "int",
}
NOT_SUPPORTED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "async_scheduling": ((None, True), "a step is always launched behind the one in flight."),
    "attention_backend": ((None, "auto"), "there is one attention for each kind of device."),
    "code_revision": ((None, "main"), "no code of a repository is run."),
    "compilation_config": (
        (None, {}),
        "steps run as CUDA graphs. enforce_eager=True turns it off.",
    ),
    "data_parallel_size": ((1,), "an engine has one GPU."),
    "disable_log_stats": ((True, False), ""),
    "distributed_executor_backend": ((None,), "an engine runs in this process, on one GPU."),
    "download_dir": ((None,), "models are kept in TIGHTFIT_HOME. Set that variable."),
    "enable_chunked_prefill": ((None, True), "prompts are always computed in parts."),
    "enable_expert_parallel": ((False,), "an engine has one GPU."),
    "enable_lora": ((None, False), "there are no adapters. Merge them into the weights first."),
    "enable_sleep_mode": ((False,), "close the engine, and build it again."),
    "generation_config": (("auto", "vllm"), "its end tokens are used. Give SamplingParams."),
    "guided_decoding_backend": ((None, "auto"), "there is none to choose."),
    "hf_overrides": ((None, {}), "config.json is read as it is. Change it in a copy."),
    "hf_token": ((None, False), "log in (`hf auth login`), or set HF_TOKEN."),
    "kv_cache_dtype": (("auto",), "KV is kept in the model's dtype."),
    "kv_cache_memory_bytes": ((None,), "KV takes what is left. Set gpu_memory_gib."),
    "kv_offloading_backend": ((None, "native"), "there is one host tier. Set cpu_gib."),
    "kv_offloading_size": ((None,), "set cpu_gib, the size of the host tier of KV in GiB."),
    "limit_mm_per_prompt": ((None, {}), "models take text only."),
    "logprobs_mode": ((None, "raw_logprobs"), "log-probabilities are those of the plain logits."),
    "max_context_len_to_capture": (
        (None,),
        "graphs are captured by batch. enforce_eager=True: none.",
    ),
    "max_logprobs": ((20,), "each request may ask for up to 20."),
    "max_num_partial_prefills": ((1,), "the token budget decides. Set max_num_batched_tokens."),
    "max_seq_len_to_capture": ((None,), "graphs are captured by batch. enforce_eager=True: none."),
    "mm_processor_kwargs": ((None, {}), "models take text only."),
    "model_impl": ((None, "auto"), "there is one implementation of each family."),
    "model_loader_extra_config": ((None, {}), "there is nothing to configure."),
    "num_gpu_blocks_override": ((None,), "the plan decides. Set gpu_memory_gib."),
    "override_generation_config": ((None, {}), "give SamplingParams."),
    "pipeline_parallel_size": ((1,), "an engine has one GPU."),
    "preemption_mode": ((None,), "a sequence is swapped if the host tier has free blocks."),
    "quantization": (
        (None,),
        "how a checkpoint is quantised is read from its files. quantize='int4' rounds plain "
        "weights at the load; weight_format='lossless' makes them smaller, restored to the bit.",
    ),
    "revision": ((None, "main"), "name the folder of a snapshot, or add a YAML to conf/model."),
    "runner": (("auto", "generate"), "models generate text only."),
    "scheduling_policy": (("fcfs",), "requests are served in the order in which they came."),
    "served_model_name": ((None,), "set model_name."),
    "skip_tokenizer_init": ((False,), "prompts may be token ids; text is not made then."),
    "speculative_config": ((None,), "a step makes one token of a sequence."),
    "structured_outputs_config": ((None, {}), "there is nothing to configure."),
    "task": ((None, "auto", "generate"), "models generate text only."),
    "tokenizer": ((None,), "it is the one in the model's folder."),
    "tokenizer_mode": (("auto",), "transformers chooses the tokenizer."),
    "tokenizer_revision": ((None, "main"), "the tokenizer is the one in the model's folder."),
    "stream_interval": ((1,), "every token is reported as soon as it is there."),
    "trust_remote_code": ((None, False), "no code of a repository is run."),
}
"""Keywords of other engines -> values that change nothing here, and why there is no other."""


class Door(NamedTuple):
    """A function that takes the keywords, as messages name it."""

    name: str
    own: tuple[str, ...] = ()
    """Further keywords that it takes."""


LLM_DOOR: Final = Door("LLM")


def keywords_of(config: type = EngineConfig) -> dict[str, Setting]:
    """Return the keyword of every single setting below a configuration class."""
    found = settings(config, whole=(ModelSpec,))
    return {
        setting.keyword: setting
        for setting in found
        if setting.node is None or setting.node is ModelSpec
    }


def describe_keywords() -> str:
    """Return a line for each keyword: its name, default, type and meaning."""
    lines = []
    for name, setting in sorted(keywords_of().items()):
        default = "" if setting.default is MISSING else f"={setting.default!r}"
        lines.append(f"{name}{default}: {describe_type(setting.hint)}. {setting.help}")
    lines += [f"{name}: {text}" for name, text in COMBINED.items()]
    return as_keywords("\n".join(lines))


def config_from_keywords(
    model: str | ModelConfig,
    keywords: Mapping[str, Any],
    config: type[EngineConfig] = EngineConfig,
    door: Door = LLM_DOOR,
) -> EngineConfig:
    """Return the configuration that the keywords ask for; absent ones keep their defaults.

    `model` is a folder, or a model whose fields keywords replace. `door` is what was called.

    Raises:
        ConfigError: A keyword is unknown, contradicts another, or is not available yet.
    """
    known = keywords_of(config)
    for name, value in keywords.items():
        if name not in known and name not in COMBINED:
            _refuse(name, value, sorted([*known, *COMBINED, *door.own]), door.name)
    size = keywords.get("tensor_parallel_size", 1)
    if size != 1:
        raise ConfigError(
            f"tensor_parallel_size: expected 1 (several GPUs are not available yet), got {size!r}."
        )
    if isinstance(model, ModelConfig):
        found = {item.name: getattr(model, item.name) for item in fields(model)}
    else:
        found = {"name": Path(model).name, "path": str(model)}
    plain: dict[str, Any] = {"model": found}
    for name, value in keywords.items():
        if name in known:
            *nodes, last = known[name].path.split(".")
            into = plain
            for node in nodes:
                into = into.setdefault(node, {})
            into[last] = value
    plain |= _offload(keywords, plain.get("offload", {}), known)
    plain |= _kv(keywords, plain.get("kv", {}))
    asked: EngineConfig = from_plain(config, plain)
    asked.planner.check_length(asked.engine)
    return asked


def _refuse(name: str, value: object, every: list[str], door: str) -> None:
    """Raise ConfigError for a name that is no keyword, unless its value changes nothing here."""
    if name not in NOT_SUPPORTED:
        hint = did_you_mean(name, every) or f" Known: {', '.join(every)}."
        if name == "offload":  # what a configuration and a command line call it
            hint = _for_offload(value)
        if name == "gpu":  # what a command line and `plan` call it
            hint = " A budget is gpu_memory_gib=16. tightfit.plan takes the name of a card."
        raise ConfigError(f"{door}: unknown keyword {name!r}.{hint}")
    inert, why = NOT_SUPPORTED[name]
    if not is_one_of(value, inert):
        raise ConfigError(f"{name}={value!r}: not supported: {why}")


def _for_offload(value: object) -> str:
    """Return what says in Python what offload= does on a command line."""
    if closest(str(value), ["none", *BACKENDS]) == ["none"]:
        return " Remove it: that is the default."
    words = {"auto": "choose=True"} | {each: f"offload_backend={each!r}" for each in BACKENDS[1:]}
    meant = [words[name] for name in closest(str(value), words)] or words.values()
    return f" Did you mean {' or '.join(meant)}?"


def _offload(
    keywords: Mapping[str, Any], single: dict[str, Any], known: Mapping[str, Setting]
) -> dict[str, Any]:
    """Return the node `offload` where offload_config gives it."""
    whole = keywords.get("offload_config")
    if whole is None:
        return {}
    if single:
        given = [
            name for name in keywords if name in known and known[name].path.startswith("offload.")
        ]
        raise ConfigError(
            f"offload_config: expected either offload_config or single fields, got both "
            f"({', '.join(given)}). Remove one of them."
        )
    return {"offload": _object("offload_config", whole, OffloadConfig)}


def _kv(keywords: Mapping[str, Any], single: dict[str, Any]) -> dict[str, Any]:
    """Return the node `kv` where kv_transfer_config sizes its host tier."""
    whole = keywords.get("kv_transfer_config")
    if whole is None:
        return {}
    transfer = _object("kv_transfer_config", whole, KVTransferConfig)
    sizes = [f"{name}={single[name]!r}" for name in KVConfig.SIZES if single.get(name)]
    if sizes:
        raise ConfigError(
            f"kv_transfer_config: expected no other size of the host tier beside it, got "
            f"{', '.join(sizes)}. Remove one of them."
        )
    if not single.get("enable_prefix_caching", True):
        raise ConfigError(
            "enable_prefix_caching: expected true with kv_transfer_config, whose connector finds "
            "prefixes in host memory, got False. Remove it, or ask for a host tier with cpu_gib."
        )
    own = {name: value for name, value in single.items() if name == "block_size"}
    block_size: int = from_plain(KVConfig, own, "kv").block_size
    return {"kv": single | {"enable_prefix_caching": True} | transfer.to_kv(block_size)}


def _object(name: str, given: Any, kind: type) -> Any:
    """Return an object of a class, given as one or as a dict of its fields."""
    if isinstance(given, kind):
        return given
    if isinstance(given, dict):
        return from_plain(kind, given, name)
    raise ConfigError(
        f"{name}: expected an object of {kind.__name__} or a dict of its fields, got {given!r}."
    )


Function = TypeVar("Function", bound=Callable[..., Any])


def takes_keywords(function: Function) -> Function:
    """Give a function with **keywords the signature and the help of every keyword."""
    own = inspect.signature(function)
    named = [item for item in own.parameters.values() if item.kind is not item.VAR_KEYWORD]
    taken = {item.name for item in named}
    signature = own.replace(
        parameters=[*named, *(item for item in _parameters() if item.name not in taken)]
    )
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__doc__ = f"{inspect.getdoc(function)}\n\nKeywords:\n" + textwrap.indent(
        describe_keywords(), "    "
    )
    return function


def _parameters() -> Iterator[inspect.Parameter]:
    only, none = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    for name, setting in sorted(keywords_of().items()):
        default = none if setting.default is MISSING else setting.default
        default = None if name in _NAMED_BY_MODEL else default
        yield inspect.Parameter(name, only, default=default, annotation=setting.hint)
    for name, text in _COMBINED_TYPES.items():
        default = 1 if name == "tensor_parallel_size" else None
        yield inspect.Parameter(name, only, default=default, annotation=text)


_NAMED_BY_MODEL: Final = ("model", "model_name")
"""Keywords that follow from the model where they are not given."""
_TYPES_HEAD: Final = '''\
"""Types of the keywords of LLM, for type checkers and editors. Made by engine/asked/keywords.py."""

from typing import Any, TypedDict

from engine.asked.kv import KVTransferConfig
from engine.asked.offload import OffloadConfig
from engine.model.spec import ModelSpec


class Keywords(TypedDict, total=False):
    """Every keyword of LLM but the model; each may be left out."""

'''
_TEXT_WIDTH: Final = 92


def keyword_types() -> str:
    """Return the module that declares the type of every keyword, its meaning below it."""
    rows = [
        (name, _type_text(setting.hint), as_keywords(setting.help))
        for name, setting in sorted(keywords_of().items())
        if name != "model"
    ]
    rows += [(name, _COMBINED_TYPES[name], text) for name, text in COMBINED.items()]
    lines = [_TYPES_HEAD.rstrip("\n"), ""]
    for name, kind, text in rows:
        lines.append(f"    {name}: {kind}")
        if text:
            lines += textwrap.indent(
                "\n".join(textwrap.wrap(f'"""{text}"""', _TEXT_WIDTH)), "    "
            ).splitlines()
    return "\n".join(lines) + "\n"


def _type_text(hint: Any) -> str:
    """Return a type hint as it is written, without the modules of its names."""
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)


@contextmanager
def in_keywords(*others: type[Exception]) -> Iterator[None]:
    """Let errors and warnings name keywords of LLM where they name keys of a configuration.

    Errors are the engine's, and `others`.
    """
    kinds: tuple[type[Exception], ...] = (EngineError, *others)
    before = SPOKEN.set(as_keywords)
    try:
        yield
    except kinds as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (as_keywords(error.args[0]), *error.args[1:])
        raise
    finally:
        SPOKEN.reset(before)


def as_keywords(text: str) -> str:
    """Return a message with keywords in the place of keys, and values as Python has them."""
    return in_columns(text, _in_keywords)


def in_columns(text: str, worded: Callable[[str], str]) -> str:
    """Return a message whose parts were worded anew.

    Columns, two blanks apart or more, stay where they are.
    """
    lines = []
    for line in text.split("\n"):
        *cells, last = re.split(r"( {2,})", line)
        shown = ""
        for cell, gap in zip(cells[::2], cells[1::2], strict=True):
            words = worded(cell)
            shown += words.ljust(max(len(cell) + len(gap), len(words) + 2 * bool(cell)))
        lines.append(shown + worded(last))
    return "\n".join(lines)


def _in_keywords(text: str) -> str:
    for setting in sorted(keywords_of().values(), key=lambda found: -len(found.path)):
        if setting.path not in text:
            continue  # patterns are many: most are never made
        key, keyword = rf"(?<![\w./]){re.escape(setting.path)}(?![\w./]\w)", setting.keyword
        if without_null(setting.hint) is str:
            text = re.sub(rf"{key}=([a-z]\w*)", rf"{keyword}='\1'", text)
        text = re.sub(key, keyword, text)
    for pattern, words in _IN_PYTHON:
        text = re.sub(pattern, words, text)
    return text


_IN_PYTHON: Final = (
    (r"\boffload=auto(?: \(in Python choose=True\))?", "choose=True"),
    (r"\boffload=(uva|prefetch|experts)\b", r"offload_backend='\1'"),
    (r"\bSet offload=none\b", "Remove the offload settings"),
    (r"\boffload=none\b", "no offload settings"),
    (r"(\b\w+=[^\s,;.]+) (?=\w+=)", r"\1, "),
    (r"(?<==)'?null'?\b|\bnull\b", "None"),
    (r"(?<==)true\b|\btrue(?= or false)|(?<=expected )true\b", "True"),
    (r"(?<==)false\b|(?<=True or )false\b|(?<=expected )false\b", "False"),
)
"""What a configuration writes, and what Python writes for it."""


if __name__ == "__main__":
    sys.stdout.write(keyword_types())
