"""A worker process: jobs as JSON lines on stdin, results as JSON lines on stdout.

    python -m sandbox.worker NUMBER

One job at a time. The worker keeps a grader's sandbox alive for each of the last few
grading programs, since starting Python costs more than most gradings do; agent code never
runs in those. It ends when stdin does, or with its parent, and its sandboxes with it.
"""

import base64
import collections
import contextlib
import hashlib
import json
import math
import os
import selectors
import sys
import time
from collections.abc import Mapping
from typing import Any

from sandbox import namespaces
from sandbox.backends.local import LocalBackend, SandboxFailed
from sandbox.protocol import Grading, Job, Output, Result

_GRADERS_KEPT = 4


class GraderFailed(RuntimeError):
    """No verdict; `reason` is the code for the result."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Grader:
    """A grading program alive in its sandbox."""

    def __init__(self, backend: LocalBackend, grading: Grading, name: str):
        self._process, self._verdicts = backend.start_grader(
            grading.program, grading.limits, name
        )
        self._pending = b""

    def grade(
        self, artifacts: Mapping[str, bytes], payload: Any, seconds: float
    ) -> dict[str, Any]:
        """The program's verdict on these artifacts.

        Raises:
          GraderFailed: it died, took too long, raised, or gave something else.
        """
        request = json.dumps(
            {
                "artifacts": {
                    name: base64.b64encode(data).decode()
                    for name, data in artifacts.items()
                },
                "payload": payload,
            }
        )
        deadline = time.monotonic() + seconds
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        line = self._read_line(deadline)
        try:
            reply = json.loads(line)
        except ValueError as error:
            raise GraderFailed("grader_bad_verdict", repr(line[:200])) from error
        if "error" in reply:
            raise GraderFailed("grader_raised", reply["error"])
        return _checked(reply.get("verdict"))

    def _read_line(self, deadline: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._verdicts, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise GraderFailed("grader_timeout")
                data = os.read(self._verdicts, 1 << 20)
                if not data:
                    raise GraderFailed("grader_died")
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def close(self) -> None:
        self._process.kill()  # its sandbox dies with bubblewrap
        self._process.stdin.close()
        self._process.wait()
        os.close(self._verdicts)


def _checked(verdict: Any) -> dict[str, Any]:
    good = (
        isinstance(verdict, dict)
        and set(verdict) == {"components", "why"}
        and isinstance(verdict["why"], str)
        and isinstance(verdict["components"], dict)
        and all(
            type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1
            for value in verdict["components"].values()
        )
    )
    if not good:
        raise GraderFailed(
            "grader_bad_verdict",
            f"{verdict!r:.200} is not {{'components': {{name: 0..1}}, 'why': str}}",
        )
    return verdict


class Worker:
    """Runs jobs by a backend, with a few graders kept alive."""

    def __init__(self, backend: LocalBackend):
        self._backend = backend
        self._graders: collections.OrderedDict[str, Grader] = collections.OrderedDict()

    def close(self) -> None:
        for grader in self._graders.values():
            grader.close()
        self._graders.clear()

    def run(self, job: Job) -> Result:
        seconds: dict[str, float] = {}
        artifacts = dict(job.artifacts)
        known: dict[str, Any] = {"job_id": job.job_id, "seconds": seconds}
        if job.execution is not None:
            start = time.monotonic()
            try:
                ran = self._backend.run(job.execution)
            except (SandboxFailed, OSError) as error:
                detail = Output(tail=str(error).encode(), total_bytes=len(str(error)))
                return Result(
                    outcome="infra_fail",
                    reason="sandbox_failed",
                    stderr=detail,
                    **known,
                )
            seconds["execute"] = time.monotonic() - start
            known |= {
                "exit_code": ran.exit_code,
                "stdout": ran.stdout,
                "stderr": ran.stderr,
            }
            if ran.reason is not None:
                return Result(outcome="policy_fail", reason=ran.reason, **known)
            artifacts |= ran.artifacts
        start = time.monotonic()
        try:
            verdict = self._grade(job.grading, artifacts)
        except GraderFailed as error:
            detail = Output(tail=str(error).encode(), total_bytes=len(str(error)))
            return Result(
                outcome="grader_fail",
                reason=error.reason,
                **{**known, "stderr": detail},
            )
        seconds["grade"] = time.monotonic() - start
        return Result(outcome="ok", reason="graded", verdict=verdict, **known)

    def _grade(self, grading: Grading, artifacts: Mapping[str, bytes]) -> dict:
        digest = hashlib.sha256(
            f"{grading.program}\0{grading.limits}".encode()
        ).hexdigest()[:16]
        grader = self._graders.pop(digest, None)
        if grader is None:
            while len(self._graders) >= _GRADERS_KEPT:
                self._graders.popitem(last=False)[1].close()
            grader = Grader(self._backend, grading, f"grader-{digest}")
        try:
            verdict = grader.grade(artifacts, grading.payload, grading.limits.wall_seconds)
        except BaseException:
            grader.close()
            raise
        self._graders[digest] = grader
        return verdict


def main() -> None:
    parent = os.getppid()
    namespaces.die_with_parent()
    if os.getppid() != parent:
        return  # it died before this was asked for
    backend = LocalBackend(int(sys.argv[1]))
    worker = Worker(backend)
    # The mount point is all that a killed worker leaves; the pool removes it.
    print(json.dumps({"ready": backend.root}), flush=True)
    try:
        for line in sys.stdin.buffer:
            print(worker.run(Job.from_json(line)).to_json(), flush=True)
    finally:
        worker.close()
        backend.close()


if __name__ == "__main__":
    main()
