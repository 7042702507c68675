"""The sampler's process: `python -m harness.telemetry RUN_DIR ...`, or `--self-test`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.observe.parent import die_with_parent
from harness.observe.sampler import INTERVAL_S, Commands, run


def main(argv: Sequence[str] | None = None) -> int:
    """Sample until standard input ends, or test the sampler; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m harness.telemetry", description=__doc__)
    parser.add_argument("run_dir", type=Path, nargs="?", help="where the rows go")
    parser.add_argument("--gpu", help="UUID of the run's GPU")
    parser.add_argument("--parent", type=int, help="process with which this one ends")
    parser.add_argument("--interval-s", type=float, default=INTERVAL_S, help="between two rows")
    parser.add_argument(
        "--self-test", action="store_true", help="sample this machine, print what that costs"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of the self-test")
    arguments = parser.parse_args(argv)
    if arguments.self_test:
        from harness.observe.self_test import self_test  # noqa: PLC0415  not for the sampler

        return self_test(arguments.seconds, arguments.gpu)
    if arguments.run_dir is None:
        parser.error("expected a run's folder, or --self-test.")
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    run(
        arguments.run_dir,
        arguments.gpu,
        Commands(sys.stdin.fileno()),
        interval_s=arguments.interval_s,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
