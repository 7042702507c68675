"""What `make wheelhouse` collects for an offline GPU machine: pinned, small, and without torch."""

import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.contracts.project import ROOT

GROUPS = {"base": "requirements-offline.txt", "server": "requirements-offline-server.txt"}
MACHINE_HAS = {
    "annotated-doc",
    "anyio",
    "certifi",
    "charset-normalizer",
    "click",
    "h11",
    "idna",
    "numpy",
    "packaging",
    "pyyaml",
    "requests",
    "tqdm",
    "typing-extensions",
    "urllib3",
}
"""Packages that transformers, accelerate and the tools around torch bring."""


def _names(group: str) -> list[str]:
    lines = (ROOT / GROUPS[group]).read_text(encoding="utf-8").splitlines()
    return [canonicalize_name(line) for line in lines if line and not line.startswith("#")]


def _needed(name: str, seen: set[str]) -> set[str]:
    """Everything that an installed package needs on Linux, without its extras."""
    if name in seen:
        return seen
    seen.add(name)
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        environment = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.3"}
        if requirement.marker is None or requirement.marker.evaluate(environment):
            _needed(canonicalize_name(requirement.name), seen)
    return seen


def _recipe() -> str:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    [found] = re.findall(r"^wheelhouse:.*\n((?:\t.*\n|  .*\n)+)", text, flags=re.MULTILINE)
    return str(found)


def test_the_recipe_fetches_each_list_into_its_folder_and_nothing_else() -> None:
    fetched = re.findall(r"-d wheelhouse/(\w+) .*-r (\S+)", _recipe())
    assert dict(fetched) == GROUPS
    assert len(fetched) == len(GROUPS)
    [built] = re.findall(r"pip wheel --no-deps -w wheelhouse/base -c \S+ (.*)", _recipe())
    assert set(built.split()) <= set(_names("base"))


def test_only_named_packages_are_fetched_as_pinned() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [fetch] = re.findall(r"^FETCH_WHEELS = ((?:.*\\\n)*.*)$", makefile, flags=re.MULTILINE)
    assert {"--no-deps", "-c", "constraints.txt", "--only-binary=:all:"} <= set(fetch.split())


@pytest.mark.parametrize("group", GROUPS)
def test_every_name_is_pinned(group: str) -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}
    assert set(_names(group)) - pins == set()


@pytest.mark.parametrize("group", GROUPS)
def test_what_a_group_needs_beyond_its_list_is_there_and_torch_is_not_needed(group: str) -> None:
    needed = set().union(*(_needed(name, set()) for name in _names(group)))
    assert needed - set(_names(group)) - MACHINE_HAS == set()


def test_the_lists_share_no_name_and_are_documented() -> None:
    assert set(_names("base")) & set(_names("server")) == set()
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for group, path in GROUPS.items():
        assert f"--find-links wheelhouse/{group} -r {path}" in contributing
