"""A server that does what the name of its model says: `python scripted.py MODEL ... --port N`.

Names are words with `+` between: slow (a load in steps), stuck (a load without progress), deaf
(ignores SIGTERM), dies (exit code 1 in the load), config (exit code 78), crash (exit code 1 soon
after it was ready), child (starts a process that ignores SIGTERM), mute (never listens).
"""

import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = sys.argv[1].rpartition("/")[2].split("+")
INFO = {
    "model": "scripted",
    "dtype": "float32",
    "backend": "uva",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "placement_bytes": {"resident": 100, "uva": 50},
    "num_gpu_blocks": 40,
    "block_size": 16,
    "memory": {
        "gpu_uuid": None,
        "gpu_budget_bytes": 1000,
        "gpu_items": {"weights": 100, "kv_cache": 200},
        "host_items": {"pinned_kv": 7},
        "host_pinned_bytes": 50,
    },
}
health: dict[str, object] = {"state": "loading", "phase": "start"}
started_s = time.monotonic()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        tokens = int(100 * (time.monotonic() - started_s))
        answers = {
            "/health": json.dumps(health),
            "/info": json.dumps(INFO),
            "/v1/models": json.dumps({"object": "list", "data": [{"id": "scripted"}]}),
            "/metrics": "# HELP x y\n"
            'vllm:num_requests_running{model_name="a"} 3.0\n'
            'vllm:num_requests_waiting{model_name="a"} 1.0\n'
            'vllm:kv_cache_usage_perc{model_name="a"} 0.5\n'
            f'tightfit:decode_tokens_total{{model_name="a"}} {tokens}\n',
        }
        is_well = self.path != "/health" or health["state"] == "ready"
        body = answers[self.path].encode()
        self.send_response(200 if is_well else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


def wait() -> None:
    """Wait for SIGTERM; in short sleeps, as one that comes just before a sleep begins is missed."""
    for _ in range(1200):
        time.sleep(0.05)


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in WORDS else lambda *_: sys.exit(0))
    if "child" in WORDS:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        subprocess.Popen([sys.executable, "-c", code])
    if "mute" in WORDS:
        wait()
    server = ThreadingHTTPServer(
        ("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(f"listening on http://127.0.0.1:{server.server_port}, loading {sys.argv[1]}")
    if "dies" in WORDS:
        say("Traceback (most recent call last):")
        say("RuntimeError: the weights are not to be read")
        return 1
    if "config" in WORDS:
        say("error: offload: expected one of none, auto, got 7.")
        say("Write auto.")
        say('{"path": "/health"}')
        return 78
    if "stuck" in WORDS:
        wait()
    for step in range(8 if "slow" in WORDS else 0):
        health.update(phase="weights", bytes_done=10 * step, bytes_total=80)
        time.sleep(0.1)
    health.clear()
    health["state"] = "ready"
    say("ready: serving")
    if "crash" in WORDS:
        time.sleep(0.2)
        say("RuntimeError: the card fell off")
        return 1
    wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
