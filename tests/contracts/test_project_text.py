"""Texts name no package registry, no private path, and leave no work marked as undone."""

import re
from pathlib import Path

import pytest

from tests.contracts.project import project_files, relative

# The brackets keep this file from holding what it forbids.
FORBIDDEN = {
    "the host of a package registry": r"(?i)[p]ypi\.org|[p]ythonhosted\.org|[n]pmjs\.(org|com)",
    "a path of one machine": r"(?<![\w.])/([w]ork|[r]oot|[h]ome/\w+|[o]pt/(pypi|wheels))/",
    "a mark of unfinished work": r"\b([T]ODO|[F]IXME|[X]XX)\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    files = project_files()
    assert len(files) > 50
    found = [
        f"{relative(path)}:{number}: {line.strip()[:80]}"
        for path in files
        if pattern.search(text := _text(path))
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


def test_the_patterns_find_what_they_forbid() -> None:
    samples = ["https://files.{}hosted.org/x", "see /{}/main", "# {}DO later"]
    words = ["python", "work", "TO"]
    samples = [sample.format(word) for sample, word in zip(samples, words, strict=True)]
    for pattern, sample in zip(FORBIDDEN.values(), samples, strict=True):
        assert re.search(pattern, sample), sample
    assert not re.search(FORBIDDEN["a path of one machine"], "docs/work/plan.md")


def _text(path: Path) -> str:
    content = path.read_bytes()
    return "" if b"\0" in content else content.decode("utf-8")
