"""A trainer for the chaos test: runs episodes, and goes on where a killed one left off.

    python trainer.py LEDGER EPISODES FIRST WORKERS

Each episode that resolves is one line of the ledger, `id outcome reason reward attempts`,
written in one call. Even episodes are jobs, odd ones sessions of three turns that go on
from their last snapshot when their worker is lost.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from sandbox.local_workers import LocalWorkers, machine
from sandbox.pool import Pool
from sandbox.protocol import Execution, Grading, Job, Limits
from sandbox.session import SessionFailed

GRADER = """
def grade(artifacts, payload):
    right = artifacts["out"].decode() == payload
    return {"components": {"right": float(right)}, "why": repr(artifacts["out"])}
"""
LIMITS = Limits(wall_seconds=60, memory_bytes=128 << 20, workspace_bytes=4 << 20, cpus=0.5)
PROGRAM = """
import subprocess, sys, time
subprocess.Popen(["sleep", "300.{marker}"], start_new_session=True)
time.sleep(0.1)
open("out", "w").write("{text}")
"""


class Ledger:
    """Lines that are there whole or not at all."""

    def __init__(self, path: str):
        self.known = {line.split()[0] for line in Path(path).read_text().splitlines()}
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, *words) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def grading(text):
    return Grading(program=GRADER, payload=text, limits=Limits(wall_seconds=60))


def run_job(pool, number, marker):
    job = Job(
        job_id=f"{number}",
        domain="jobs",
        execution=Execution(
            command=("python", "-I", "-S", "main.py"),
            files={"main.py": PROGRAM.format(marker=marker, text=number).encode()},
            artifacts=("out",),
            limits=LIMITS,
        ),
        grading=grading(f"{number}"),
    )
    return pool.submit(job).result()


def run_session(pool, number, marker):
    """Three turns that each append; a turn lost with its worker is taken again."""
    turn, snapshot = 0, ""
    for _ in range(20):
        with contextlib.suppress(SessionFailed):
            session = pool.open("sessions", LIMITS, snapshot_id=snapshot).result()
            turn = session.state or 0
            while turn < 3:
                script = f"sleep 300.{marker} & echo {number}.{turn} >>out"
                ran = session.exec(script).result()
                if ran.reason is not None:  # its shell was killed, not its sandbox
                    session.close().result()
                    raise SessionFailed(ran.reason)
                name = f"{number}/{turn}/{time.monotonic_ns()}"
                session.snapshot(name, state=turn + 1).result()
                turn, snapshot = turn + 1, name
            expected = "".join(f"{number}.{turn}\n" for turn in range(3))
            result = session.grade(["out"], grading(expected)).result()
            session.close().result()
            return result
    return None


def main():
    path, episodes, marker, workers = sys.argv[1], *map(int, sys.argv[2:5])
    ledger = Ledger(path)
    todo = [number for number in range(episodes) if str(number) not in ledger.known]
    lock = threading.Lock()
    capacity = machine(workers)
    with Pool(LocalWorkers(workers, capacity=capacity), max_attempts=8) as pool:

        def work():
            while True:
                with lock:
                    if not todo:
                        return
                    number = todo.pop(0)
                run = run_session if number % 2 else run_job
                result = run(pool, number, marker)
                if result is None:
                    ledger.write(number, "infra_fail", "gave_up", None, 0)
                    continue
                reward = result.verdict["components"]["right"] if result.verdict else None
                ledger.write(number, result.outcome, result.reason, reward, result.attempts)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
