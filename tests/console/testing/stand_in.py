"""A stand-in for the harness: writes the files that it writes, as the file STAND_IN says.

`records`: folder below the test's own -> record; `waits`: end only when interrupted; `deaf`: not
even then; `exit_code`; `document`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    """Play what STAND_IN says; return its exit code."""
    script = json.loads(Path(os.environ["STAND_IN"]).read_text(encoding="utf-8"))
    [where] = (word for word in sys.argv if word.startswith("hydra."))
    folder = Path(where.partition("=")[2].strip("'"))
    interrupted = []
    signal.signal(signal.SIGTERM, lambda *_: interrupted.append(True))
    progress = {"requests_done": 3, "requests_total": 8, "output_tokens": 9, "tokens_s": 2.5}
    state = {"job": "measure", "phase": "throughput", "progress": progress} | script.get(
        "state", {}
    )
    (folder / "args.json").write_text(json.dumps(sys.argv[1:]), encoding="utf-8")
    _write(folder / "state.json", state)
    while script.get("waits") and (script.get("deaf") or not interrupted):
        time.sleep(0.01)
    for name, record in script.get("records", {}).items():
        if interrupted:
            record["status"] = "killed"
        (folder / name).mkdir(parents=True, exist_ok=True)
        _write(folder / name / "result.json", record)
    sys.stdout.write(json.dumps(script.get("document", {})))
    return int(script.get("exit_code", 0))


def _write(path: Path, content: object) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
