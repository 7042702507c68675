"""`python -m tightfit`, and the command `tightfit`. Any Python 3.6 reads this."""

import os
import sys

from harness.needs import require_environment


def main(argv: "list[str] | None" = None) -> int:
    """Carry out one command line; return its exit code."""
    require_environment()
    from harness.point.streams import outlive_readers  # noqa: PLC0415  needs the environment
    from tightfit.cli import run  # noqa: PLC0415

    if argv is None:
        outlive_readers()
        # GPUs are counted as nvidia-smi counts them, also by what this process starts.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
