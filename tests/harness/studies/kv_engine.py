"""An engine with two tiers of KV blocks on a clock of ours: what is found where is real, times are
set, and tensors there are none."""

from collections import OrderedDict
from types import SimpleNamespace

from tests.harness.fakes import EXPERT_COUNTS

BLOCK = 4


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class TieredLLM:
    """A step prefills everything new at once, or decodes all; a load takes two steps before."""

    computed_s = 0.001
    """Of a prompt token that was not found."""
    decode_s = 0.01
    load_s = 0.0001
    """Of a token that is loaded, on top of the step before it is used."""
    in_place_s = 0.0002
    """Of a token read in the host tier, each step."""

    def __init__(self, clock, gpu_blocks=64, cpu_blocks=64, max_model_len=1024):
        self.clock, self.max_model_len = clock, max_model_len
        self.gpu_blocks, self.cpu_blocks = gpu_blocks, cpu_blocks
        self.spec = SimpleNamespace(vocab_size=1000)
        self.tokenizer = None
        self.plan = SimpleNamespace(block_size=BLOCK, moved_per_step=lambda num: (5, 0))
        self.cache = OrderedDict()
        self.new, self.running, self.last_step = [], [], None
        self.found = dict.fromkeys(("hits_gpu_tokens", "hits_cpu_tokens", "missed_tokens"), 0)
        self.loaded = self.stored = self.swaps = 0
        self.resets = self.read = 0

    def memory(self):
        return {}

    def add_request(self, prompt, params, request_id):
        request = SimpleNamespace(name=request_id, prompt=list(prompt), out=[], params=params)
        request.keys = [tuple(prompt[: i + BLOCK]) for i in range(0, len(prompt) - BLOCK, BLOCK)]
        request.wait = 2 if self.host_keys(request) else 0
        self.new.append(request)
        return request.name

    def host_keys(self, request):
        return [key for key in request.keys if self.cache.get(key) == "cpu"]

    def abort(self, name):
        self.running = [request for request in self.running if request.name != name]

    def has_unfinished(self):
        return bool(self.new or self.running)

    def step(self):
        ready = [request for request in self.new if not request.wait or not self.running]
        for request in self.new:
            request.wait = max(0, request.wait - 1)
        return self.prefill(ready) if ready else self.decode()

    def prefill(self, ready):
        prompt_tokens = 0
        for request in ready:
            known = [key for key in request.keys if key in self.cache]
            far = self.host_keys(request)
            self.found["hits_cpu_tokens"] += BLOCK * len(far)
            self.found["hits_gpu_tokens"] += BLOCK * (len(known) - len(far))
            rest = len(request.prompt) - BLOCK * len(known)
            self.found["missed_tokens"] += rest
            self.loaded += len(far)
            self.clock.now += rest * self.computed_s + BLOCK * len(far) * self.load_s
            prompt_tokens += rest
            self.keep(request.keys)
            self.new.remove(request)
            self.running.append(request)
        return self.emit(ready, prompt_tokens, 0)

    def decode(self):
        far = max(0, sum(map(self.length, self.running)) - BLOCK * self.gpu_blocks)
        self.clock.now += self.decode_s + far * self.in_place_s
        return self.emit(list(self.running), 0, far)

    @staticmethod
    def length(request):
        return len(request.prompt) + len(request.out)

    def emit(self, requests, prompt_tokens, far):
        decoded = 0 if prompt_tokens else len(requests)
        self.read += 100 * far
        self.last_step = SimpleNamespace(
            num_prefill_tokens=prompt_tokens,
            num_decode_tokens=decoded,
            h2d_bytes=5,
            in_place_bytes=0,
            kv_in_place_bytes=100 * far,
            kv_copied_bytes=0,
            **dict.fromkeys(EXPERT_COUNTS, 0),
            wait_s=0.0,
        )
        events = []
        for request in requests:
            request.out.append(len(request.out))
            is_last = len(request.out) == request.params.max_tokens
            if is_last:
                self.running.remove(request)
                whole = request.prompt + request.out
                self.keep([tuple(whole[: i + BLOCK]) for i in range(0, len(whole) - BLOCK, BLOCK)])
            events.append(
                SimpleNamespace(
                    request_id=request.name,
                    token_id=request.out[-1],
                    time_s=self.clock(),
                    finish_reason="length" if is_last else None,
                )
            )
        return events

    def keep(self, keys):
        for key in keys:
            self.cache.pop(key, None)
            self.cache[key] = "gpu"
        for key in [key for key, tier in self.cache.items() if tier == "gpu"][: -self.gpu_blocks]:
            self.drop(key)

    def drop(self, key):
        if self.cpu_blocks:
            self.cache[key] = "cpu"
            self.stored += 1
        else:
            del self.cache[key]

    def evict_gpu_cache(self):
        for key in [key for key, tier in self.cache.items() if tier == "gpu"]:
            self.drop(key)

    def reset_cache(self):
        self.resets += 1
        self.cache.clear()

    def stats(self):
        return {
            "h2d_bytes": 0,
            "in_place_bytes": 0,
            "kv": {
                "block_bytes": 100 * BLOCK,
                "in_place_bytes": self.read,
                "staged_prefill_bytes": 0,
                "copied_ahead_bytes": 0,
                "gpu": {"blocks": self.gpu_blocks},
                "cpu": {"blocks": self.cpu_blocks, "in_transit": 0},
                "prefix": dict(self.found),
                "swaps_out": self.swaps,
                "swaps_in": self.swaps,
                "recomputes": 0,
                "preemptions": 0,
                "moved": {"loaded_bytes": 100 * self.loaded, "stored_bytes": 100 * self.stored},
            },
        }
