"""Cards of conf/gpu: their names and sheets, and what to say to a name that is not there."""

import difflib
import re
from collections.abc import Sequence
from typing import Any, Final

import yaml

from catalogue.files import CONF

OF_ONE_S_OWN: Final = (
    "A card that is not listed: gpu.memory_gib=12 gpu.link_gb_s=16 (gpu.hbm_gb_s, gpu.bf16_tflops "
    "and gpu.compute_capability too where they are known), or FOLDER/gpu/NAME.yaml with "
    "--config-dir FOLDER; conf/gpu/rtx3060_12gb.yaml is an example."
)
_MOST: Final = 5
"""Names that are suggested."""


def card_names() -> list[str]:
    """Return the names of conf/gpu that stand for a card, smallest memory first, then by name."""
    names = [path.stem for path in (CONF / "gpu").glob("*_*gb.yaml")]
    return sorted(names, key=lambda name: (size_gb(name) or 0, name))


def card_sheet(name: str) -> dict[str, Any]:
    """Return what a file of conf/gpu states, as the fields of GPUConfig."""
    text = (CONF / "gpu" / f"{name}.yaml").read_text(encoding="utf-8")
    sheet: dict[str, Any] = yaml.safe_load(text)
    return sheet


def size_gb(name: str) -> int | None:
    """Return the memory that a name states, such as 24 of rtx4090_24gb; None: it states none."""
    found = re.search(r"(\d+)\s*gi?b\b", name.lower())
    return None if found is None else int(found[1])


def unknown_card(word: str, known: Sequence[str]) -> str:
    """Say which cards a name that is not known resembles, and how to describe another."""
    return f"{like_card(word, known)} {OF_ONE_S_OWN}"


def like_card(word: str, known: Sequence[str]) -> str:
    """Say which cards a name that is not known resembles, by name and by memory."""
    same = _alike(word, known)
    text = f"gpu: expected auto, cpu or a card of conf/gpu, got {word!r}."
    if same:
        text += f" Did you mean {' or '.join(same)}?"
    size, sized = size_gb(word), [name for name in known if size_gb(name)]
    if size is not None and sized:
        nearest = min((size_gb(name) or 0 for name in sized), key=lambda each: abs(each - size))
        others = [name for name in sized if size_gb(name) == nearest and name not in same]
        text += f" Cards of {nearest} GB: {', '.join(others[:_MOST])}." if others else ""
    if not same and size is None:
        text += f" There are: {', '.join(known)}."
    return text


def _alike(word: str, known: Sequence[str]) -> list[str]:
    """Return the names that begin with a word, else hold it, else resemble it."""
    bare = {_bare(name): name for name in known}
    short = _bare(re.sub(r"(^|[^a-z0-9])\d+\s*gi?b$", "", word.lower())) or _bare(word)
    if len(short) < 2:  # a part of most names
        return []
    starts = [name for text, name in bare.items() if text.startswith(short)]
    holds = [name for text, name in bare.items() if short in text]
    close = difflib.get_close_matches(_bare(word), list(bare), n=2, cutoff=0.7)
    found = starts or holds or [bare[text] for text in close]
    return sorted(found, key=len)[:_MOST]


def _bare(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())
