"""The process that holds the engine: `python -m harness.worker RUN_DIR --job NAME ...`.

It does one job (harness.point.process), says what it does in state.json, and writes one result.
It knows neither Hydra nor MLflow; its parent starts it, watches it and judges how it ended.
"""

import argparse
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from catalogue.processes import die_with_parent
from engine.device.gpu import Gpu, open_gpu
from engine.errors import RequestError
from engine.model.routing import write_trace
from engine.sealed import GIB
from harness.config.schema import QualityScenario, RequestSet
from harness.config.serve import ServeScenario
from harness.config.study import OverheadScenario, StepsScenario, TiersScenario
from harness.folders import plain
from harness.observe.host import process_memory, reset_rss_peak
from harness.observe.link import LinkCounter
from harness.observe.spool import Background
from harness.point.process import (
    PLAN_PHASE,
    SAMPLES_NAME,
    UNFINISHED,
    WorkerJob,
    classify_exception,
    read_job,
    result_path,
)
from harness.systems.base import agree
from harness.systems.door import BuildEngine, EngineDoor, LinkWatch, engine_door, peer_door
from harness.work.bare import measure_bare, rates_note
from harness.work.correctness import (
    STREAM,
    compare_tokens,
    greedy_tokens,
    read_reference,
    tokens_of_answered,
    write_reference,
)
from harness.work.drive import Conduct, Engine, Outcome, StepTotals, measure_repeats
from harness.work.kv import KVWatch
from harness.work.load import measure_load
from harness.work.offline import (
    engine_prompts,
    measure_latency,
    measure_throughput,
    part_prompts,
    warm_up_part,
)
from harness.work.overhead import measure_overhead
from harness.work.predicted import (
    bytes_by_way,
    differences,
    expert_metrics,
    kv_link_share,
    link_notes,
    link_reasons,
    memory_metrics,
    transfer_metrics,
    transfer_reasons,
)
from harness.work.prompts import encode_rows, special_ids
from harness.work.quality import (
    make_yardstick,
    measure_quality,
    quality_text,
    read_yardstick,
    text_file,
    write_yardstick,
)
from harness.work.request_log import RequestLog
from harness.work.schedule import Load
from harness.work.serve import measure_serve, warm_up
from harness.work.steps import measure_steps
from harness.work.tiers import measure_tiers
from harness.work.watch import ExpertWatch
from reports.record.record import STATE_NAME, write_text_atomic

INTERVAL_S: Final = 0.5
ROUTING_NAME: Final = "routing.parquet"
"""File of a run's folder with the experts of tokens (scenario.record_routing)."""


class StateWriter:
    """Says what a worker does now.

    Timed loops call `running`, which hands its lines to a thread twice a second: a write from the
    loop itself took 20 to 40 ms between two tokens on the machine where this was first measured.
    """

    def __init__(self, run_dir: Path, job: str) -> None:
        self._path = run_dir / STATE_NAME
        self._temporary = run_dir / f".{STATE_NAME}.{os.getpid()}.tmp"
        self._samples = run_dir / SAMPLES_NAME
        self._due_s = 0.0
        self._num_tokens: int | None = None
        self._expert_hit_share: float | None = None
        self._tokens_before = (0, time.monotonic())
        self._writer = Background("state")
        self._state: dict[str, Any] = {
            "pid": os.getpid(),
            "job": job,
            "phase": "start",
            "started_at": time.time(),
        }
        self._write()

    @property
    def phase(self) -> str:
        """What the worker does now."""
        return str(self._state["phase"])

    def enter(self, phase: str, num_tokens: int | None = None) -> None:
        """Begin a phase; `num_tokens` of output are expected in it, None: it is not known."""
        self._num_tokens, self._expert_hit_share = num_tokens, None
        self._state |= {"phase": phase, "progress": None}
        self._tokens_before = (0, time.monotonic())
        self._write()
        self._writer.wait()

    def note(self, **facts: Any) -> None:
        """Say what is known of the engine; None: it is not.

        gpu_budget_bytes: GPU memory that it may use; pinned_bytes: what its ledger of registered
        memory holds; kv: what its KV cache holds, as the plan has it.
        """
        self._state |= facts
        self._write()

    def loading(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """Report bytes of a phase of the load; the engine's `progress` callback."""
        is_new = self.phase != f"load:{phase}"
        now = time.monotonic()
        if not is_new and now < self._due_s and done_bytes < total_bytes:
            return
        progress = {"done_bytes": done_bytes, "total_bytes": total_bytes}
        self._state |= {"phase": f"load:{phase}", "progress": progress}
        self._write()

    def found_experts(self, hit_share: float | None) -> None:
        """Keep the share of experts that lay on the GPU of late, for the next report."""
        self._expert_hit_share = hit_share

    def running(self, num_done: int, num_requests: int, num_tokens: int) -> None:
        """Report requests and output tokens of a scenario."""
        now = time.monotonic()
        if now < self._due_s and num_done < num_requests:
            return
        before, then = self._tokens_before
        rate = (num_tokens - before) / (now - then) if now > then else None
        self._tokens_before = (num_tokens, now)
        progress = {
            "requests_done": num_done,
            "requests_total": num_requests,
            "output_tokens": num_tokens,
            "output_tokens_total": self._num_tokens,
            "tokens_s": rate,
            "expert_hit_share": self._expert_hit_share,
        }
        self._state["progress"] = progress
        self._write(
            {"time": time.time(), "job": self._state["job"], "phase": self.phase, **progress}
        )

    def close(self) -> None:
        """Return when the last report is in its file; nothing can be reported afterwards."""
        self._writer.close()

    def _write(self, sample: dict[str, Any] | None = None) -> None:
        """Hand the state, and a sample to append, to the writing thread; wait for nothing."""
        self._due_s = time.monotonic() + INTERVAL_S
        self._writer.submit(self._put, dict(self._state), sample)

    def _put(self, state: dict[str, Any], sample: dict[str, Any] | None) -> None:
        """Replace state.json in one rename; not flushed to the disk, which would take long."""
        state |= {"updated_at": time.time(), "memory": process_memory()}
        self._temporary.write_text(json.dumps(state), encoding="utf-8")
        self._temporary.replace(self._path)
        if sample is not None:
            with self._samples.open("a", encoding="utf-8") as file:
                file.write(json.dumps(sample) + "\n")


def door_for(job: WorkerJob) -> EngineDoor:
    """Return the door to what answers the requests of a job."""
    if job.fake is not None:
        from harness.systems.fake import fake_door  # noqa: PLC0415

        return fake_door(job.fake)
    match job.system.kind:
        case "native":
            return engine_door()
        case "accelerate":
            from harness.systems import accelerate_engine  # noqa: PLC0415

            return peer_door(accelerate_engine.load_code)
        case "vllm":
            from harness.systems import vllm_engine  # noqa: PLC0415

            return peer_door(vllm_engine.load_code)
        case "http":
            from harness.systems.http_engine import http_door  # noqa: PLC0415

            return http_door(job.system)
        case "serve":
            from harness.systems.serve_engine import serve_door  # noqa: PLC0415

            return serve_door()
        case other:
            raise ValueError(f"system.kind: expected native or a peer, got {other!r}.")


def _energy_metrics(
    before_j: float | None, after_j: float | None, num_tokens: int
) -> dict[str, float | None]:
    """Return the metrics of `num_tokens` output tokens from two readings of the energy counter.

    None without a counter, or where it was started anew meanwhile.
    """
    total_j = None
    if before_j is not None and after_j is not None and after_j >= before_j:
        total_j = after_j - before_j
    return {
        "energy/total_j": total_j,
        "energy/j_per_token": total_j / num_tokens if total_j and num_tokens else None,
    }


def serve(argv: Sequence[str] | None = None, door: EngineDoor | None = None) -> int:
    """Run the job that the arguments name, with `door` if given; return 0 if it is ok, else 1."""
    parser = argparse.ArgumentParser(prog="python -m harness.worker")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--job", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--spawned-s", type=float, required=True)
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    job = read_job(arguments.run_dir, arguments.job)
    # On Linux perf_counter and the parent's time.monotonic read the same clock.
    work = Work(job, arguments.run_dir, door or door_for(job), spawned_s=arguments.spawned_s)
    return 0 if work.run()["status"] == "ok" else 1


class Work:
    """One job, from its description to its result."""

    def __init__(
        self, job: WorkerJob, run_dir: Path, door: EngineDoor, *, spawned_s: float
    ) -> None:
        self._job = job
        self._engine = job.engine
        self._path = result_path(run_dir, job.name)
        self._trace_path = run_dir / ROUTING_NAME
        self._door = door
        self._spawned_s = spawned_s - door.clock_zero_s
        self._state = StateWriter(run_dir, job.name)
        self._requests = RequestLog(run_dir)
        self._conduct = Conduct(clock=door.clock, on_progress=self._state.running)
        self._build_engine: BuildEngine | None = None
        self._llm: Engine | None = None
        self._link = LinkWatch(door, job.engine)
        self._failed_phase: str | None = None
        """Where a part failed, before the engine was closed."""
        self._result: dict[str, Any] = {
            "status": UNFINISHED,
            "error": None,
            "plan": None,
            "effective": {},
            "metrics": {},
            "samples": {},
            "measured": [],
            "reasons": [],
            "notes": [],
            "windows": [],
        }

    def run(self) -> dict[str, Any]:
        """Do the job; write and return its result, which is strict JSON.

        The result is written after each part too, so that a worker that is killed leaves the parts
        that it ended.
        """
        try:
            self._state.enter("import")
            self._build_engine = self._door.load_code()
            kinds = {
                "measure": self._measure,
                "load": self._load,
                "reference": self._reference,
                "yardstick": self._yardstick,
            }
            kinds[self._job.kind]()
            self._result["status"] = "ok"
        except (Exception, SystemExit) as error:  # noqa: BLE001  the edge: carried to the parent
            status, facts = classify_exception(error, self._failed_phase or self._state.phase)
            self._result |= {"status": status, "error": facts}
            plan = getattr(error, "plan", None)
            if plan is not None:
                self._result["plan"] = plan
        self._finish()
        return self._save()

    def _save(self) -> dict[str, Any]:
        result = {key: plain(value) for key, value in self._result.items()}
        self._path.parent.mkdir(exist_ok=True)
        write_text_atomic(self._path, json.dumps(result, allow_nan=False) + "\n")
        return result

    def _finish(self) -> None:
        """Note what the engine has to say and free it; its errors do not undo the result."""
        self._note_host_peak()
        self._tidy("closing the engine", self._close_engine)
        self._tidy("writing the last requests", self._requests.close)
        self._tidy("writing the last state", self._state.close)

    def _close_engine(self) -> None:
        if self._llm is not None:
            stats = self._llm.stats()
            self._result["notes"] += stats.pop("notes", [])
            self._result["reasons"] += stats.pop("reasons", [])
            self._result["effective"]["stats"] = stats
            self._state.enter("close")
            self._llm.close()
            self._llm = None
            self._state.note(pinned_bytes=None)

    def _note_host_peak(self) -> None:
        """Note the host memory of the scenarios, before what comes after them takes any."""
        peak = process_memory()["rss_peak_bytes"]
        if peak is not None:
            self._result["metrics"].setdefault("memory/host_rss_peak_gib", peak / GIB)

    def _tidy(self, what: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # noqa: BLE001  the edge: noted
            self._result["notes"].append(f"{what}: {type(error).__name__}: {error}")

    def _build(self, **how: bool) -> Engine:
        assert self._build_engine is not None
        self._state.enter("build")
        self._llm = self._build_engine(self._engine, progress=self._state.loading, **how)
        return self._llm

    def _note_engine(self, llm: Engine) -> None:
        self._result["plan"] = plan = llm.plan.to_dict()
        memory = llm.memory()
        self._state.note(
            pinned_bytes=memory.get("host_pinned_bytes"),
            gpu_budget_bytes=memory.get("gpu_budget_bytes"),
            kv=plan.get("kv"),
        )
        self._result["effective"] = llm.effective()
        self._save()

    def _build_reference(self) -> Engine:
        if self._job.under_test is not None:
            # A point that does not fit needs no reference, and should not wait for one.
            self._state.enter(PLAN_PHASE)
            self._door.plan_for(self._job.under_test)
        return self._build(reference=True)

    def _yardstick(self) -> None:
        llm, config, path = self._build_reference(), self._job.scenario.quality, self._job.yardstick
        if config is None or path is None:
            raise ValueError("job yardstick: expected scenario.quality and a file to write.")
        self._state.enter("yardstick")
        text = quality_text(text_file(config))
        write_yardstick(path, make_yardstick(llm, config, text, **self._conduct))

    def _reference(self) -> None:
        llm = self._build_reference()
        config = self._job.scenario.correctness
        prompts = engine_prompts(
            llm, config.num_prompts, config.prompt_tokens, seed=0, stream=STREAM
        )
        self._state.enter("reference")
        tokens = greedy_tokens(llm, prompts, config.output_tokens, **self._conduct)
        if self._job.reference is None:
            raise ValueError("job reference: expected a file to write, got none.")
        write_reference(self._job.reference, prompts, tokens)

    def _load(self) -> None:
        row, llm = measure_load(self._build, spawned_s=self._spawned_s, clock=self._door.clock)
        self._note_window("load", self._spawned_s)
        self._note_engine(llm)
        row["rss_peak_bytes"] = process_memory()["rss_peak_bytes"]
        self._result["samples"]["load"] = [row]
        self._note_memory(llm)

    def _measure(self) -> None:
        scenario = self._job.scenario
        if scenario.is_timed:
            self._probe()
        if not scenario.needs_engine:
            self._result["metrics"] |= self._link.after()
            return
        begin_s = self._door.clock()
        llm = self._build()
        if scenario.steps is not None or scenario.tiers is not None:
            report = llm.load_report
            self._result["samples"]["build"] = {
                "seconds": self._door.clock() - begin_s,
                "phases": report.phases,
                "moved_bytes": report.moved,
            }
        self._note_engine(llm)
        # A full collection takes a tenth of a second, most of it for modules that stay.
        gc.collect()
        gc.freeze()
        self._check(llm)
        timed = dict[str, StepTotals]()
        try:
            self._run_parts(llm, timed)
        except Exception:
            self._failed_phase = self._state.phase
            if self._result["measured"]:  # their figures stay, with what is said of all of them
                self._tidy("ending what was measured", lambda: self._end_parts(llm, timed))
            raise
        self._end_parts(llm, timed)

    def _end_parts(self, llm: Engine, timed: dict[str, StepTotals]) -> None:
        self._note_memory(llm)
        if self._job.scenario.is_timed:
            self._end_timed(llm, timed)

    def _probe(self) -> None:
        """Probe the link, and measure what needs no engine.

        Before the engine takes its memory: the probe's buffers are not part of the budget.
        """
        self._state.enter("probe")
        rates = self._link.before(self._gpu())
        self._result["metrics"] |= {f"link/{name}": rate for name, rate in rates.items()}
        known = self._engine.measured_rates | dict(self._door.machine(self._engine))
        known |= {name: rate for name, rate in rates.items() if rate is not None}
        self._engine = replace(self._engine, measured_rates=known)
        if self._job.scenario.bare is not None and self._job.scenario.bare.parts:
            self._state.enter("bare")
            bare = measure_bare(self._job.scenario.bare, self._engine, self._gpu())
            self._result["samples"]["bare"] = bare
            if "rates" in bare:
                self._result["notes"].append(rates_note(bare["rates"]))
        reset_rss_peak()

    def _run_parts(self, llm: Engine, timed: dict[str, StepTotals]) -> None:
        """Run every part of the scenario; add sums over the steps of those with requests."""
        scenario = self._job.scenario
        for config in (scenario.latency, scenario.throughput):
            if config is not None:
                timed[config.part] = self._run_part(llm, config.part, config)
        if scenario.serve is not None:
            timed["serve"] = self._run_serve(llm, scenario.serve)
        if scenario.steps is not None:
            self._run_steps(llm, scenario.steps)
        if scenario.tiers is not None and scenario.tiers.parts:
            self._run_tiers(llm, scenario.tiers)
        if scenario.quality is not None:
            self._run_quality(llm, scenario.quality)
        if scenario.overhead is not None:
            self._run_overhead(llm, scenario.overhead)

    def _end_timed(self, llm: Engine, timed: dict[str, StepTotals]) -> None:
        metrics = self._result["metrics"]
        metrics |= self._door.predict(llm.plan, llm.spec, self._job.scenario)
        if self._result["samples"].get("throughput", {}).get("num_cancelled"):
            metrics.pop("predicted/output_tok_s", None)  # it is of all requests
        self._note_host_peak()
        self._tidy("closing the engine", self._close_engine)
        self._tidy("probing the link again", lambda: metrics.update(self._link.after()))
        if timed:
            self._note_transfers(timed)

    def _run_steps(self, llm: Engine, config: StepsScenario) -> None:
        self._state.enter("steps")
        begin_s = self._door.clock()
        self._result["samples"]["steps"] = measure_steps(
            llm, config, clock=self._door.clock, counter=self._link_counter()
        )
        self._end_part("steps", begin_s)

    def _run_quality(self, llm: Engine, config: QualityScenario) -> None:
        self._state.enter("quality")
        begin_s, path = self._door.clock(), self._job.yardstick
        yardstick = None if path is None else read_yardstick(path)
        if path is not None and yardstick is None:
            raise RuntimeError(f"{path}: the tokens to compare with cannot be read.")
        text, on_progress = quality_text(text_file(config)), self._state.running
        found = measure_quality(llm, config, text, yardstick, on_progress=on_progress)
        self._result["metrics"] |= found[0]
        self._result["samples"]["quality"] = found[1]
        self._end_part("quality", begin_s)

    def _run_tiers(self, llm: Engine, config: TiersScenario) -> None:
        begin_s = self._door.clock()

        def save(figures: dict[str, Any]) -> None:
            self._result["samples"]["tiers"] = figures
            self._save()

        measure_tiers(
            llm,
            config,
            clock=self._door.clock,
            counter=self._link_counter(),
            on_part=lambda part: self._state.enter(f"tiers {part}"),
            save=save,
        )
        self._end_part("tiers", begin_s)
        self._result["reasons"] += [
            f"tiers: {part}: {figures['failed']}"
            for part, figures in self._result["samples"]["tiers"]["parts"].items()
            if "failed" in figures
        ]

    def _run_overhead(self, llm: Engine, config: OverheadScenario) -> None:
        self._state.enter("overhead")
        self._result["samples"]["overhead"] = measure_overhead(
            llm,
            config,
            clock=self._door.clock,
            on_progress=self._state.running,
            on_end=self._requests.of("overhead", 0),
            t=self._job.t,
            served={
                "wait": self._door.wait,
                "open_door": self._door.open_async,
                "run_async": self._door.run_async,
            },
        )
        self._result["measured"].append("overhead")

    def _link_counter(self) -> LinkCounter | None:
        gpu = self._gpu()
        return None if gpu is None else LinkCounter(gpu.link_rx_gb_s, self._link.factors)

    def _gpu(self) -> Gpu | None:
        return open_gpu(self._job.gpu_uuid) if self._job.gpu_uuid else None

    def _check(self, llm: Engine) -> None:
        if self._job.reference is None:
            return
        self._state.enter("check")
        reference, reference_name = read_reference(self._job.reference), self._job.reference.name
        if reference is None:
            raise RuntimeError(f"{self._job.reference}: the reference cannot be read.")
        prompts, expected = reference["prompts"], reference["tokens"]
        num_tokens = self._job.scenario.correctness.output_tokens
        if self._door.is_exact:
            got = greedy_tokens(llm, prompts, num_tokens, **self._conduct)
            compare_tokens(expected, got)
        else:
            answered, failures = tokens_of_answered(llm, prompts, num_tokens, **self._conduct)
            self._result["reasons"] += failures
            if not answered:
                return
            expected, got = [expected[i] for i in answered], list(answered.values())
        found = agree(expected, got)
        self._result["effective"]["correctness"] = found.facts | {"reference": reference_name}
        self._result["metrics"] |= {} if self._door.is_exact else found.metrics
        self._result["reasons"] += found.reasons
        self._result["notes"] += found.notes

    def _run_part(self, llm: Engine, part: str, config: RequestSet) -> StepTotals:
        clock, salt = self._door.clock, f"{self._job.salt}/{part}"
        prompts = part_prompts(llm, part, config, self._job.prompts.get(part))
        if config.warmup_requests:
            self._state.enter(f"{part} warm-up")
            self._result["reasons"] += warm_up_part(llm, part, config, clock=clock, salt=salt)
        latency = partial(measure_latency, t=self._job.t)
        measure = latency if part == "latency" else measure_throughput

        def once(watched: Engine, number: int) -> tuple[Outcome, StepTotals]:
            return measure(
                watched,
                prompts[number],
                config.output_tokens,
                clock=clock,
                on_progress=self._state.running,
                on_end=self._requests.of(part, number),
                limit_s=config.max_duration_s,
                salt=f"{salt}/{number}",
            )

        return self._measured(part, llm, config, once, len(prompts[0]) * config.output_tokens)

    def _run_serve(self, llm: Engine, config: ServeScenario) -> StepTotals:
        load = Load(
            config=config,
            rows=encode_rows(self._job.prompts.get("serve", ()), llm.tokenizer),
            trace=self._job.trace,
            vocab_size=llm.spec.vocab_size,
            avoid=special_ids(llm.tokenizer),
            salt=self._job.salt,
        )
        self._state.enter("serve warm-up")
        self._result["reasons"] += warm_up(llm, load, clock=self._door.clock)

        def once(watched: Engine, number: int) -> tuple[Outcome, StepTotals]:
            return measure_serve(
                watched,
                load.of_repeat(number),
                clock=self._door.clock,
                wait=self._door.wait,
                on_progress=self._state.running,
                on_end=self._requests.of("serve", number),
                open_door=self._door.open_async,
                run_async=self._door.run_async,
                t=self._job.t,
            )

        return self._measured("serve", llm, config, once)

    def _measured(
        self,
        part: str,
        llm: Engine,
        config: RequestSet | ServeScenario,
        once: Callable[[Engine, int], tuple[Outcome, StepTotals]],
        num_tokens: int | None = None,
    ) -> StepTotals:
        """Measure a part, all repeats, with its energy and KV; note what it found and when."""
        self._state.enter(part, num_tokens)
        gpu = self._gpu()
        before_j = gpu.energy_j() if gpu else None
        begin_s = self._door.clock()
        if self._job.scenario.record_routing:
            cast(Any, llm).forget_routing()  # of the parts before, and of warming up
        watch = KVWatch(llm, self._door.clock)
        experts = ExpertWatch(cast(Engine, watch), self._door.clock, self._state.found_experts)
        watched = cast(Engine, experts)
        outcome, totals = measure_repeats(partial(once, watched), config, self._job.t)
        self._note_window(part, begin_s)
        self._requests.flush()
        self._result["metrics"] |= outcome.metrics
        self._result["samples"][part] = outcome.samples
        if outcome.repeats:
            self._result["samples"].setdefault("repeats", {})[part] = outcome.repeats
        self._result["reasons"] += outcome.reasons
        self._result["notes"] += outcome.notes
        watch.note(part, self._result)
        experts.note(part, self._result)
        after_j = gpu.energy_j() if gpu else None
        if self._job.scenario.record_routing:
            write_trace(self._trace_path, cast(Any, llm).routing_trace())
        self._result["metrics"] |= _energy_metrics(before_j, after_j, outcome.num_output_tokens)
        if outcome.num_measured:
            self._result["measured"].append(part)
        self._save()
        if not outcome.num_measured:
            raise RequestError(f"nothing was measured. {outcome.reasons[0]}")
        return totals

    def _end_part(self, part: str, begin_s: float) -> None:
        """Note that a part was measured whole, and when; write what is there."""
        self._note_window(part, begin_s)
        self._result["measured"].append(part)
        self._save()

    def _note_window(self, part: str, begin_s: float) -> None:
        """Note when a part ran, on the machine's clock, which the samples of telemetry are on."""
        begin_s, end_s = (self._door.clock_zero_s + s for s in (begin_s, self._door.clock()))
        self._result["windows"].append({"part": part, "begin_s": begin_s, "end_s": end_s})

    def _note_transfers(self, timed: dict[str, StepTotals]) -> None:
        metrics, last = self._result["metrics"], list(timed.values())[-1]
        self._result["link_factor"] = self._link.factors.of(*bytes_by_way(last, metrics))
        metrics |= transfer_metrics(last, metrics) | kv_link_share(metrics)
        metrics |= expert_metrics(last, self._result["plan"].get("experts"))
        self._result["reasons"] += transfer_reasons(last)
        emulated = bool(self._result["effective"].get("emulated"))
        if not emulated:
            self._result["notes"] += link_notes(metrics)
            self._result["reasons"] += link_reasons(timed, metrics)
        metrics |= differences(metrics, emulated=emulated)

    def _note_memory(self, llm: Engine) -> None:
        metrics, reasons = memory_metrics(llm.memory())
        self._result["metrics"] |= metrics
        self._result["reasons"] += reasons


if __name__ == "__main__":
    sys.exit(serve())
