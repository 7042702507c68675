"""Which door a job goes through: the one place that knows every system.

A system is a class with `from_config` (harness.door.EngineFactory) whose instances are a
harness.scenarios.drive.Engine. `harness.systems.base` has the parts that such an engine may
lack: a plan, a load report, counts of a step. A system is imported where it is chosen, so that the
worker of another starts without it.
"""

from harness.door import EngineDoor, engine_door
from harness.job import WorkerJob


def door_for(job: WorkerJob) -> EngineDoor:
    """Return the door to what answers the requests of a job."""
    if job.fake is not None:
        from harness.systems.fake.door import fake_door  # noqa: PLC0415

        return fake_door(job.fake)
    match job.system.kind:
        case "native":
            return engine_door()
        case "accelerate":
            from harness.systems.accelerate_engine import accelerate_door  # noqa: PLC0415

            return accelerate_door()
        case "vllm":
            from harness.systems.vllm_engine import vllm_door  # noqa: PLC0415

            return vllm_door()
        case "http":
            from harness.systems.http_engine import http_door  # noqa: PLC0415

            return http_door(job.system)
        case other:
            raise ValueError(f"system.kind: expected native or a peer, got {other!r}.")
