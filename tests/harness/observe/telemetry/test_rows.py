"""Rows: a process tree, the machine, a GPU with absent fields."""

import json
import os
import subprocess
import sys
import time

import pytest

from engine.device import gpu as nvml
from harness.observe import sampler
from harness.observe import sampler as processes
from harness.observe.host import process_memory
from harness.observe.sampler import (
    Machine,
    ProcessTree,
    ProcFile,
    Rows,
    descendants,
    number_of,
    size_of,
)
from reports.record.rows import SLOW_COLUMNS, TELEMETRY_COLUMNS
from tests.harness.observe.telemetry.cases import install, load
from tests.harness.observe.telemetry.pynvml_stand_in import READINGS, UUID

MIB = 2**20
GPU_COLUMNS = {name for name in TELEMETRY_COLUMNS if name.startswith(("gpu_", "pcie_"))}
# A process that holds memory, and starts one that holds more; both say so and wait.
TREE = """
import subprocess, sys
held = bytearray(b"x") * int(sys.argv[1])
child = None
if len(sys.argv) > 2:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[3]],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
if child is not None:
    child.stdin.close()
    child.wait()
    print("alone", flush=True)
    sys.stdout.close()
    import signal
    signal.pause()
"""


@pytest.fixture
def tree():
    command = [sys.executable, "-c", TREE, str(20 * MIB), TREE, str(40 * MIB)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_resident_memory_is_that_of_the_tree(tree):
    found = ProcessTree(tree.pid)
    found.refresh()
    [child] = descendants(tree.pid)
    assert found.pids == {tree.pid, child}
    row = found.read() | found.read_slow()
    alone, below = process_memory(tree.pid), process_memory(child)
    assert row["num_processes"] == 2
    assert row["rss_bytes"] == pytest.approx(alone["rss_bytes"] + below["rss_bytes"], rel=0.02)
    assert below["rss_bytes"] > alone["rss_bytes"] + 15 * MIB > 35 * MIB
    assert row["anon_bytes"] > 60 * MIB
    assert row["rss_peak_bytes"] == pytest.approx(alone["rss_peak_bytes"], rel=0.02)
    assert row["minor_faults"] > 60 * MIB // 4096
    before_s = row["cpu_s"]
    tree.stdin.close()
    assert tree.stdout.readline() == b"alone\n"
    found.refresh()
    row = found.read() | found.read_slow()
    assert row["num_processes"] == 1
    assert row["rss_bytes"] < below["rss_bytes"]
    assert row["cpu_s"] >= before_s > 0  # the child's time is its parent's now
    assert row["minor_faults"] > 60 * MIB // 4096
    found.close()


def test_a_tree_that_ended_has_no_row(tree):
    found = ProcessTree(tree.pid)
    assert found.read_slow()["num_processes"] == 1  # nobody looked for children yet
    tree.kill()
    tree.wait()
    assert found.read() == found.read_slow() == {}
    found.refresh()
    assert found.read() == found.read_slow() == {}


def test_a_kernel_that_tells_little_costs_only_what_it_does_not_tell(tmp_path):
    folder = tmp_path / "7"
    folder.mkdir()
    ticks = os.sysconf("SC_CLK_TCK")
    fields = ["S", "1", "7", "7", "0", "-1", "0", "30", "2", "4", "1", str(3 * ticks), str(ticks)]
    (folder / "stat").write_text(f"7 (a name) with ) {' '.join(fields)} {ticks} 0 20 0")
    (folder / "status").write_text("Name:\tx\nVmHWM:\t 2048 kB\nVmRSS:\t    1024 kB\n")
    (folder / "statm").write_text("700 3 2 1 0 600 0\n")
    tree = ProcessTree(7, tmp_path)
    assert tree.read() == {"rss_bytes": 3 * os.sysconf("SC_PAGE_SIZE")}
    assert tree.read_slow() == {
        "num_processes": 1,
        "rss_peak_bytes": 2 * MIB,
        "anon_bytes": None,
        "shmem_bytes": None,
        "locked_bytes": None,
        "swapped_bytes": None,
        "cpu_s": 5.0,
        "minor_faults": 32,
        "major_faults": 5,
        "read_bytes": None,
    }
    assert set(Machine(tmp_path).read().values()) == {None}
    assert Machine(tmp_path).cpu_s() is None


def test_the_machine_in_known_files(tmp_path):
    (tmp_path / "meminfo").write_text(
        "MemTotal: 100 kB\nMemAvailable:   60 kB\nBuffers: 1 kB\nCached:  20 kB\n"
        "SwapCached: 3 kB\nSwapTotal: 50 kB\nSwapFree: 40 kB\n"
    )
    (tmp_path / "vmstat").write_text(
        "pgpgin 9\npgpgout 1\npswpin 2\npswpout 3\npgfault 8\npgmajfault 4\n"
    )
    (tmp_path / "stat").write_text("cpu  100 20 30 4000 500 6 7 8 90 9\ncpu0 1 2 3\n")
    page = os.sysconf("SC_PAGE_SIZE")
    assert Machine(tmp_path).read() == {
        "host_available_bytes": 60 * 1024,
        "host_cached_bytes": 21 * 1024,
        "host_swap_used_bytes": 10 * 1024,
        "host_swap_in_bytes": 2 * page,
        "host_swap_out_bytes": 3 * page,
        "host_major_faults": 4,
        "host_disk_read_bytes": 9 * 1024,
    }
    assert Machine(tmp_path).cpu_s() == 171 / os.sysconf("SC_CLK_TCK")


def test_lines_are_found_by_their_whole_name():
    text = b"aRss: 1 kB\nRss:\t  7 kB\nRss2: 9 kB"
    assert size_of(text, b"Rss") == 7 * 1024
    assert size_of(text, b"aRss") == 1024
    assert size_of(text, b"Rss2") == 9 * 1024
    assert size_of(text, b"Swap") is None
    assert number_of(b"x -\n", b"x ") is None
    assert ProcFile(os.devnull).read() == b""


class Gone:
    """A machine without anything to tell."""

    def read(self):
        return {}

    def cpu_s(self):
        return None


def test_a_row_holds_every_column_that_is_there(tmp_path):
    pids = [os.getpid(), 1]
    install(tmp_path / "nvml", pids=pids)
    gpu = nvml.Gpu(load(tmp_path / "nvml"), 1)
    rows = Rows(tmp_path, gpu, Machine())
    (tmp_path / "state.json").write_text(json.dumps({"phase": "latency", "pinned_bytes": 7}))
    before = time.monotonic()
    rows.watch(os.getpid(), "measure")
    row = rows.read()
    assert before <= row["clock_s"] + 1e-5
    assert row["clock_s"] <= time.monotonic()
    assert set(row) <= set(TELEMETRY_COLUMNS)
    assert set(row) >= GPU_COLUMNS | {"rss_bytes", "cpu_s", "host_available_bytes", "time"}
    assert (row["job"], row["phase"], row["pinned_bytes"]) == ("measure", "latency", 7)
    assert row["gpu_used_bytes"] == 5 * 2**30
    assert row["gpu_power_w"] == 300
    assert 100 * before <= row["gpu_energy_j"] + 1e-3 <= 100 * time.monotonic() + 1e-3
    assert row["pcie_rx_gb_s"] == pytest.approx(20.48)
    assert row["pcie_tx_gb_s"] == pytest.approx(0.001024)
    assert (row["gpu_num_processes"], row["gpu_num_own_processes"]) == (2, 1)
    assert (row["pcie_gen"], row["pcie_width"]) == (5, 16)


# Reading of the stand-in -> columns that are lost with it.
LOST = {
    "memory": {"gpu_used_bytes"},
    "power_mw": {"gpu_power_w"},
    "energy_mj": {"gpu_energy_j"},
    "busy": {"gpu_busy_pct", "gpu_memory_busy_pct"},
    "sm_mhz": {"gpu_sm_clock_mhz"},
    "memory_mhz": {"gpu_memory_clock_mhz"},
    "bits": {"gpu_throttle_bits"},
    "rx_kb_s": {"pcie_rx_gb_s"},
    "tx_kb_s": {"pcie_tx_gb_s"},
    "temperature": {"gpu_temperature_c"},
    "gen": {"pcie_gen"},
    "width": {"pcie_width"},
    "pids": {"gpu_num_processes", "gpu_num_own_processes"},
}


@pytest.mark.parametrize("reading", LOST)
def test_each_field_alone_may_be_absent(tmp_path, reading):
    install(tmp_path / "nvml", **{reading: None})
    row = Rows(tmp_path, nvml.Gpu(load(tmp_path / "nvml"), 1), Gone()).read()
    assert GPU_COLUMNS - set(row) == LOST[reading]


def test_a_gpu_that_refuses_everything_leaves_the_host(tmp_path):
    install(tmp_path / "nvml", **dict.fromkeys(READINGS))
    row = Rows(tmp_path, nvml.Gpu(load(tmp_path / "nvml"), 1), Machine()).read()
    assert GPU_COLUMNS.isdisjoint(row)
    assert row["host_available_bytes"] > 0
    assert set().union(*LOST.values()) == GPU_COLUMNS


def test_the_gpu_is_found_by_its_uuid(tmp_path, monkeypatch):
    install(tmp_path / "nvml")
    monkeypatch.setattr(nvml, "_load_nvml", lambda: load(tmp_path / "nvml"))
    assert nvml.open_gpu(UUID).sample()["gpu_power_w"] == 300
    assert nvml.open_gpu("GPU-other").sample()["gpu_power_w"] is None
    assert nvml.open_gpu("GPU-none") is None


def test_the_state_is_read_when_it_is_another(tmp_path):
    rows = Rows(tmp_path, None, Gone())
    rows.watch(os.getpid(), "measure")
    assert "phase" not in rows.read()
    path = tmp_path / "state.json"
    for phase in ("build", "latency"):
        new = tmp_path / "new"
        new.write_text(json.dumps({"phase": phase}))
        new.replace(path)
        assert rows.read()["phase"] == phase
    path.write_text("{")
    os.utime(path, (1, 1))
    assert "phase" not in rows.read()
    rows.watch(0, None)
    row = rows.read()
    assert {"job", "phase", "rss_bytes"}.isdisjoint(row)


def test_slow_columns_are_repeated(tmp_path):
    class Counting(Gone):
        count = 0

        def read(self):
            self.count += 1
            return {"host_available_bytes": self.count}

    rows = Rows(tmp_path, None, Counting())
    first, second = rows.read(), rows.read()
    assert (first["host_available_bytes"], second["host_available_bytes"]) == (1, 1)
    assert first["slow_clock_s"] == second["slow_clock_s"] == first["clock_s"] < second["clock_s"]
    rows.watch(0, None)  # another worker: at once
    assert rows.read()["host_available_bytes"] == 2
    assert {"host_available_bytes", "gpu_temperature_c"} <= SLOW_COLUMNS <= set(TELEMETRY_COLUMNS)


def test_children_are_listed_only_where_a_process_is_new(tmp_path, monkeypatch):
    (tmp_path / "1").mkdir()
    listed = []
    monkeypatch.setattr(processes, "descendants", lambda *_: listed.append(1) or set())
    tree = processes.ProcessTree(1, tmp_path)
    for newest, number in (("", 2), ("0.1 0.2 0.3 1/99 0", 4), ("0.1 0.2 0.3 1/99 71", 5)):
        (tmp_path / "loadavg").write_text(newest and newest + "\n")
        tree.close()
        tree = processes.ProcessTree(1, tmp_path)
        tree.refresh()
        tree.refresh()
        assert len(listed) == number
    tree.close()


class SlowCard:
    """A card whose costly reading takes the next of `took_s` of CPU time; it reads the clock."""

    def __init__(self, clock, took_s):
        self.clock, self.took_s = clock, list(took_s)

    def sample(self):
        return {}

    def sample_slow(self, pids):
        return {}

    def sample_costly(self):
        self.clock["process_time"] += self.took_s.pop(0)
        return {"gpu_energy_j": self.clock["monotonic"]}


@pytest.fixture
def clock(monkeypatch):
    found = {"monotonic": 50.0, "process_time": 0.0}
    monkeypatch.setattr(sampler.time, "monotonic", lambda: found["monotonic"])
    monkeypatch.setattr(sampler.time, "process_time", lambda: found["process_time"])
    return found


def test_what_takes_the_processor_long_is_read_rarely(tmp_path, clock):
    """A reading of 40 ms of CPU time is one of 0.2 % of a core every 20 s."""
    card = SlowCard(clock, [0.04, 0.005, 0.0])
    rows, found = Rows(tmp_path, card, Gone()), []
    while card.took_s:
        found.append(rows.read()["gpu_energy_j"])
        clock["monotonic"] += 1.0
    assert sorted(set(found)) == [50.0, 70.0, 75.0]


def test_where_rows_take_long_costly_readings_wait(tmp_path, clock):
    """51 ms so far, and 1 of the next reading, are 0.8 % of a core once 6.5 s have gone by."""
    card = SlowCard(clock, [0.001] * 3)
    rows, found = Rows(tmp_path, card, Gone()), []
    for second in range(9):
        found.append(rows.read()["gpu_energy_j"])
        clock["monotonic"] += 1.0
        clock["process_time"] += 0.05 if second == 0 else 0.0
    assert sorted(set(found)) == [50.0, 57.0]
    rows.watch(0, "next")  # of another worker the first row has one
    assert rows.read()["gpu_energy_j"] == 59.0
