"""A worker process: jobs as JSON lines on stdin, results as JSON lines on stdout.

    python -m sandbox.worker NUMBER

One job at a time. The worker keeps a grader's sandbox alive for each of the last few
grading programs, since starting Python costs more than most gradings do; agent code
never runs in those. It ends when stdin does, or with its parent, and its sandboxes too.
"""

import base64
import collections
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from sandbox import limits, namespaces
from sandbox.backends.local import LocalBackend, SandboxFailed, SandboxUnavailable
from sandbox.lines import Lines
from sandbox.protocol import Grading, Job, Output, Result

_GRADERS_KEPT = 4
_MAX_VERDICT_BYTES = 1 << 20


class GraderFailed(RuntimeError):
    """No verdict; `reason` is the code for the result."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Grader:
    """A grading program alive in its sandbox."""

    def __init__(self, backend: LocalBackend, grading: Grading):
        self._sandbox = backend.start_grader(grading.program, grading.limits)
        requests = self._sandbox.process.stdin
        assert requests is not None
        self._lines = Lines(
            self._sandbox.verdicts, requests.fileno(), max_bytes=_MAX_VERDICT_BYTES
        )
        self._number = 0

    def grade(
        self, artifacts: Mapping[str, bytes], payload: Any, seconds: float
    ) -> dict[str, Any]:
        """The program's verdict on these artifacts.

        Raises:
          GraderFailed: it died, took too long, raised, or gave something else.
        """
        self._number += 1
        request = json.dumps(
            {
                "number": self._number,
                "artifacts": {
                    name: base64.b64encode(data).decode()
                    for name, data in artifacts.items()
                },
                "payload": payload,
            }
        )
        deadline = time.monotonic() + seconds
        try:
            self._lines.send(request.encode(), deadline)
            reply = json.loads(self._lines.receive(deadline))
        except TimeoutError as error:
            raise GraderFailed("grader_timeout", f"{seconds} s passed") from error
        except EOFError as error:
            raise GraderFailed("grader_died") from error
        except (ValueError, RecursionError) as error:
            raise GraderFailed("grader_bad_verdict", str(error)) from error
        # One reply to each request: another could pass for the next one's verdict.
        if (
            not isinstance(reply, dict)
            or reply.get("number") != self._number
            or self._lines.unread()
        ):
            raise GraderFailed("grader_bad_verdict", f"unasked for: {reply!r:.200}")
        if "raised" in reply:
            raise GraderFailed("grader_raised", str(reply["raised"]))
        if "malformed" in reply:
            raise GraderFailed("grader_bad_verdict", str(reply["malformed"]))
        return _checked(reply.get("verdict"))

    def close(self) -> None:
        self._sandbox.close()


def _checked(verdict: Any) -> dict[str, Any]:
    good = (
        isinstance(verdict, dict)
        and set(verdict) == {"components", "why"}
        and isinstance(verdict["why"], str)
        and isinstance(verdict["components"], dict)
        and all(
            type(value) in (int, float) and 0 <= value <= 1  # so NaN is none
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
                return Result(
                    outcome="infra_fail",
                    reason="sandbox_failed",
                    stderr=_detail(error),
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
            seconds["grade"] = time.monotonic() - start
            known["stderr"] = _detail(error)
            return Result(outcome="grader_fail", reason=error.reason, **known)
        seconds["grade"] = time.monotonic() - start
        return Result(outcome="ok", reason="graded", verdict=verdict, **known)

    def _grade(self, grading: Grading, artifacts: Mapping[str, bytes]) -> dict:
        digest = hashlib.sha256(f"{grading.program}\0{grading.limits}".encode()).hexdigest()
        self._backend.allow(grading.limits)
        grader = self._graders.pop(digest, None)
        if grader is None:
            while len(self._graders) >= _GRADERS_KEPT:
                self._graders.popitem(last=False)[1].close()
            grader = Grader(self._backend, grading)
        try:
            verdict = grader.grade(artifacts, grading.payload, grading.limits.wall_seconds)
        except BaseException:
            grader.close()
            raise
        self._graders[digest] = grader
        return verdict


def _detail(error: Exception) -> Output:
    text = str(error).encode(errors="replace")
    return Output(tail=text, total_bytes=len(text))


def main() -> None:
    parent = os.getppid()
    namespaces.die_with_parent()
    if os.getppid() != parent:
        return  # it died before this was asked for
    limits.volunteer_when_memory_runs_out()
    try:
        worker = Worker(LocalBackend(int(sys.argv[1])))
    except (SandboxUnavailable, OSError) as error:
        print(json.dumps({"unavailable": str(error)}), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    try:
        for line in sys.stdin.buffer:
            print(worker.run(Job.from_json(line)).to_json(), flush=True)
    finally:
        worker.close()


if __name__ == "__main__":
    main()
