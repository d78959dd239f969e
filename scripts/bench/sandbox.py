"""One-shot Python episodes a second: jaxpt's sandboxes, and plain subprocesses beside them.

    python scripts/bench/sandbox.py --json figures.json

An episode writes a file in a fresh sandbox, and a grader in a second one reads it. The
plain subprocess isolates and grades nothing: it is the floor that starting Python sets. The
two run in turn, and the figures are medians over rounds.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from sandbox.local_workers import LocalWorkers
from sandbox.pool import Pool
from sandbox.protocol import Execution, Grading, Job

PROGRAM = "open('out', 'w').write('5')"
GRADER = """
def grade(artifacts, payload):
    return {"components": {"right": float(artifacts["out"] == b"5")}, "why": ""}
"""


def job(job_id: str) -> Job:
    return Job(
        job_id=job_id,
        domain="bench",
        execution=Execution(
            command=("python", "-I", "-S", "main.py"),
            files={"main.py": PROGRAM.encode()},
            artifacts=("out",),
        ),
        grading=Grading(program=GRADER, payload=None),
    )


def in_pool(pool: Pool, name: str, episodes: int) -> dict[str, float]:
    """Episodes a second, and medians of what an episode's own clock says, in ms."""
    start = time.perf_counter()
    futures = [pool.submit(job(f"{name}/{i}")) for i in range(episodes)]
    results = [future.result() for future in futures]
    seconds = time.perf_counter() - start
    outcomes = collections.Counter(result.outcome for result in results)
    if outcomes != {"ok": episodes}:
        raise SystemExit(f"Not every episode was graded: {dict(outcomes)}.")
    return {
        "oneshot_per_s": episodes / seconds,
        **{
            f"{part}_p50_ms": 1e3 * statistics.median(r.seconds[part] for r in results)
            for part in ("execute", "grade")
        },
    }


def plain(workers: int, episodes: int) -> dict[str, float]:
    def one(_):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-I", "-S", "-c", PROGRAM]
            subprocess.run(command, cwd=folder, check=True)

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(workers) as executor:
        list(executor.map(one, range(episodes)))
    return {"oneshot_per_s": episodes / (time.perf_counter() - start)}


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=200, help="in a round (200)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with Pool(LocalWorkers(options.workers)) as pool:
        in_pool(pool, "warm", 10 * options.workers)
        systems: dict[str, Callable[[int], dict[str, float]]] = {
            "ours": lambda i: in_pool(pool, str(i), options.episodes),
            "subprocess": lambda _: plain(options.workers, options.episodes),
        }
        rounds = {name: [] for name in systems}
        for i in range(options.rounds):
            for name, run in systems.items():
                rounds[name].append(run(i))
    figures = {name: median_of(found) for name, found in rounds.items()}
    figures["ratios"] = {
        "oneshot_ours_to_subprocess": figures["ours"]["oneshot_per_s"]
        / figures["subprocess"]["oneshot_per_s"]
    }
    for name, values in figures.items():
        shown = ", ".join(f"{key} {value:.2f}" for key, value in values.items())
        print(f"{name}: {shown}")
    if options.json:
        options.json.write_text(json.dumps(figures | {"rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
