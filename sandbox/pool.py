"""A pool of worker processes: jobs in, futures of results out.

A worker that dies or stops answering is replaced and its job tried again; what fails for
reasons of ours every time comes back as `infra_fail` or `grader_fail`, never as a score.
"""

import collections
import contextlib
import dataclasses
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from sandbox.backends.local import SandboxUnavailable
from sandbox.protocol import Execution, Grading, Job, Limits, Output, Result

_STARTUP_SECONDS = 60.0
_SLACK_SECONDS = 20.0  # beyond a job's own limits, before its worker counts as stuck
_RESULTS_KEPT = 4096


class WorkerLost(RuntimeError):
    """The worker is gone; `reason` is the code for the result."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Pool:
    """`num_workers` sandboxes at a time; a context manager.

    max_attempts: how often a job is tried when the infrastructure or the grader fails.

    Raises:
      SandboxUnavailable: this machine can't isolate; the message says what is missing.
    """

    def __init__(self, *, num_workers: int = 2, max_attempts: int = 3):
        if num_workers < 1 or max_attempts < 1:
            raise ValueError(
                f"num_workers={num_workers} and max_attempts={max_attempts} must be 1 "
                "or more."
            )
        self._max_attempts = max_attempts
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._futures: collections.OrderedDict[str, Future[Result]] = (
            collections.OrderedDict()
        )
        self._closed = False
        self._workers = [_WorkerProcess(number) for number in range(num_workers)]
        self._threads: list[threading.Thread] = []
        try:
            _self_check(self._workers[0])
        except BaseException:
            self._workers[0].kill()
            raise
        self._threads = [
            threading.Thread(
                target=self._serve, args=(worker,), name="sandbox-pool", daemon=True
            )
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that are up."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def submit(self, job: Job) -> "Future[Result]":
        """The result to come; never blocks, and the future never raises.

        A job_id seen before gets the same future (the last few thousand are known).
        """
        with self._lock:
            if job.job_id in self._futures:
                return self._futures[job.job_id]
            future: Future[Result] = Future()
            self._futures[job.job_id] = future
            while len(self._futures) > _RESULTS_KEPT:
                oldest = next(iter(self._futures))
                if not self._futures[oldest].done():
                    break
                del self._futures[oldest]
            if self._closed:
                future.set_result(_failed(job, "pool_closed", ""))
            else:
                self._jobs.put((job, future, time.monotonic()))
        return future

    def close(self) -> None:
        """Ends every worker; jobs not yet done resolve as `infra_fail: pool_closed`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for worker in self._workers:
            worker.kill()
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.kill()
        with contextlib.suppress(queue.Empty):
            while True:
                entry = self._jobs.get_nowait()
                if entry is not None:
                    entry[1].set_result(_failed(entry[0], "pool_closed", ""))

    def _serve(self, worker: "_WorkerProcess") -> None:
        while (entry := self._jobs.get()) is not None:
            job, future, submitted = entry
            waited = time.monotonic() - submitted
            result = self._attempts(worker, job)
            seconds = {"queue": waited, **result.seconds}
            future.set_result(dataclasses.replace(result, seconds=seconds))
        worker.kill()

    def _attempts(self, worker: "_WorkerProcess", job: Job) -> Result:
        result = _failed(job, "pool_closed", "")
        for attempt in range(1, self._max_attempts + 1):
            if self._closed:
                return _failed(job, "pool_closed", "")
            try:
                result = worker.run(job)
            except WorkerLost as error:
                worker.kill()
                result = _failed(job, error.reason, str(error))
            except Exception as error:  # a job that can't be sent, or a bug of ours
                worker.kill()
                result = _failed(job, "sandbox_failed", repr(error))
            result = dataclasses.replace(result, attempts=attempt)
            if result.outcome not in ("infra_fail", "grader_fail"):
                break
        if self._closed and result.outcome == "infra_fail":
            return _failed(job, "pool_closed", "")
        return result


def _failed(job: Job, reason: str, detail: str) -> Result:
    encoded = detail.encode()
    return Result(
        job_id=job.job_id,
        outcome="infra_fail",
        reason=reason,
        stderr=Output(tail=encoded, total_bytes=len(encoded)),
    )


class _WorkerProcess:
    """One worker, started when it is needed and anew after it was lost."""

    def __init__(self, number: int):
        self._number = number
        self._process: subprocess.Popen | None = None
        self._mount_point: str | None = None
        self._pending = b""
        # Guards starting against killing from another thread.
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process else None

    def run(self, job: Job) -> Result:
        """Raises WorkerLost if the worker does not give the job's result."""
        process = self._started()
        limits = [job.grading.limits.wall_seconds]
        if job.execution is not None:
            limits.append(job.execution.limits.wall_seconds)
        try:
            process.stdin.write(job.to_json().encode() + b"\n")
            process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise WorkerLost("worker_died") from error
        line = self._read_line(process, sum(limits) + _SLACK_SECONDS)
        result = Result.from_json(line)
        if result.job_id != job.job_id:
            raise WorkerLost("worker_died", f"it answered for {result.job_id!r}")
        return result

    def _started(self) -> subprocess.Popen:
        if self._process is not None:
            return self._process
        package_folder = str(Path(__file__).parent.parent)
        with self._lock:
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "sandbox.worker", str(self._number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": package_folder},
            )
        self._pending = b""
        line = self._read_line(process, _STARTUP_SECONDS)
        self._mount_point = json.loads(line)["ready"]
        return process

    def _read_line(self, process: subprocess.Popen, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        descriptor = process.stdout.fileno()
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise WorkerLost("worker_unresponsive", f"no answer in {seconds:.0f} s")
            data = os.read(descriptor, 1 << 20)
            if not data:
                said = process.stderr.read()[-2000:].decode(errors="replace")
                raise WorkerLost("worker_died", said)
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def kill(self) -> None:
        """Ends the worker and with it its sandboxes; safe from any thread."""
        with self._lock:
            process = self._process
            if process is None:
                return
            process.kill()
            process.wait()
            self._process = None
            if self._mount_point is not None:
                with contextlib.suppress(OSError):
                    os.rmdir(self._mount_point)


_CHECK_PROGRAM = b"""
import os, resource, socket
seen = {
    "pid": os.getpid() < 20,
    "mount": not os.path.exists("/etc/passwd") and not os.access("/usr", os.W_OK),
    "net": [name for _, name in socket.if_nameindex()] == ["lo"],
    "user": os.getuid() != 0 or open("/proc/self/uid_map").read().split()[2] == "1",
    "limits": resource.getrlimit(resource.RLIMIT_NPROC)[1] == 18,
}
with open("seen", "w") as file:
    file.write(" ".join(name for name, good in seen.items() if not good))
"""

_CHECK_GRADER = """
def grade(artifacts, payload):
    missing = artifacts["seen"].decode()
    return {"components": {"isolated": float(not missing)}, "why": missing}
"""


def _self_check(worker: _WorkerProcess) -> None:
    """Runs a program that looks for each layer of isolation from the inside.

    Raises:
      SandboxUnavailable: with what is missing.
    """
    job = Job(
        job_id="self-check",
        domain="self-check",
        execution=Execution(
            command=("python", "-I", "-S", "check.py"),
            files={"check.py": _CHECK_PROGRAM},
            artifacts=("seen",),
            limits=Limits(processes=16, wall_seconds=30),
        ),
        grading=Grading(program=_CHECK_GRADER, payload=None),
    )
    remedy = (
        "Allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "user.max_user_namespaces>0) or run as root; the Docker backend is the other way."
    )
    try:
        result = worker.run(job)
    except WorkerLost as error:
        raise SandboxUnavailable(
            f"A sandbox worker did not start: {error} {remedy}"
        ) from error
    if result.verdict is None:
        raise SandboxUnavailable(
            f"A sandbox could not be made ({result.reason}): "
            f"{result.stderr.text().strip()} {remedy}"
        )
    if result.verdict["why"]:
        raise SandboxUnavailable(
            f"Sandboxes here lack: {result.verdict['why']} isolation. {remedy}"
        )
