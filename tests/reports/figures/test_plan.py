"""The figure of a planned sweep."""

from pathlib import Path

import pytest

from reports.__main__ import main
from reports.figures.comparisons import KINDS, kind_of, plan_figure, short, write_plan_figure
from reports.record.record import RecordError

HEAD = "point,offload,fits,decode_tokens_s,queue_output_tokens_s\n"
ROWS = 'a,none,False,,\na,"uva, 4 GiB",True,5.0,50\nb,uva (as set),True,6,6000\nb,auto,True,7,8\n'


def test_a_row_s_kind_is_its_backend_or_as_set() -> None:
    labels = ("none", "lossless", "uva, 4.07 GiB", "prefetch, 3 of 8 layers", "auto")
    kinds = tuple(kind_of({"offload": label}) for label in (*labels, "uva (as set)"))
    assert kinds == KINDS


def test_a_point_is_called_by_its_values() -> None:
    assert short("model=olmo7b gpu=l4_24gb engine.seed=1") == "olmo7b l4_24gb 1"
    assert short("model.path=/long/folders/llama33_70b/ gpu=l4_24gb") == "llama33_70b l4_24gb"
    assert short("3") == "3"


@pytest.mark.thorough_but("refused")
@pytest.mark.parametrize("text", [HEAD + ROWS, HEAD + "a,none,False,,\n"], ids=["fits", "refused"])
@pytest.mark.thorough
def test_the_command_draws_a_plan(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.csv").write_text(text)
    assert main([str(tmp_path)]) == 0
    target = tmp_path / "plan.png"
    assert capsys.readouterr().out == f"{target}\n"
    assert target.read_bytes().startswith(b"\x89PNG")
    assert write_plan_figure(tmp_path, tmp_path / "other") == tmp_path / "other" / "plan.png"


@pytest.mark.parametrize("text", ["", HEAD, "point,offload\na,none\n"])
def test_a_file_without_points_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.csv").write_text(text)
    with pytest.raises(RecordError, match=r"plan\.csv: expected the points"):
        write_plan_figure(tmp_path)
    assert main([str(tmp_path)]) == 2


def test_names_of_the_axes_do_not_meet() -> None:
    row = {"offload": "none", "fits": "True", "decode_tokens_s": "5", "queue_output_tokens_s": "6"}
    points = [n * 40 for n in "12"]  # as much of a name as is shown
    figure = plan_figure([row | {"point": point} for point in points]).figure
    names = [axes.xaxis.label.get_window_extent() for axes in figure.axes]
    assert names[0].x1 < names[1].x0
    assert names[1].x1 <= figure.bbox.width


@pytest.mark.thorough
def test_a_long_sweep_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reports.figures.comparisons.MOST_POINTS", 4)
    row = {"offload": "none", "fits": "True", "decode_tokens_s": "5", "queue_output_tokens_s": "6"}
    many = [row | {"point": f"p{index}"} for index in range(7)]
    few = many[:4]
    sizes = [int.from_bytes(plan_figure(rows).png()[20:24], "big") for rows in (many, few)]
    assert sizes[0] == sizes[1]
