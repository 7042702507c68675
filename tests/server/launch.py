"""A server with a tiny model as a process of its own, and what tests ask it."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

VOCAB = 300
MAX_LEN = 1200
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
SIZES = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
DEADLINE_S = 90.0


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a model without weights: sizes, a byte-level tokenizer, a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SIZES | changes), encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("e", "r"), ("t", "h"), ("i", "n"), ("a", "n"), ("o", "u")]
    words = [*alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.add_tokens([f"<w{number}>" for number in range(VOCAB - len(words) - 2)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "generation_config.json").write_text('{"max_new_tokens": 33}', encoding="utf-8")
    return folder


class Served:
    """A server's process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._client = httpx.Client(timeout=60, verify=False, trust_env=False)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        """Of the server, which listens from its first line on."""
        return wait_for(lambda: re.search(r"listening on (\S+),", self.log), self)[1]

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        return wait_for(lambda: psutil.Process(self.process.pid).children(), self)[0]

    def wait_ready(self) -> None:
        wait_for(lambda: "ready: serving" in self.log, self)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self._client.post(f"{self.url}{path}", json=body)

    def get(self, path: str) -> httpx.Response:
        return self._client.get(f"{self.url}{path}")

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return sum(map(float, found))

    def end(self, limit_s: float = 20.0) -> int:
        """Wait for the end of the process; return its exit code."""
        code = self.process.wait(limit_s)
        self._client.close()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


def wait_for(found: Any, served: Served | None = None, limit_s: float = DEADLINE_S) -> Any:
    """Return what a function returns once it is true; fail where the server ends before."""
    end_s = time.monotonic() + limit_s
    while not (value := found()):
        is_gone = served is not None and served.process.poll() is not None
        if is_gone or time.monotonic() > end_s:
            log = "" if served is None else f" The log:\n{served.log}"
            raise AssertionError(f"it did not come.{log}")
        time.sleep(0.01)
    return value


@contextlib.contextmanager
def serving(model: Path | str, *flags: str, is_ready: bool = True, **env: str) -> Iterator[Served]:
    """Run a server for a model; end it, and all that it left, afterwards."""
    small = ("--device", "cpu", "--load-format", "dummy", "--host-reserve-gib", "0")
    sizes = ("--gpu-memory-gib", "0.125", "--max-num-seqs", "8", "--max-num-batched-tokens", "256")
    process = subprocess.Popen(
        [sys.executable, "-m", "server", str(model), "--port", "0", *small, *sizes, *flags],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    served = Served(process)
    children: list[psutil.Process] = []
    try:
        if is_ready:
            served.wait_ready()
            children = psutil.Process(process.pid).children(recursive=True)
        yield served
    finally:
        if process.poll() is None:
            with contextlib.suppress(psutil.Error):
                children += psutil.Process(process.pid).children(recursive=True)
            process.kill()
        served.end()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.wait(5)


STREAM = {"prompt": "go on", "max_tokens": 1000, "ignore_eos": True, "stream": True}


def open_stream(client: httpx.Client, served: Served, **body: Any) -> httpx.Response:
    """A stream whose first token came."""
    request = client.build_request("POST", f"{served.url}/v1/completions", json=STREAM | body)
    response = client.send(request, stream=True)
    assert response.status_code == 200
    wait_for(lambda: served.metric("vllm:generation_tokens_total") > 0, served)
    return response


def last_events(response: httpx.Response) -> list[str]:
    return response.read().decode().strip().split("\n\n")[-2:]
