import pytest
import torch

from kernels import bench, bench_cases, ops
from tests.kernels.test_every_op_has_twin import OPERATORS


def test_every_operator_is_timed():
    assert sorted(bench_cases.BUILDERS) == OPERATORS


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_no_gpu_is_said_and_ends_with_2(capsys):
    assert bench.main(["rms_norm"]) == 2
    assert "expected a CUDA device, got none" in capsys.readouterr().err


def test_an_unknown_operator_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(["rms_nrom"])
    assert caught.value.code == 2
    assert "rms_norm" in capsys.readouterr().err


def test_a_line_holds_the_figures():
    timing = bench.Timing("rms_norm 4 x 4", 0.5, 12.25, 2000.0, 0.75, None)
    assert bench.render(timing).split() == [
        "rms_norm",
        "4",
        "x",
        "4",
        "0.5000",
        "2000",
        "0.75",
        "12.250",
    ]


@pytest.mark.gpu
def test_an_operator_is_timed(capsys):
    assert bench.main(["silu_mul"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    share = float(lines[2].split()[-2])
    assert 0 < share < 2


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPERATORS)
def test_cases_run_on_the_operator(op):
    assert hasattr(ops, op)
    for build in bench_cases.BUILDERS[op]:
        case = build(torch.device("cuda", torch.cuda.current_device()))
        assert case.op == op
        assert case.num_bytes > 0
        case.run_op()
    torch.cuda.current_stream().synchronize()
