"""Says of each backend here which layers of isolation hold, by trying to break them.

    python -m sandbox.doctor [--backend local] [--waive LAYER ...] [--json FILE]

Exits with 1 if a layer is missing that was not waived. A missing layer stops a run in the
same way, unless the run waives it by name.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

from sandbox import isolation
from sandbox.backends.backend import SandboxUnavailable
from sandbox.isolation import LAYERS, Finding
from sandbox.local_workers import LocalWorkers
from sandbox.pool import Pool
from sandbox.protocol import Execution, Grading, Job, Limits
from sandbox.worker import BACKENDS

_NO_GRADER = "def grade(artifacts, payload): return {'components': {}, 'why': ''}"
_EVERY_NAME = tuple(layer.name for layer in LAYERS)

_LEAVES = """
import os, subprocess, sys
command = [sys.executable, "-c", "import time; time.sleep(60)", {marker!r}]
for _ in range(2):
    subprocess.Popen(command, start_new_session=True)
"""


def _job(name: str, program: str) -> Job:
    return Job(
        job_id=name,
        domain="doctor",
        execution=Execution(
            command=("python", "-I", "-S", "main.py"),
            files={"main.py": program.encode()},
            limits=Limits(wall_seconds=30),
        ),
        grading=Grading(program=_NO_GRADER, payload=None),
    )


def _left_behind(pool: Pool) -> str | None:
    """What a sandbox leaves alive on this machine, if it does."""
    marker = f"jaxpt-doctor-{os.getpid()}-{time.monotonic_ns()}"
    pool.submit(_job("leaves", _LEAVES.format(marker=marker))).result()
    left = _alive(marker)
    return f"processes {left} are alive after their sandbox" if left else None


def _alive(marker: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def examine(backend: str, options: dict) -> list[Finding]:
    """What is broken in this backend's sandboxes.

    Raises:
      SandboxUnavailable: none could be made.
    """
    workers = LocalWorkers(1, backend=backend, options=options)
    with Pool(workers, waive=_EVERY_NAME) as pool:
        again = isolation.breaker("isolation/again", beside=True)
        results = [pool.submit(job).result() for job in (again, *isolation.jobs(-1)[1:])]
        found = isolation.findings(results)
        if how := _left_behind(pool):
            (death,) = (layer for layer in LAYERS if layer.name == "death")
            found.append(Finding(death, how))
    return found


def _table(backend: str, found: list[Finding], waived: tuple[str, ...]) -> list[dict]:
    broken = {finding.layer.name: finding.how for finding in found}
    rows = []
    for layer in LAYERS:
        state = "enforced"
        if layer.name in broken:
            state = "waived" if layer.name in waived else "missing"
        rows.append(
            {
                "backend": backend,
                "layer": layer.name,
                "state": state,
                "keeps a program from": layer.what,
                "how it was broken": broken.get(layer.name, ""),
                "remedy": layer.remedy if layer.name in broken else "",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=sorted(BACKENDS))
    parser.add_argument("--waive", action="append", default=[], metavar="LAYER")
    parser.add_argument("--options", type=json.loads, default={}, help="of the backend")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    waived = tuple(arguments.waive)
    try:
        isolation.check_waivers(waived)
    except ValueError as error:
        parser.error(str(error))
    rows, failed = [], False
    for backend in arguments.backend or sorted(BACKENDS):
        print(f"{backend}:")
        try:
            table = _table(backend, examine(backend, arguments.options), waived)
        except SandboxUnavailable as error:
            print(f"  unavailable: {error}")
            rows.append({"backend": backend, "state": "unavailable", "why": str(error)})
            failed = failed or arguments.backend is not None
            continue
        for row in table:
            print(f"  {row['state']:<9} {row['layer']:<20} {row['keeps a program from']}")
            if row["state"] != "enforced":
                print(f"{'':12}{row['how it was broken']}")
                print(f"{'':12}to mend it: {row['remedy']}")
        failed = failed or any(row["state"] == "missing" for row in table)
        rows += table
    if all(row["state"] == "unavailable" for row in rows):
        failed = True
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
