"""Grading programs alive in sandboxes of their own, and the check of what they say."""

import asyncio
import base64
import collections
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from sandbox.backends.backend import Backend, GraderChannel
from sandbox.lines import Lines, LineTooLong
from sandbox.protocol import Grading

_MAX_VERDICT_BYTES = 1 << 20


class GraderFailed(RuntimeError):
    """No verdict; `reason` is the code for the result."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Grader:
    """A grading program alive in its sandbox."""

    def __init__(self, channel: GraderChannel):
        self._channel = channel
        self._lines = Lines(
            channel.verdicts, channel.requests, max_bytes=_MAX_VERDICT_BYTES
        )
        self._number = 0

    async def grade(
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
        try:
            async with asyncio.timeout(seconds):
                await self._lines.send(request.encode())
                reply = json.loads(await self._lines.receive())
        except TimeoutError as error:
            raise GraderFailed("grader_timeout", f"{seconds} s passed") from error
        except EOFError as error:
            raise GraderFailed("grader_died") from error
        except (ValueError, RecursionError, LineTooLong) as error:
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
        return checked(reply.get("verdict"))

    async def close(self) -> None:
        self._lines.close()
        await self._channel.close()


def checked(verdict: Any) -> dict[str, Any]:
    """The verdict, if it is one; raises GraderFailed."""
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


class Graders:
    """The last few grading programs, kept alive: starting one costs more than a grading.

    One that is at work is nobody else's; a second of the same program is started then.
    kept: how many are kept while idle.
    """

    def __init__(self, backend: Backend, *, kept: int = 4):
        self._backend = backend
        self._kept = kept
        self._idle: collections.OrderedDict[str, list[Grader]] = collections.OrderedDict()

    async def grade(self, grading: Grading, artifacts: Mapping[str, bytes]) -> dict:
        """The verdict. Raises GraderFailed, or SandboxFailed if no sandbox came up."""
        program = f"{grading.program}\0{grading.limits}".encode(errors="replace")
        digest = hashlib.sha256(program).hexdigest()
        waiting = self._idle.get(digest)
        if waiting:
            grader = waiting.pop()
        else:
            channel = await self._backend.start_grader(grading.program, grading.limits)
            grader = Grader(channel)
        try:
            seconds = grading.limits.wall_seconds
            verdict = await grader.grade(artifacts, grading.payload, seconds)
        except BaseException:
            await asyncio.shield(grader.close())
            raise
        self._idle.setdefault(digest, []).append(grader)
        self._idle.move_to_end(digest)
        while sum(map(len, self._idle.values())) > self._kept:
            oldest = next(iter(self._idle))
            dropped = self._idle[oldest].pop()
            if not self._idle[oldest]:
                del self._idle[oldest]
            await dropped.close()
        return verdict

    async def close(self) -> None:
        graders = [grader for idle in self._idle.values() for grader in idle]
        self._idle.clear()
        for grader in graders:
            await grader.close()
