"""A session of a pool, for an episode of many turns; each method asks its worker.

Methods never block and may be called from any thread; requests are done in the order of
the calls. Their futures raise `SessionFailed`.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from sandbox.metrics import Metrics
from sandbox.protocol import Grading, Ran, Result
from sandbox.sessions import (
    Close,
    Done,
    Exec,
    Failed,
    Files,
    Fork,
    Grade,
    ReadFiles,
    Reply,
    Request,
    TakeSnapshot,
    WriteFiles,
)
from sandbox.workers import Link, WorkerLost

_SLACK_SECONDS = 30.0  # beyond a request's own limits, before its worker counts as stuck


class SessionFailed(RuntimeError):
    """A request was not done; `reason` is a code.

    `is_lost`: whether the session is gone: begin another from its last snapshot, or count
    the episode as `infra_fail`. Otherwise only this request failed.
    """

    def __init__(self, reason: str, detail: str = "", *, is_lost: bool = False):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.is_lost = is_lost


class Session:
    """Made by `Pool.open`; `state` is that of the snapshot it began from.

    A command is done at most once: if its worker is lost the session is too, and whether
    the command ran will never be known.
    """

    def __init__(
        self,
        session_id: str,
        domain: str,
        link: Link,
        state: Any,
        *,
        call: Callable[[Coroutine[Any, Any, Any]], Future],
        on_fork: Callable[["Session", str], "Session"],
        on_close: Callable[["Session"], None],
        metrics: Metrics,
    ):
        self.session_id = session_id
        self.domain = domain
        self._metrics = metrics
        self.state = state
        self.used_at = time.monotonic()
        self._link = link
        self._call = call
        self._on_fork = on_fork
        self._on_close = on_close
        self._requests = 0
        self._lost: SessionFailed | None = None
        self._turn = asyncio.Lock()

    def exec(
        self,
        script: str,
        *,
        wall_seconds: float = 30.0,
        output_bytes: int = 16 << 10,
        tool: str = "shell",
    ) -> "Future[Ran]":
        """Runs a bash script in the session's shell.

        At `wall_seconds` all that runs is killed, and the shell too if it is stuck. What a
        script leaves in the background lives on. tool: what it counts as in the metrics.
        """
        request = Exec(
            session_id=self.session_id,
            script=script,
            wall_seconds=wall_seconds,
            output_bytes=output_bytes,
        )

        async def ran() -> Ran:
            ran = await self._request(request, Ran, seconds=wall_seconds)
            self._metrics.count_script(self.domain, tool, ran)
            return ran

        return self._call(ran())

    def write_files(self, files: Mapping[str, bytes]) -> "Future[Done]":
        """Fails with `no_space` if the workspace is full."""
        return self._ask(WriteFiles(session_id=self.session_id, files=files), Done)

    def read_files(
        self, paths: Sequence[str], *, max_bytes: int = 16 << 20
    ) -> "Future[Files]":
        """Regular files of at most `max_bytes`; of the others, the reason why not."""
        return self._ask(
            ReadFiles(session_id=self.session_id, paths=tuple(paths), max_bytes=max_bytes),
            Files,
        )

    def snapshot(
        self,
        snapshot_id: str,
        *,
        state: Any = None,
        keep_processes: bool = False,
        durable: bool = True,
    ) -> "Future[Done]":
        """Keeps the workspace under an id that `Pool.open` takes.

        state: a JSON value to go with it, such as the conversation. keep_processes: they
        are frozen while the files are copied; otherwise they are killed and nothing is
        copied, and the shell goes on in a new process. durable: outlives the worker.
        """
        request = TakeSnapshot(
            session_id=self.session_id,
            snapshot_id=snapshot_id,
            state=state,
            keep_processes=keep_processes,
            durable=durable,
        )
        return self._ask(request, Done)

    def fork(self, *, keep_processes: bool = False) -> "Future[Session]":
        """Another session that begins where this one is, within its reservation."""
        self._requests += 1
        new_id = f"{self.session_id}+{self._requests}"
        request = Fork(
            session_id=self.session_id,
            new_session_id=new_id,
            keep_processes=keep_processes,
        )

        async def forked() -> Session:
            await self._request(request, Done)
            return self._on_fork(self, new_id)

        return self._call(forked())

    def grade(self, artifacts: Sequence[str], grading: Grading) -> "Future[Result]":
        """Kills what runs in the session, then has these files of it graded elsewhere."""
        request = Grade(
            session_id=self.session_id, artifacts=tuple(artifacts), grading=grading
        )

        async def graded() -> Result:
            seconds = grading.limits.wall_seconds
            result = await self._request(request, Result, seconds=seconds)
            self._metrics.count_result(self.domain, result)
            return result

        return self._call(graded())

    def close(self) -> "Future[None]":
        """Ends the session; done twice, or for one that is lost, it does nothing."""
        return self._call(self.end())

    def _ask(self, request: Request, kind: type, *, seconds: float = 60.0) -> Future:
        return self._call(self._request(request, kind, seconds=seconds))

    # From here on in the pool's thread.

    async def _request(self, request: Request, kind: type, *, seconds: float = 60.0) -> Any:
        async with self._turn:
            if self._lost is not None:
                raise self._lost
            self.used_at = time.monotonic()
            self._requests += 1
            request_id = f"{self.session_id}/{self._requests}"
            try:
                async with asyncio.timeout(seconds + _SLACK_SECONDS):
                    reply = await self._link.request(request_id, request)
            except WorkerLost as lost:
                raise self.lose(lost.reason, lost.detail) from lost
            except TimeoutError:
                detail = f"no answer in {seconds + _SLACK_SECONDS:.0f} s"
                self._link.kill("worker_unresponsive", detail)
                raise self.lose("worker_unresponsive", detail) from None
            finally:
                self.used_at = time.monotonic()
            return self._checked(reply, kind)

    def _checked(self, reply: Reply, kind: type) -> Any:
        if isinstance(reply, Failed):
            raise SessionFailed(reply.reason, reply.detail)
        if not isinstance(reply, kind):
            raise SessionFailed("bad_reply", f"{type(reply).__name__}, not {kind}")
        return reply

    def lose(self, reason: str, detail: str = "") -> SessionFailed:
        """From now on every request fails like this."""
        if self._lost is None:
            self._lost = SessionFailed(reason, detail, is_lost=True)
            self._on_close(self)
        return self._lost

    async def end(self, reason: str = "session_closed") -> None:
        if self._lost is not None:
            return
        self._lost = SessionFailed(reason, is_lost=True)
        try:
            async with asyncio.timeout(_SLACK_SECONDS):
                await self._link.request(
                    f"{self.session_id}/close", Close(session_id=self.session_id)
                )
        except (WorkerLost, TimeoutError):
            pass  # it ends with its worker
        finally:
            self._on_close(self)
