"""The tokenizer of a model's folder, for systems that have no engine to ask."""

from pathlib import Path
from typing import Any, Final

FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: str | None) -> Any | None:
    """Return the folder's tokenizer; None where it has no files of one."""
    if folder is None or not any((Path(folder) / name).is_file() for name in FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
