"""Many jobs through one pool: does anything grow that should not?

    python scripts/bench/soak.py --jobs 20000 --json soak.json --plot soak.png

A mix of episodes: honest ones, some that take too long, that crash, that leave processes
behind, and sessions with snapshots and forks. Every few seconds it is counted what the pool
holds of the machine. Flat means that over the second half of the run, when all that is kept
by design is full, the least-squares slope is below a bound. Every episode must also end as
its kind should.

The exit code is 1 if something grew or an episode ended otherwise.
"""

import argparse
import collections
import dataclasses
import json
import os
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from peers import sandbox_processes, sandbox_report

from sandbox import cgroups
from sandbox.local_workers import LocalWorkers
from sandbox.pool import Pool
from sandbox.protocol import Execution, Grading, Job, Limits
from sandbox.session import SessionFailed

GRADER = """
def grade(artifacts, payload):
    return {"components": {"right": float(artifacts["out"] == b"5")}, "why": ""}
"""
HONEST = "open('out', 'w').write('5')"
_CHILD = "['bash', '-c', 'sleep 300 & sleep 300']"
# Of each kind: its share, its program, what its end must be, and its seconds.
PROGRAMS: dict[str, tuple[int, str, str, float]] = {
    "honest": (60, HONEST, "graded", 30.0),
    "too long": (6, "import time; time.sleep(60)", "wall_timeout", 0.3),
    "crash": (6, "raise RuntimeError('x' * 1000)", "nonzero_exit", 30.0),
    "segmentation fault": (
        3,
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "killed_by_signal_11",
        30.0,
    ),
    "children left behind": (
        10,
        f"import subprocess\nsubprocess.Popen({_CHILD}, start_new_session=True)\n{HONEST}",
        "graded",
        30.0,
    ),
    "no artifact": (5, "pass", "missing_artifact", 30.0),
}
SESSIONS = "session"
_SESSION_SHARE = 10
_SNAPSHOTS = 8  # ids that are used over and over
_LEFT_SECONDS = 10.0  # for the kernel to bury what was killed
# Of what may grow by how much in a thousand jobs.
BOUNDS = {
    "pool_mb": 0.5,
    "workers_mb": 0.5,
    "zygotes_mb": 0.5,
    "pool_descriptors": 0.5,
    "worker_descriptors": 1.0,
    "processes": 1.0,
    "mounts": 1.0,
    "cgroups": 1.0,
    "shared_memory_entries": 0.1,
    "temporary_entries": 0.1,
}


@dataclasses.dataclass
class Progress:
    done: int = 0
    ended: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def count(self, kind: str, reason: str, expected: str) -> None:
        with self.lock:
            self.done += 1
            self.ended[f"{kind}: {reason}"] += 1
            if reason != expected:
                self.unexpected.append(f"{kind}: {reason}")


def job(number: int, kind: str) -> Job:
    _, program, _, seconds = PROGRAMS[kind]
    return Job(
        job_id=f"soak-{number}",
        domain=kind,
        execution=Execution(
            command=("python", "-I", "-S", "main.py"),
            files={"main.py": program.encode()},
            artifacts=("out",),
            limits=Limits(wall_seconds=seconds),
        ),
        grading=Grading(program=GRADER, payload=None),
    )


def episode(pool: Pool, number: int) -> str:
    """A session that is snapshotted, forked and opened again; how it ended."""
    snapshot_id = f"soak-{number % _SNAPSHOTS}"
    sessions = []
    try:
        session = pool.open(SESSIONS).result()
        sessions.append(session)
        session.exec("sleep 300 & echo 5 > out; cd /tmp; x=1").result()
        session.snapshot(snapshot_id).result()
        fork = session.fork().result()
        sessions.append(fork)
        fork.exec("echo 6 > other").result()
        again = pool.open(SESSIONS, snapshot_id=snapshot_id).result()
        sessions.append(again)
        said = again.exec("cat /workspace/out").result().stdout.text()
        grading = Grading(program=GRADER.replace('b"5"', 'b"5\\n"'), payload=None)
        result = session.grade(["out"], grading).result()
        right = said == "5\n" and result.verdict == {
            "components": {"right": 1.0},
            "why": "",
        }
        return result.reason if right else f"wrong: {said!r}, {result}"
    except SessionFailed as error:
        return f"{error}"
    finally:
        for session in sessions:
            session.close().result()


def kinds(jobs: int, seed: int) -> Iterator[tuple[int, str]]:
    names = [*PROGRAMS, SESSIONS]
    shares = [*(share for share, *_ in PROGRAMS.values()), _SESSION_SHARE]
    yield from enumerate(random.Random(seed).choices(names, shares, k=jobs))


def work(pool: Pool, jobs: int, seed: int, together: int, progress: Progress) -> None:
    """Keeps so many episodes in the pool until all are done."""
    left: queue.SimpleQueue = queue.SimpleQueue()
    for item in kinds(jobs, seed):
        left.put(item)

    def some() -> None:
        while True:
            try:
                number, kind = left.get_nowait()
            except queue.Empty:
                return
            if kind == SESSIONS:
                progress.count(kind, episode(pool, number), "graded")
            else:
                result = pool.submit(job(number, kind)).result()
                progress.count(kind, result.reason, PROGRAMS[kind][2])

    with ThreadPoolExecutor(together) as threads:
        for done in [threads.submit(some) for _ in range(together)]:
            done.result()


def sample(workers: LocalWorkers) -> dict[str, float]:
    """What the pool holds of the machine now."""
    pool, pids = os.getpid(), workers.pids
    members = sandbox_processes.by_kind(pool, pids)
    found = [folder for h in cgroups.hierarchies() for folder in h.folder.iterdir()]
    return {
        "pool_mb": sandbox_processes.resident_mb(pool),
        "workers_mb": sum(map(sandbox_processes.resident_mb, pids)),
        "zygotes_mb": sum(
            sandbox_processes.resident_mb(process.pid) for process in members["zygote"]
        ),
        "pool_descriptors": sandbox_processes.descriptors(pool),
        "worker_descriptors": sum(map(sandbox_processes.descriptors, pids)),
        "processes": sum(map(len, members.values())),
        "mounts": sum(map(sandbox_processes.mounts, pids)),
        "cgroups": sum(any(f"-{pid}-" in folder.name for pid in pids) for folder in found),
        "shared_memory_entries": len(os.listdir("/dev/shm")),
        "temporary_entries": _temporary_entries(),
    }


def _temporary_entries() -> int:
    """In folders of the pool's own, at any depth; others use the folder above as well."""
    folder = Path(tempfile.gettempdir())
    own = [path for path in folder.glob(f"jaxpt-*{os.getpid()}*") if path.is_dir()]
    return len(own) + sum(len(files) for path in own for _, _, files in os.walk(path))


def slope(done: list[float], values: list[float]) -> float:
    """Least squares, by the thousand jobs."""
    middle = statistics.mean(done)
    spread = sum((x - middle) ** 2 for x in done)
    if not spread:
        return 0.0
    mean = statistics.mean(values)
    return 1e3 * sum((x - middle) * (y - mean) for x, y in zip(done, values)) / spread


def judged(samples: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Of each figure its slope over the second half, and whether it is flat."""
    half = samples[-1]["done"] / 2
    second = [found for found in samples if found["done"] >= half]
    done = [found["done"] for found in second]
    verdicts = {}
    for name, bound in BOUNDS.items():
        values = [found[name] for found in second]
        grows = slope(done, values)
        verdicts[name] = {
            "first": samples[0][name],
            "middle": values[0],
            "last": values[-1],
            "most": max(found[name] for found in samples),
            "slope": grows,
            "bound": bound,
            "flat": grows <= bound,
        }
    return verdicts


def report(figures: dict[str, Any]) -> str:
    rows = [
        [
            name,
            *(f"{found[key]:.1f}" for key in ("first", "middle", "last", "most")),
            f"{found['slope']:+.3f}",
            f"{found['bound']:g}",
            "yes" if found["flat"] else "NO",
        ]
        for name, found in figures["verdicts"].items()
    ]
    header = ["", "first", "middle", "last", "most", "per 1,000 jobs", "bound", "flat"]
    ended = ", ".join(f"{name} {count}" for name, count in figures["ended"].items())
    return "\n\n".join(
        [
            sandbox_report.table(header, rows),
            f"{figures['jobs']} jobs in {figures['seconds']:.0f} s "
            f"({figures['jobs'] / figures['seconds']:.0f}/s): {ended}.",
            f"Otherwise than they should, {len(figures['unexpected'])} ended"
            + "".join(f"\n- {line:.300}" for line in figures["unexpected"][:10]),
            f"At the end, with the pool closed: {figures['left']}.",
            "All flat." if figures["good"] else "NOT FLAT, or not as it should be.",
        ]
    )


def plot(path: Path, samples: list[dict[str, float]]) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(BOUNDS), 1, figsize=(9, 2 * len(BOUNDS)), sharex=True
    )
    for axis, name in zip(axes, BOUNDS):
        axis.plot([s["done"] for s in samples], [s[name] for s in samples])
        axis.set_ylabel(name.replace("_", "\n"), fontsize=8)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("jobs done")
    figure.tight_layout()
    figure.savefig(path)


def left_behind(pids: list[int]) -> dict[str, int]:
    """What there is of the pool ten seconds after its end; all should be 0."""
    deadline = time.monotonic() + _LEFT_SECONDS
    while True:
        found = [folder for h in cgroups.hierarchies() for folder in h.folder.iterdir()]
        left = {
            "processes": sum(os.path.exists(f"/proc/{pid}") for pid in pids),
            "cgroups": sum(any(f"-{pid}-" in f.name for pid in pids) for f in found),
            "temporary entries": _temporary_entries(),
        }
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def soak(options: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, Any]:
    workers = LocalWorkers(options.workers)
    samples: list[dict[str, float]] = []
    progress = Progress()
    start = time.monotonic()
    with Pool(workers, session_share=0.1) as pool:
        pids = workers.pids
        working = threading.Thread(
            target=work,
            args=(pool, options.jobs, options.seed, options.together, progress),
        )
        working.start()
        while working.is_alive():
            working.join(options.every)
            seconds = time.monotonic() - start
            samples.append({"done": progress.done, "seconds": seconds, **sample(workers)})
            tell(f"{seconds:.0f} s: {samples[-1]}")
        seen = {
            process.pid
            for m in sandbox_processes.by_kind(0, pids).values()
            for process in m
        }
        if workers.pids != pids:
            progress.unexpected.append("a worker was lost")
    left = left_behind([*seen, *pids])
    verdicts = judged(samples)
    flat = all(found["flat"] for found in verdicts.values())
    return {
        "jobs": options.jobs,
        "seconds": samples[-1]["seconds"],
        "verdicts": verdicts,
        "ended": dict(sorted(progress.ended.items())),
        "unexpected": progress.unexpected,
        "left": left,
        "good": flat and not progress.unexpected and not any(left.values()),
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--together", type=int, default=16, help="jobs in the pool at a time"
    )
    parser.add_argument("--every", type=float, default=3.0, help="seconds between samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="do not print the samples")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the samples into this PNG file")
    options = parser.parse_args()

    def tell(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr)

    figures = soak(options, tell)
    print(report(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.plot:
        plot(options.plot, figures["samples"])
    sys.exit(0 if figures["good"] else 1)


if __name__ == "__main__":
    main()
