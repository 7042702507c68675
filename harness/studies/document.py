"""Marked sections of documents that studies write."""

from pathlib import Path

from engine.errors import ConfigError


def marks(name: str) -> tuple[str, str]:
    """Return the lines between which a study's section stands."""
    return f"<!-- study {name}: begin -->", f"<!-- study {name}: end -->"


def check_document(file: Path, name: str) -> None:
    """Refuse a document without the marks of a study.

    Raises:
        ConfigError: it cannot be read, or does not hold each mark once, in order.
    """
    begin, end = marks(name)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"study.output: expected a document to rewrite, got {file}: {error.strerror}. Name one "
            f"that holds the lines {begin} and {end}."
        ) from error
    is_once = text.count(begin) == text.count(end) == 1
    if not is_once or text.index(begin) > text.index(end):
        raise ConfigError(
            f"study.output: expected the lines {begin} and {end} once each in {file}, in this "
            "order. Add them where the table shall stand."
        )


def write_section(file: Path, section: str, name: str) -> None:
    """Replace what stands between the marks of a study.

    Raises:
        ConfigError: the document lacks them.
    """
    check_document(file, name)
    begin, end = marks(name)
    head, rest = file.read_text(encoding="utf-8").split(begin)
    tail = rest.split(end)[1]
    file.write_text(f"{head}{begin}\n\n{section.rstrip()}\n\n{end}{tail}", encoding="utf-8")
