"""Downloads a model as its name says: `python fetching.py NAME`; fails, waits or comes."""

import os
import sys
import time
from pathlib import Path

from sqlalchemy import select

from console.registry.database import Database
from console.registry.stale import own_process
from console.registry.tables import Model


def main() -> int:
    database = Database.open(Path(os.environ["TIGHTFIT_HOME"]) / "registry.db")
    own = own_process()
    with database.write() as session:
        row = session.scalars(select(Model).where(Model.name == sys.argv[1])).one()
        row.state, row.done_bytes, row.total_bytes = "downloading", 2**29, 2**30
        row.pid, row.pid_started_s = own.pid, own.started_s
    if "waits" in sys.argv[1]:
        time.sleep(60)
    if "fails" in sys.argv[1]:
        sys.stderr.write("error: the hub has no such repository\n")
        return 1
    with database.write() as session:
        row = session.scalars(select(Model).where(Model.name == sys.argv[1])).one()
        row.state, row.pid = "untested", None
    database.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
