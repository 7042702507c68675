"""What the quantization_config of a config.json says; no torch."""

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from engine.errors import CheckpointError
from engine.model.formats import FORMATS
from engine.model.quantised import ROUTERS, Quantisation
from engine.model.schemes import (
    GGUF_NORM,
    GGUF_ROWS,
    GGUF_TYPES,
    LAYOUTS,
    LINEAR,
    MXFP4,
    Scheme,
    gguf_scheme,
)

SUPPORTED: Final = (
    "AWQ (gemm, 4 bits), GPTQ (4 and 8 bits), compressed-tensors (pack-quantized of 4 and 8 bits, "
    "int-quantized, float-quantized), fp8 (e4m3), bitsandbytes (nf4), MXFP4 (experts of gpt_oss) "
    "and GGUF files (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, F16, BF16, F32)"
)
"""What is said of every checkpoint that is refused."""
COMPRESSED: Final = "compressed-tensors"


def _refused(text: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: quantization_config: {text}. Supported: {SUPPORTED}; or use the bfloat16, "
        "float16 or float32 checkpoint."
    )


def read_quantization(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the content of `spec.quantization` from that of a config.json; empty: all is plain.

    Raises:
        CheckpointError: The checkpoint is quantised in a way that is not supported.
    """
    # The second is the name that compressed-tensors had for it.
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return {}
    if not isinstance(found, Mapping):
        raise _refused(f"expected an object, got {type(found).__name__}")
    method = found.get("quant_method", "unknown")
    is_gpt_oss = config.get("model_type") == "gpt_oss"
    if method not in (*_READERS, COMPRESSED) or (method == MXFP4) != is_gpt_oss:
        raise _refused(f"got quant_method={method!r} with model_type={config.get('model_type')!r}")
    if method == COMPRESSED:  # whose scales are of the model's dtype
        read = _read_compressed(found, dtype if dtype in FORMATS else "float16")
    else:
        read = _READERS[method](found)
    if method in {"awq", "gptq"} and {"num_experts", "num_local_experts"} & config.keys():
        # Their quantisers leave routers as they are, and do not say so.
        read = replace(read, ignore=(*read.ignore, *ROUTERS))
    return read.to_dict()


def quantization_notes(config: Mapping[str, Any]) -> list[str]:
    """Return what is to be said of a config.json whose quantisation is read in part."""
    found = config.get("quantization_config") or config.get("compression_config") or {}
    inputs = found.get("quant_method") == "fp8"
    if found.get("quant_method") == COMPRESSED:
        inputs = any(group.get("input_activations") for group in found["config_groups"].values())
    kinds = {"activations": inputs, "keys and values": bool(found.get("kv_cache_scheme"))}
    named = ", ".join(name for name, is_there in kinds.items() if is_there)
    if not named:
        return []
    return [
        f"checkpoint: weights are quantised; {named} are not quantised here, though "
        "config.json says how: tokens may differ from those of engines that do."
    ]


def _whole(found: Mapping[str, Any], *names: str) -> int:
    """Return a whole number that stands under one of some names."""
    for name in names:
        value = found.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    got = {name: found.get(name) for name in names}
    raise _refused(f"expected a whole number for {names[0]}, got {got[names[0]]!r}")


def _names(found: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return the names of modules that stand under the first of some keys that has any.

    Those that begin with `re:` are regular expressions.
    """
    key = next((key for key in keys if found.get(key)), keys[0])
    names = found.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _refused(f"expected a list of names for {key}, got {names!r}")
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise _refused(f"{key}: {name!r} is no regular expression ({error})") from error
    return tuple(names)


def _plain(found: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return what stays plain: the head, and modules whose names have any of some parts."""
    # As in transformers, a part ends where a name between dots does: gate is no gate_proj.
    names = (name.rstrip(".") for name in _names(found, *keys) if name != "lm_head")
    kept = (rf"re:.*{re.escape(name)}(\.|$)" for name in names)
    return "lm_head", *kept


def _layout_name(found: Mapping[str, Any], old_key: str, default: str) -> str:
    """Return what stands under `format`, or under the key that it had before."""
    names = {str(found[key]).lower() for key in ("format", old_key) if found.get(key)}
    if len(names) > 1:
        raise _refused(f"got format={found['format']!r} beside {old_key}={found[old_key]!r}")
    return names.pop() if names else default


def _read_awq(found: Mapping[str, Any]) -> Quantisation:
    """Read what AutoAWQ writes; a scale is float16 there whatever the model's dtype is."""
    version = _layout_name(found, "version", "gemm")
    bits, group = _whole(found, "bits", "w_bit"), _whole(found, "group_size", "q_group_size")
    if version != "gemm":
        raise _refused(f"got AWQ with version={version!r}, expected gemm")
    if bits != 4:
        raise _refused(f"got AWQ with {bits} bits, expected 4")
    if found.get("zero_point", True) is not True:
        raise _refused("got AWQ with zero_point=false, expected true")
    scheme = Scheme("awq", 4, 0 if group == -1 else group)
    return Quantisation("awq", (((LINEAR,), scheme),), _plain(found, "modules_to_not_convert"))


def _read_gptq(found: Mapping[str, Any]) -> Quantisation:
    """Read what AutoGPTQ and GPTQModel write.

    Of `dynamic`, the first rule that a module's name begins with counts there; one that begins with
    a minus leaves modules plain, another changes how they are stored.
    """
    rules = found.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise _refused(f"got GPTQ with dynamic={rules!r}, expected an object")
    ignore, schemes, others = [] if found.get("lm_head") else ["lm_head"], [], ""
    for rule, changes in rules.items():
        pattern = rule.removeprefix("-:").removeprefix("+:")
        if rule.startswith("-:"):
            ignore += _names({"dynamic": [f"re:{others}(?:{pattern})"]}, "dynamic")
            continue
        if not isinstance(changes, Mapping) or changes.keys() - _GPTQ_CHANGES:
            raise _refused(
                f"got GPTQ with the dynamic rule {rule!r}: {changes!r}, expected changes of "
                f"{', '.join(sorted(_GPTQ_CHANGES))}"
            )
        schemes.append(
            (_names({"dynamic": [f"re:{pattern}"]}, "dynamic"), _gptq_scheme({**found, **changes}))
        )
        others += f"(?!{pattern})"  # what is ignored is asked for first
    return Quantisation("gptq", (*schemes, ((LINEAR,), _gptq_scheme(found))), tuple(ignore))


_GPTQ_CHANGES: Final = frozenset({"bits", "group_size", "desc_act", "sym"})
"""What a rule may change; whether zero points are symmetric is in them."""


def _gptq_scheme(found: Mapping[str, Any]) -> Scheme:
    """Return how a module is stored by AutoGPTQ and GPTQModel."""
    bits, group = _whole(found, "bits"), _whole(found, "group_size")
    version = _layout_name(found, "checkpoint_format", "gptq")
    if bits not in {4, 8}:
        raise _refused(f"got GPTQ with {bits} bits, expected 4 or 8")
    if version not in {"gptq", "gptq_v2"}:
        raise _refused(f"got GPTQ with checkpoint_format={version!r}, expected gptq or gptq_v2")
    if pack := {found.get("pack_dtype", "int32")} - {"int32"}:
        raise _refused(f"got GPTQ with pack_dtype={pack.pop()!r}, expected int32")
    return Scheme(
        "gptq",
        bits,
        0 if group == -1 else group,
        ordered=bool(found.get("desc_act", False)) and group != -1,  # a whole row has no order
        zeros_from_one=version == "gptq",
    )


def _read_compressed(found: Mapping[str, Any], dtype: str) -> Quantisation:
    """Read what llm-compressor writes; of activations nothing is quantised here."""
    if status := {found.get("quantization_status", "compressed")} - {"compressed", "frozen"}:
        raise _refused(f"got quantization_status={status.pop()!r}, expected compressed")
    sparsity = (found.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refused(f"got a sparsity_config of format {sparsity!r}, expected none")
    if (found.get("transform_config") or {}).get("config_groups"):
        raise _refused("got a transform_config, expected none")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused(f"expected config_groups, got {groups!r}")
    schemes = []
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights") or {}, Mapping):
            raise _refused(f"expected an object with weights in config_groups.{name}")
        targets = _names(group, "targets")
        for target in targets:
            if target[:1].isupper() and target != LINEAR:
                raise _refused(f"got the target {target!r}, expected Linear or names of modules")
        kind = group.get("format") or found.get("format")
        schemes.append((targets, _scheme_of(group.get("weights") or {}, kind, dtype)))
    # A name, or an expression, counts before what all matrices match.
    schemes.sort(key=lambda each: LINEAR in each[0])
    return Quantisation(COMPRESSED, tuple(schemes), _names(found, "ignore"))


def _scheme_of(weights: Mapping[str, Any], kind: Any, dtype: str) -> Scheme:
    """Return the scheme of one group of compressed-tensors."""
    bits, number = weights.get("num_bits"), weights.get("type", "int")
    if kind == "naive-quantized":
        kind = f"{number}-quantized"
    if kind not in {"pack-quantized", "int-quantized", "float-quantized"}:
        raise _refused(f"got compressed-tensors with format={kind!r}")
    known, wanted = LAYOUTS[kind].bits, "float" if kind == "float-quantized" else "int"
    if bits not in known or number != wanted:
        expected = " or ".join(map(str, known))
        raise _refused(f"got {kind} with {number}{bits}, expected {expected} bits")
    strategy, symmetric = weights.get("strategy"), bool(weights.get("symmetric", True))
    group, rows = 0, 1
    match strategy:
        case "group":
            group = _whole(weights, "group_size")
        case "block":
            rows, group = _block(weights.get("block_structure"))
        case "tensor":
            rows = 0
        case "channel":
            pass
        case _:
            raise _refused(f"got strategy={strategy!r}, expected group, channel, tensor or block")
    if not symmetric and (number == "float" or strategy not in {"group", "channel"}):
        raise _refused(f"got {kind} with zero points and strategy={strategy!r}")
    ordered = weights.get("actorder") == "group"
    return Scheme(kind, bits, group, dtype, symmetric, ordered, rows=rows)


def _block(found: Any) -> tuple[int, int]:
    """Return rows and columns of a block of one scale."""
    if isinstance(found, str):
        found = [int(each) for each in found.split("x") if each.isdigit()]
    if not isinstance(found, (list, tuple)) or len(found) != 2:
        raise _refused(f"expected a block of rows and columns, got {found!r}")
    if any(type(each) is not int or each <= 1 for each in found):
        raise _refused(f"expected a block of several rows and columns, got {found!r}")
    return found[0], found[1]


def _read_fp8(found: Mapping[str, Any]) -> Quantisation:
    """Read what DeepSeek's and Qwen's checkpoints have; of activations nothing is quantised."""
    if (fmt := found.get("fmt", "e4m3")) != "e4m3":
        raise _refused(f"got fp8 with fmt={fmt!r}, expected e4m3")
    if kind := {found.get("scale_fmt", "float")} - {"float", None}:
        raise _refused(f"got fp8 with scale_fmt={kind.pop()!r}, expected float")
    block = found.get("weight_block_size")
    rows, group = (0, 0) if block is None else _block(block)
    ignore = _plain(found, "modules_to_not_convert", "ignored_layers")
    scheme = Scheme("fp8", 8, group, "float32", symmetric=True, rows=rows)
    return Quantisation("fp8", (((LINEAR,), scheme),), ignore)


def _read_bitsandbytes(found: Mapping[str, Any]) -> Quantisation:
    """Read what transformers writes of bitsandbytes; blocks have 64 elements there."""
    if not found.get("load_in_4bit", found.get("_load_in_4bit")):
        raise _refused("got bitsandbytes without load_in_4bit, expected 4 bits")
    if (kind := found.get("bnb_4bit_quant_type", "fp4")) != "nf4":
        raise _refused(f"got bitsandbytes with bnb_4bit_quant_type={kind!r}, expected nf4")
    if (storage := found.get("bnb_4bit_quant_storage", "uint8")) != "uint8":
        raise _refused(f"got bitsandbytes with bnb_4bit_quant_storage={storage!r}, expected uint8")
    nested = bool(found.get("bnb_4bit_use_double_quant"))
    ignore = _plain(found, "llm_int8_skip_modules")
    scheme = Scheme("nf4", 4, 64, "float32", symmetric=True, nested=nested)
    return Quantisation("bitsandbytes", (((LINEAR,), scheme),), ignore)


def _read_mxfp4(found: Mapping[str, Any]) -> Quantisation:
    """Read what gpt-oss has: experts alone, with exponents as scales."""
    _names(found, "modules_to_not_convert")
    scheme = Scheme(MXFP4, 4, 32, "uint8", symmetric=True)
    return Quantisation(MXFP4, (((r"re:.*\.experts\.",), scheme),))


def _read_gguf(found: Mapping[str, Any]) -> Quantisation:
    """Read what engine/model/gguf.py says of a file."""
    modules: Mapping[str, list[str]] = found["modules"]
    heads = (found["heads"][0], found["heads"][1])
    rewritten = ("q_proj", "k_proj", "v_proj") if any(heads) else ()
    counts = {word: len(names) for word, names in modules.items() if word in GGUF_TYPES}
    most = max(counts, key=lambda word: counts[word], default="")
    schemes: list[tuple[tuple[str, ...], Scheme]] = []
    ignore: list[str] = []
    for word, names in modules.items():
        if word == most:
            continue
        if word in GGUF_TYPES:
            schemes.append((tuple(names), gguf_scheme(word, heads)))
            continue
        moved = tuple(name for name in names if name.endswith(rewritten) and rewritten)
        ignore += [name for name in names if name not in moved]
        if moved:
            plain = Scheme(GGUF_ROWS, 16, 0, PLAIN_TYPES[word], heads=heads)
            schemes.append((moved, plain))
    if most:
        tables = tuple(name for name in modules[most] if name.endswith("embed_tokens"))
        schemes.append(((LINEAR, *tables), gguf_scheme(most, heads)))
    if found["norms_from_one"]:
        schemes.append((("re:.*norm",), Scheme(GGUF_NORM, 32, 0, "float32")))
    return Quantisation("gguf", tuple(schemes), tuple(ignore))


PLAIN_TYPES: Final = MappingProxyType({"F32": "float32", "F16": "float16", "BF16": "bfloat16"})
"""Types of plain elements in GGUF files and their dtype."""
_READERS: Final = MappingProxyType(
    {
        "gguf": _read_gguf,
        "bitsandbytes": _read_bitsandbytes,
        MXFP4: _read_mxfp4,
        "awq": _read_awq,
        "gptq": _read_gptq,
        "fp8": _read_fp8,
    }
)
