from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.config.compose import Composer
from harness.config.source import TextSource


@pytest.mark.thorough
def test_a_file_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    read = []
    load = TextSource.load_config

    def note(source: TextSource, config_path: str) -> object:
        read.append(config_path)
        return load(source, config_path)

    monkeypatch.setattr(TextSource, "load_config", note)
    words = ["+experiment=mine", "+model=glass", "engine.max_num_seqs=1,2"]
    for seed in (5, 17):
        file.write_text(f"# @package _global_\nengine:\n  seed: {seed}\n")
        plan = Composer(tmp_path).plan(words, multirun=True)
        assert [point.config.engine.seed for point in plan.points] == [seed, seed]
    assert read.count("experiment/mine") == 2
    assert all(read.count(name) == 1 for name in {*read} - {"experiment/mine"})


def test_a_composition_does_not_change_the_next() -> None:
    first, again = (Composer().plan(["+model=glass"]).points[0].composed for _ in range(2))
    OmegaConf.update(first, "engine.seed", 99)
    first.hydra.runtime.choices["model"] = "another"
    (third,) = Composer().plan(["+model=glass"]).points
    assert third.config.engine.seed == again.engine.seed != 99
    assert third.composed.hydra.runtime.choices["model"] == "glass"


def test_a_choice_in_a_defaults_list_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "experiment" / "experiment"
    folder.mkdir(parents=True)
    for file, content in (
        (folder.parent / "mine.yaml", "defaults:\n  - of_${experiment}\n"),
        (folder / "of_mine.yaml", "engine:\n  max_num_seqs: 3\n"),
    ):
        file.write_text(f"# @package _global_\n{content}")
    (point,) = Composer(tmp_path).plan(["+model=glass", "+experiment=mine"]).points
    assert point.config.engine.max_num_seqs == 3
