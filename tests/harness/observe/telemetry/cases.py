"""Tables of telemetry, a stand-in NVML in a folder, and workers that take real time."""

import importlib.util
import json
import shutil
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from harness.observe.window import Span, Window
from reports.record.rows import TELEMETRY_COLUMNS
from tests.harness.fakes import Script, fake_door
from tests.harness.observe.telemetry.pynvml_stand_in import READINGS

STAND_IN = Path(__file__).with_name("pynvml_stand_in.py")


def table(count=40, **columns):
    """Ten rows a second from second 100 on; columns are values, or functions of the row."""
    found = {name: [None] * count for name in TELEMETRY_COLUMNS}
    steady = {
        "clock_s": lambda k: 100 + k / 10,
        "slow_clock_s": lambda k: 100 + k // 10,
        "costly_clock_s": lambda k: 100 + k // 50 * 5,
        "took_s": 0.05,
        "job": "measure",
    }
    for name, value in (steady | columns).items():
        found[name] = [value(k) if callable(value) else value for k in range(count)]
    return found


def window(count=40, **columns):
    span = Span(part="latency", job="measure", begin_s=100.0, end_s=100.0 + count / 10)
    return Window(table(count, **columns), span)


def install(folder, **readings):
    """Put the stand-in into a folder as pynvml; return what it says now."""
    folder.mkdir(exist_ok=True)
    shutil.copy(STAND_IN, folder / "pynvml.py")
    said = READINGS | readings
    temporary = folder / "readings.tmp"
    temporary.write_text(json.dumps(said), encoding="utf-8")
    temporary.replace(folder / "readings.json")
    return said


def load(folder):
    """The stand-in of a folder as a module of this process."""
    spec = importlib.util.spec_from_file_location("pynvml_in_a_folder", folder / "pynvml.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def samplers(run_dir):
    """Processes that sample for a run's folder, found without the harness's help."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"harness.observe.sampler" in words and str(run_dir).encode() in words:
            found.append(int(folder.name))
    return found


def wait_until(condition, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


class RealClock:
    """A clock that moves as time does; the script's times pass in sleep."""

    def __call__(self):
        return time.perf_counter()

    def advance(self, seconds):
        time.sleep(seconds)


def real_time_command(tmp_path, script):
    """The command of a worker whose scripted times are real."""
    path = tmp_path / "script.json"
    path.write_text(json.dumps(asdict(script)), encoding="utf-8")
    return (sys.executable, "-m", "tests.harness.observe.telemetry.cases", str(path))


def main(arguments):
    from harness.worker import serve

    script = Script(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    door, _ = fake_door(script, RealClock())

    def stream(config, seconds):
        begin_s = time.perf_counter()
        time.sleep(seconds)
        end_s = time.perf_counter()
        return int(10e9 * (end_s - begin_s)), begin_s, end_s

    return serve(arguments[1:], replace(door, stream=stream))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
