import errno
import signal
import sys
import time

import pytest

from harness.observe.host import num_new_kills, oom_kills, process_memory
from harness.point.process import Exit, classify_exception, classify_exit, start_worker

PYTHON = (sys.executable, "-c")


def start(tmp_path, code):
    return start_worker(tmp_path, "job", command=(*PYTHON, code))


def test_exit_codes_and_output(tmp_path):
    worker = start(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert worker.wait() == Exit(returncode=3)
    assert (tmp_path / "worker.log").read_text().splitlines() == ["--- job", "out", "err"]


def test_arguments_name_job_and_parent(tmp_path):
    code = "import sys, os; assert sys.argv[1:3] == [os.environ['DIR'], '--job'], sys.argv"
    worker = start_worker(tmp_path, "job", command=(*PYTHON, code), environ={"DIR": str(tmp_path)})
    assert worker.wait().returncode == 0


@pytest.mark.thorough
def test_waiting_does_not_spin(tmp_path):
    worker = start(tmp_path, "import time; time.sleep(0.6)")
    before_s = time.process_time()
    ticks = []
    worker.wait(on_tick=lambda: ticks.append(1), tick_s=0.1)
    assert ticks
    assert time.process_time() - before_s < 0.2


def test_the_deadline_ends_the_whole_group(tmp_path):
    code = (
        "import subprocess, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    worker = start(tmp_path, code)

    def started():
        return (tmp_path / "child").exists() and (tmp_path / "child").read_text()

    while not started():
        time.sleep(0.02)
    ended = worker.wait(deadline_s=time.monotonic(), grace_s=0.1)
    assert ended.timed_out
    assert ended.returncode < 0
    # The child was sent SIGKILL, but is not waited for: it is its own parent's to collect.
    while process_memory(int(started()))["rss_bytes"] is not None:
        time.sleep(0.02)


def test_an_error_in_a_tick_ends_the_worker(tmp_path):
    worker = start(tmp_path, "import time; time.sleep(60)")

    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.wait(on_tick=fail, tick_s=0.01)
    assert process_memory(worker.pid)["rss_bytes"] is None


def classify(returncode, *, kills=0, timed_out=False, tmp_path, state=None):
    return classify_exit(
        Exit(returncode=returncode, timed_out=timed_out),
        job="measure",
        state=state or {"phase": "latency", "memory": {"rss_peak_bytes": 2**30}},
        num_oom_kills=kills,
        timeout_s=5.0,
        silence_s=9.0,
        log=tmp_path / "worker.log",
    )


@pytest.mark.parametrize(
    ("returncode", "kills", "timed_out", "status", "kind"),
    [
        (-signal.SIGKILL, 0, False, "killed", "SIGKILL"),
        (-signal.SIGKILL, 1, False, "oom", "HostOutOfMemory"),
        (-signal.SIGABRT, 1, False, "killed", "SIGABRT"),
        (-signal.SIGTERM, 0, True, "timeout", "Timeout"),
        (-99, 0, False, "killed", "signal 99"),
        (1, 1, False, "failed", "WorkerExit"),
    ],
)
def test_exits(tmp_path, returncode, kills, timed_out, status, kind):
    found, error = classify(returncode, kills=kills, timed_out=timed_out, tmp_path=tmp_path)
    assert (found, error["type"], error["phase"]) == (status, kind, "latency")
    assert error["message"].startswith("worker measure in phase latency")
    has_memory = returncode < 0 and not timed_out  # it may have taken more since it told
    assert ("had reached 1.00 GiB when it last told" in error["message"]) == has_memory


def test_an_exit_keeps_the_last_lines_of_its_own_output(tmp_path):
    lines = ["--- reference", "old", "--- measure", *map(str, range(50))]
    (tmp_path / "worker.log").write_text("\n".join(lines))
    _, error = classify(-signal.SIGSEGV, tmp_path=tmp_path)
    assert error["traceback"].splitlines() == [str(number) for number in range(10, 50)]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_errors_that_mean_out_of_memory(error):
    status, facts = classify_exception(error, "build")
    assert status == "oom"
    assert facts["message"]


def test_the_word_memory_alone_is_not_out_of_memory():
    assert classify_exception(ValueError("out of memory slots"), "build")[0] == "failed"
    assert classify_exception(OSError(errno.ENOENT, "gone"), "build")[0] == "failed"


def test_oom_counters_are_numbers_and_only_known_ones_count():
    assert all(count >= 0 for count in oom_kills().values())
    assert num_new_kills({"a": 1}, {"a": 3, "b": 9}) == 2
    assert num_new_kills({}, {}) == 0


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_of_a_worker_do_not_spin_unless_asked(tmp_path, given):
    code = (
        f"import os; open({str(tmp_path / 'policy')!r}, 'w').write(os.environ['OMP_WAIT_POLICY'])"
    )
    command = (sys.executable, "-c", code)
    environ = {} if given is None else {"OMP_WAIT_POLICY": given}
    assert start_worker(tmp_path, "job", command=command, environ=environ).wait().returncode == 0
    assert (tmp_path / "policy").read_text() == (given or "PASSIVE")
