"""A pool of worker processes: jobs in, futures of results out.

A worker that dies or stops answering is replaced and its job tried again; what fails
for reasons of ours every time comes back as `infra_fail` or `grader_fail`, never as a
score.
"""

import collections
import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from sandbox import cgroups, self_check
from sandbox.backends.local import SandboxUnavailable
from sandbox.lines import Lines, LineTooLong
from sandbox.protocol import Job, Output, ProtocolError, Result

_STARTUP_SECONDS = 60.0
_SLACK_SECONDS = 20.0  # beyond a job's own limits, before its worker counts as stuck
_RESULTS_KEPT = 4096
_MAX_RESULT_BYTES = 64 << 20


class WorkerLost(RuntimeError):
    """The worker is of no more use; `reason` is the code for the result."""

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
        self._threads = [
            threading.Thread(
                target=self._serve, args=(worker,), name="sandbox-pool", daemon=True
            )
            for worker in self._workers
        ]
        # A job like any other, as a worker lives no longer than the thread that started
        # it, so that must not be the caller's.
        check = self.submit(self_check.job())
        try:
            for thread in self._threads:
                thread.start()
            missing = self_check.missing(check.result())
        except BaseException:
            self.close()
            raise
        if missing:
            self.close()
            raise SandboxUnavailable(missing)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that are up."""
        return [pid for worker in self._workers if (pid := worker.pid) is not None]

    def submit(self, job: Job) -> "Future[Result]":
        """The result to come; never blocks, and the future never raises.

        A job_id seen before gets the same future (the last few thousand are known). Not
        yet begun, a job can be cancelled by its future.
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
                future.set_result(_failed(job, "pool_closed"))
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
            worker.close()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self._serve_one(None, self._jobs.get_nowait())

    def _serve(self, worker: "_WorkerProcess") -> None:
        while (entry := self._jobs.get()) is not None:
            self._serve_one(worker, entry)
        worker.discard()

    def _serve_one(self, worker: "_WorkerProcess | None", entry) -> None:
        if entry is None:
            return
        job, future, submitted = entry
        if not future.set_running_or_notify_cancel():
            return
        waited = time.monotonic() - submitted
        result = self._attempts(worker, job) if worker else _failed(job, "pool_closed")
        seconds = {"queue": waited, **result.seconds}
        future.set_result(dataclasses.replace(result, seconds=seconds))

    def _attempts(self, worker: "_WorkerProcess", job: Job) -> Result:
        result = _failed(job, "pool_closed")
        for attempt in range(1, self._max_attempts + 1):
            if self._closed:
                return _failed(job, "pool_closed")
            try:
                result = worker.run(job)
            except WorkerLost as error:
                worker.discard()
                result = _failed(job, error.reason, str(error))
            except Exception as error:  # the future never raises, so it must resolve
                worker.discard()
                result = _failed(job, "sandbox_failed", repr(error))
            result = dataclasses.replace(result, attempts=attempt)
            if result.outcome not in ("infra_fail", "grader_fail"):
                break
        if self._closed and result.outcome == "infra_fail":
            return _failed(job, "pool_closed")
        return result


def _failed(job: Job, reason: str, detail: str = "") -> Result:
    encoded = detail.encode(errors="replace")
    return Result(
        job_id=job.job_id,
        outcome="infra_fail",
        reason=reason,
        stderr=Output(tail=encoded, total_bytes=len(encoded)),
    )


class _WorkerProcess:
    """One worker, started when it is needed and anew after it was lost.

    `close` and `pid` may be used from any thread, the rest from one.
    """

    def __init__(self, number: int):
        self._number = number
        self._process: subprocess.Popen | None = None
        self._lines: Lines | None = None
        self._closed = False
        self._lock = threading.Lock()  # starting against closing

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process else None

    def run(self, job: Job) -> Result:
        """Raises WorkerLost if the worker does not give the job's result."""
        seconds = job.grading.limits.wall_seconds + _SLACK_SECONDS
        if job.execution is not None:
            seconds += job.execution.limits.wall_seconds
        lines = self._started()
        result_line = self._ask(lines, job.to_json().encode(), seconds)
        try:
            result = Result.from_json(result_line)
        except ProtocolError as error:
            raise WorkerLost("worker_died", f"it answered nonsense: {error}") from error
        if result.job_id != job.job_id:
            raise WorkerLost("worker_died", f"it answered for {result.job_id!r}")
        return result

    def _started(self) -> Lines:
        if self._lines is not None:
            return self._lines
        package_folder = str(Path(__file__).parent.parent)
        with self._lock:
            if self._closed:
                raise WorkerLost("pool_closed")
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "sandbox.worker", str(self._number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": package_folder},
            )
        assert process.stdin and process.stdout
        lines = Lines(
            process.stdout.fileno(),
            process.stdin.fileno(),
            max_bytes=_MAX_RESULT_BYTES,
        )
        hello = json.loads(self._ask(lines, None, _STARTUP_SECONDS))
        if "unavailable" in hello:
            raise WorkerLost("sandbox_failed", hello["unavailable"])
        self._lines = lines
        return lines

    def _ask(self, lines: Lines, line: bytes | None, seconds: float) -> bytes:
        """Sends a line, if there is one, and returns the next that comes back."""
        deadline = time.monotonic() + seconds
        try:
            if line is not None:
                lines.send(line, deadline)
            return lines.receive(deadline)
        except TimeoutError as error:
            detail = f"no answer in {seconds:.0f} s"
            raise WorkerLost("worker_unresponsive", detail) from error
        except EOFError as error:
            raise WorkerLost("worker_died", self._last_words()) from error
        except LineTooLong as error:
            raise WorkerLost("worker_died", str(error)) from error

    def _last_words(self) -> str:
        """What a worker that has ended said on stderr."""
        self._kill()
        assert self._process and self._process.stderr
        os.set_blocking(self._process.stderr.fileno(), False)
        said = self._process.stderr.read() or b""
        return said[-2000:].decode(errors="replace").strip()

    def discard(self) -> None:
        """Ends the worker and with it its sandboxes; `run` will start another."""
        process = self._process
        if process is None:
            return
        self._kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(BrokenPipeError):
                if stream:
                    stream.close()
        self._process = self._lines = None

    def close(self) -> None:
        """Ends the worker for good; whoever waits for it is told."""
        with self._lock:
            self._closed = True
        self._kill()

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            cgroups.remove_those_of_the_dead()
