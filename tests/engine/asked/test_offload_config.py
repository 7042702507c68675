"""OffloadConfig: bounds, errors, the three warnings, and the hash."""

import dataclasses
import json
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.asked.offload import (
    ExpertOffloadConfig,
    OffloadConfig,
    OffloadWarning,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
)
from engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def build(**settings: Any) -> OffloadConfig:
    """An OffloadConfig from flat settings."""
    of_uva = {field.name for field in dataclasses.fields(UVAOffloadConfig)}
    uva = {name: settings.pop(name) for name in list(settings) if name in of_uva}
    experts = {"expert_slots": settings.pop("expert_slots", None)}
    backend = settings.pop("offload_backend", "auto")
    return OffloadConfig(
        offload_backend=backend,
        uva=UVAOffloadConfig(**uva),
        prefetch=PrefetchOffloadConfig(**settings),
        experts=ExpertOffloadConfig(**experts),
    )


def test_defaults_are_the_published_ones_and_warn_about_nothing() -> None:
    config = OffloadConfig()
    assert dataclasses.asdict(config) == {
        "offload_backend": "auto",
        "uva": {"cpu_offload_gb": 0.0, "cpu_offload_params": [], "experts_first": False},
        "prefetch": {
            "offload_group_size": 0,
            "offload_num_in_group": 1,
            "offload_prefetch_step": 1,
            "offload_params": [],
        },
        "experts": {"expert_slots": None},
    }
    assert config.backend == "none"
    assert config.ignored() == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"offload_backend": "disk"}, ["offload_backend", "auto, uva, prefetch", "'disk'"]),
        ({"cpu_offload_gb": -1}, ["cpu_offload_gb", ">= 0", "-1"]),
        ({"cpu_offload_gb": -0.001}, ["cpu_offload_gb", "-0.001"]),
        ({"cpu_offload_gb": float("nan")}, ["cpu_offload_gb", "nan"]),
        ({"cpu_offload_gb": float("inf")}, ["cpu_offload_gb", "inf"]),
        ({"cpu_offload_gb": "8"}, ["cpu_offload_gb", "'8'"]),
        ({"cpu_offload_gb": True}, ["cpu_offload_gb", "True"]),
        ({"offload_group_size": -1}, ["offload_group_size", ">= 0", "-1"]),
        ({"offload_group_size": 2.0}, ["offload_group_size", "integer", "2.0"]),
        ({"offload_group_size": True}, ["offload_group_size", "integer", "True"]),
        ({"offload_num_in_group": 0}, ["offload_num_in_group", ">= 1", "0"]),
        ({"offload_num_in_group": -2}, ["offload_num_in_group", "-2"]),
        ({"offload_prefetch_step": -1}, ["offload_prefetch_step", ">= 0", "-1"]),
        ({"cpu_offload_params": "mlp"}, ["cpu_offload_params", "list", "'mlp'"]),
        ({"cpu_offload_params": ["a..b"]}, ["cpu_offload_params", "'a..b'"]),
        ({"cpu_offload_params": [""]}, ["cpu_offload_params", "''"]),
        ({"cpu_offload_params": [3]}, ["cpu_offload_params", "3"]),
        ({"expert_slots": 0}, ["expert_slots", ">= 1", "0"]),
        ({"offload_params": "mlp"}, ["offload_params", "list", "'mlp'"]),
        ({"offload_params": [".mlp"]}, ["offload_params", "'.mlp'"]),
    ],
)
def test_bounds_are_refused_with_name_rule_and_value(
    settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**settings)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("backend", ["auto", "uva", "prefetch"])
def test_more_in_a_group_than_its_size_is_refused_with_both_values(backend: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(offload_backend=backend, offload_group_size=3, offload_num_in_group=7)
    assert "offload_num_in_group" in str(caught.value)
    assert "offload_group_size=3" in str(caught.value)
    assert "got 7" in str(caught.value)


def test_prefetch_chosen_with_the_default_group_size_is_refused_with_both_values() -> None:
    with pytest.raises(ConfigError, match=r"offload_group_size=0, got 1. 0 turns prefetch off"):
        build(offload_backend="prefetch")


@pytest.mark.parametrize("backend", ["auto", "prefetch"])
def test_step_below_one_is_refused_with_both_values_while_prefetch_is_on(backend: str) -> None:
    with pytest.raises(ConfigError, match=r"at least 1 .*offload_group_size=4\), got 0"):
        build(offload_backend=backend, offload_group_size=4, offload_prefetch_step=0)


def test_step_zero_and_a_larger_num_are_allowed_while_prefetch_is_off() -> None:
    assert build(offload_prefetch_step=0).backend == "none"
    assert build(offload_num_in_group=5).backend == "none"
    assert build(cpu_offload_gb=1, offload_num_in_group=5).backend == "uva"


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ({}, "none"),
        ({"cpu_offload_gb": 0.5}, "uva"),
        ({"offload_group_size": 8, "offload_num_in_group": 8}, "prefetch"),
        ({"offload_backend": "uva"}, "uva"),
        ({"offload_backend": "uva", "cpu_offload_gb": 2}, "uva"),
        ({"offload_backend": "prefetch", "offload_group_size": 1}, "prefetch"),
        ({"offload_backend": "experts"}, "experts"),
        ({"expert_slots": 4}, "experts"),
    ],
)
def test_backend_in_force(settings: dict[str, Any], backend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(**settings).backend == backend


@pytest.mark.parametrize(
    ("settings", "backend", "words"),
    [
        (
            {"offload_backend": "uva", "cpu_offload_gb": 1, "offload_group_size": 2},
            "uva",
            ["offload.prefetch", "offload_backend=uva", "ignored"],
        ),
        (
            {"offload_backend": "uva", "cpu_offload_gb": 1, "offload_params": ["mlp"]},
            "uva",
            ["offload.prefetch", "ignored"],
        ),
        (
            {"offload_backend": "prefetch", "offload_group_size": 2, "cpu_offload_gb": 1},
            "prefetch",
            ["offload.uva", "offload_backend=prefetch", "ignored"],
        ),
        (
            {"offload_backend": "prefetch", "offload_group_size": 2, "cpu_offload_params": ["mlp"]},
            "prefetch",
            ["offload.uva", "ignored"],
        ),
        (
            {"offload_group_size": 2, "cpu_offload_gb": 1},
            "prefetch",
            ["auto", "prefetch is used", "uva is ignored"],
        ),
        (
            {"offload_backend": "uva", "expert_slots": 4},
            "uva",
            ["offload.experts: fields are set but offload_backend=uva", "ignored"],
        ),
        (
            {"offload_backend": "experts", "cpu_offload_gb": 1},
            "experts",
            ["offload.uva: fields are set but offload_backend=experts", "ignored"],
        ),
        (
            {"cpu_offload_gb": 1, "expert_slots": 4},
            "uva",
            ["expert_slots is set, but offload_backend=auto takes uva", "ignored"],
        ),
    ],
)
def test_each_contradiction_warns_once(
    settings: dict[str, Any], backend: str, words: list[str]
) -> None:
    with pytest.warns(OffloadWarning) as caught:
        config = build(**settings)
    assert len(caught) == 1
    assert config.backend == backend
    assert config.ignored() == [str(caught[0].message)]
    assert caught[0].filename == __file__  # of the caller, also through dataclasses.replace
    with pytest.warns(OffloadWarning) as caught:
        replace(config)
    assert caught[0].filename == __file__
    for word in words:
        assert word in str(caught[0].message)


CHANGES: dict[str, dict[str, Any]] = {
    "offload_backend": {"offload_backend": "uva"},
    "cpu_offload_gb": {"cpu_offload_gb": 2.0},
    "cpu_offload_params": {"cpu_offload_params": ["mlp.down_proj"]},
    "offload_group_size": {"offload_group_size": 2},
    "offload_num_in_group": {"offload_num_in_group": 2},
    "offload_prefetch_step": {"offload_prefetch_step": 2},
    "offload_params": {"offload_params": ["mlp.down_proj"]},
    "experts_first": {"experts_first": True},
    "expert_slots": {"expert_slots": 3},
}


def test_every_field_is_among_the_changes() -> None:
    names = {"offload_backend"}
    for node in (UVAOffloadConfig, PrefetchOffloadConfig, ExpertOffloadConfig):
        names |= {field.name for field in dataclasses.fields(node)}
    assert names == set(CHANGES)


def test_hash_differs_for_every_field_and_value() -> None:
    hashes = {"defaults": OffloadConfig().compute_hash()}
    hashes |= {name: build(**change).compute_hash() for name, change in CHANGES.items()}
    hashes["cpu_offload_gb 3"] = build(cpu_offload_gb=3).compute_hash()
    hashes["other selector"] = build(cpu_offload_params=["mlp.up_proj"]).compute_hash()
    assert len(set(hashes.values())) == len(hashes), hashes


def test_hash_is_the_same_for_equal_settings() -> None:
    one = build(cpu_offload_gb=2, cpu_offload_params=["b", "a"])
    assert (
        one.compute_hash()
        == build(cpu_offload_gb=2.0, cpu_offload_params=["a", "b"]).compute_hash()
    )
    assert (
        one.compute_hash()
        == build(cpu_offload_gb=2, cpu_offload_params=["a", "b", "a"]).compute_hash()
    )
    assert (
        build(offload_group_size=2, offload_params=["a", "a"]).compute_hash()
        == build(offload_group_size=2, offload_params=["a"]).compute_hash()
    )
    assert one.compute_hash() == pickle.loads(pickle.dumps(one)).compute_hash()


def test_hash_is_the_same_in_another_process() -> None:
    code = (
        "from engine.asked.offload import OffloadConfig, UVAOffloadConfig\n"
        "print(OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=2.5,"
        " cpu_offload_params=['b', 'a'])).compute_hash())"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    here = build(cpu_offload_gb=2.5, cpu_offload_params=["a", "b"]).compute_hash()
    assert hashes == {here}
    assert len(here) == 64


def test_is_read_only_and_serialisable() -> None:
    config = build(cpu_offload_gb=2)
    with pytest.raises(AttributeError, match="sealed"):
        config.offload_backend = "prefetch"
    with pytest.raises(AttributeError, match="sealed"):
        config.uva.cpu_offload_gb = 3.0
    with pytest.raises(TypeError, match="unexpected keyword"):
        OffloadConfig(backend="uva")  # type: ignore[call-arg]
    assert json.loads(json.dumps(dataclasses.asdict(config)))["uva"]["cpu_offload_gb"] == 2


@pytest.mark.parametrize("name", ["uva", "prefetch"])
@pytest.mark.parametrize("node", [None, 3, [1]])
def test_parts_of_another_type_are_refused(name: str, node: Any) -> None:
    with pytest.raises(ConfigError, match=rf"offload\.{name}: expected \w+OffloadConfig or a dict"):
        OffloadConfig(**{name: node})
