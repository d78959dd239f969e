"""A worker process: requests as JSON lines on stdin, replies as JSON lines on stdout.

    python -m sandbox.worker '{"number": 0, "backend": "local", "options": {}, ...}'

It serves many requests at a time, each session's one after the other. It ends when stdin
does, or with its parent, and its sandboxes too.
"""

import asyncio
import collections
import dataclasses
import errno
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from sandbox import linux
from sandbox.backends.backend import (
    Backend,
    Sandbox,
    SandboxDied,
    SandboxFailed,
    SandboxUnavailable,
)
from sandbox.backends.local.backend import LocalBackend
from sandbox.grading import GraderFailed, Graders
from sandbox.lines import Lines, LineTooLong
from sandbox.protocol import Execution, Grading, Job, Output, Ran, Result
from sandbox.sessions import (
    Beat,
    Cancel,
    Close,
    Done,
    Exec,
    Failed,
    Files,
    Forget,
    Fork,
    Grade,
    Open,
    ProtocolError,
    ReadFiles,
    Reply,
    Request,
    Run,
    TakeSnapshot,
    WriteFiles,
    envelope,
    opened,
)
from sandbox.snapshots import FolderStore, SnapshotStore


def _docker(number: int, **options: Any) -> Backend:
    try:
        from sandbox.backends.docker.backend import DockerBackend
    except ImportError as error:
        raise SandboxUnavailable(
            f"The docker backend needs its library: pip install docker ({error})."
        ) from error
    return DockerBackend(number, **options)


# What a worker can be told to use, and how it is made of its number and options.
BACKENDS: dict[str, Callable[..., Backend]] = {"docker": _docker, "local": LocalBackend}
_BEAT_SECONDS = 1.0
_GRADINGS = 3  # of a session, if the grader fails; jobs are tried again by the pool
_REPLIES_KEPT = 1024
_SNAPSHOTS_KEPT = 256
_MAX_REQUEST_BYTES = 256 << 20


@dataclasses.dataclass
class _Session:
    sandbox: Sandbox
    request: Open
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)


class Worker:
    """Does requests by a backend; `store` is for snapshots that must outlive it."""

    def __init__(self, backend: Backend, store: SnapshotStore):
        self._backend = backend
        self._store = store
        self._graders = Graders(backend)
        self._sessions: dict[str, _Session] = {}
        self._snapshots: collections.OrderedDict[str, tuple[Any, Any]] = (
            collections.OrderedDict()
        )
        self._tasks: collections.OrderedDict[str, asyncio.Task[Reply]] = (
            collections.OrderedDict()
        )

    async def handle(self, request_id: str, request: Request) -> Reply:
        """What comes of the request, which is done once however often it comes.

        Never raises: what went wrong is in the reply.
        """
        if isinstance(request, Cancel):
            if task := self._tasks.get(request.request_id):
                task.cancel()
            return Done()
        task = self._tasks.get(request_id)
        if task is None:
            task = self._tasks[request_id] = asyncio.create_task(self._do(request))
            while len(self._tasks) > _REPLIES_KEPT:
                oldest = next(iter(self._tasks))
                if not self._tasks[oldest].done():
                    break
                del self._tasks[oldest]
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return Failed(reason="cancelled")

    def beat(self) -> Beat:
        running = sum(not task.done() for task in self._tasks.values())
        return Beat(sessions=len(self._sessions), running=running)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for session in self._sessions.values():
            await session.sandbox.close()
        self._sessions.clear()
        self._snapshots.clear()
        await self._graders.close()

    async def _do(self, request: Request) -> Reply:
        try:
            match request:
                case Cancel():
                    raise ProtocolError("Cancel is no work.")
                case Run():
                    return await self._run(request.job)
                case Open():
                    return await self._open(request)
                case Close():
                    return await self._close(request)
                case Forget():
                    self._snapshots.pop(request.snapshot_id, None)
                    await self._store.delete(request.snapshot_id)
                    return Done()
            session = self._sessions.get(request.session_id)
            if session is None:
                return Failed(
                    reason="session_unknown",
                    detail=f"This worker has no session {request.session_id!r}.",
                )
            async with session.lock:
                return await self._in_session(session, request)
        except SandboxDied as error:
            return Failed(reason=error.reason, detail=str(error))
        except SandboxFailed as error:
            return Failed(reason="sandbox_failed", detail=str(error))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            return Failed(reason="no_space" if full else "bad_request", detail=str(error))

    async def _in_session(self, session: _Session, request: Request) -> Reply:
        sandbox = session.sandbox
        match request:
            case Exec():
                limits = dataclasses.replace(
                    session.request.limits,
                    wall_seconds=request.wall_seconds,
                    output_bytes=request.output_bytes,
                )
                return await sandbox.exec(request.script, limits=limits)
            case WriteFiles():
                await sandbox.write_files(request.files)
                return Done()
            case ReadFiles():
                found = await sandbox.read_files(request.paths, max_bytes=request.max_bytes)
                return Files(
                    contents={k: v for k, v in found.items() if isinstance(v, bytes)},
                    unread={k: v for k, v in found.items() if isinstance(v, str)},
                )
            case TakeSnapshot():
                snapshot = await sandbox.snapshot(keep_processes=request.keep_processes)
                if request.durable:
                    archive = await self._backend.pack(snapshot)
                    await self._store.put(request.snapshot_id, archive, request.state)
                self._keep(request.snapshot_id, snapshot, request.state)
                return Done()
            case Fork():
                if request.new_session_id in self._sessions:
                    return Failed(reason="bad_request", detail="That session exists.")
                if session.request.limits.gpus:
                    return Failed(
                        reason="bad_request",
                        detail="A fork lives in its session's reservation, whose GPUs are "
                        "taken: take a snapshot, and open another session from that.",
                    )
                snapshot = await sandbox.snapshot(keep_processes=request.keep_processes)
                await self._begin(request.new_session_id, session.request, snapshot)
                return Done()
            case Grade():
                return await self._grade_session(session, request)
        raise ProtocolError(f"No session does {type(request).__name__}.")

    def _keep(self, snapshot_id: str, snapshot: Any, state: Any) -> None:
        self._snapshots[snapshot_id] = (snapshot, state)
        self._snapshots.move_to_end(snapshot_id)
        while len(self._snapshots) > _SNAPSHOTS_KEPT:
            self._snapshots.popitem(last=False)

    async def _begin(self, session_id: str, request: Open, snapshot: Any) -> None:
        sandbox = await self._backend.open(
            request.limits, snapshot=snapshot, image=request.image
        )
        self._sessions[session_id] = _Session(
            sandbox, dataclasses.replace(request, session_id=session_id)
        )

    async def _open(self, request: Open) -> Reply:
        if request.session_id in self._sessions:
            return Failed(reason="bad_request", detail="That session exists.")
        snapshot = state = None
        if request.snapshot_id:
            if request.snapshot_id not in self._snapshots:
                try:
                    archive, state = await self._store.get(request.snapshot_id)
                except KeyError:
                    return Failed(
                        reason="snapshot_unknown",
                        detail=f"No snapshot {request.snapshot_id!r} is kept here or in "
                        "the store; was it taken with durable=True?",
                    )
                unpacked = await self._backend.unpack(archive, request.limits)
                self._keep(request.snapshot_id, unpacked, state)
            snapshot, state = self._snapshots[request.snapshot_id]
        await self._begin(request.session_id, request, snapshot)
        return Done(state=state)

    async def _close(self, request: Close) -> Reply:
        session = self._sessions.pop(request.session_id, None)
        if session is not None:
            async with session.lock:
                await session.sandbox.close()
        return Done()

    async def _run(self, job: Job) -> Result:
        seconds: dict[str, float] = {}
        known: dict[str, Any] = {"job_id": job.job_id, "seconds": seconds}
        artifacts = dict(job.artifacts)
        if job.execution is not None:
            try:
                ran, left = await self._execute(job.execution, seconds)
            except (SandboxFailed, OSError) as error:
                died = isinstance(error, SandboxDied)
                reason = error.reason if died else "sandbox_failed"
                return Result(
                    outcome="infra_fail", reason=reason, stderr=_detail(error), **known
                )
            known |= {
                "exit_code": ran.exit_code,
                "stdout": ran.stdout,
                "stderr": ran.stderr,
                "usage": ran.usage,
            }
            reason = ran.reason or next(
                (why for why in left.values() if isinstance(why, str)), None
            )
            if reason is not None:
                return Result(outcome="policy_fail", reason=reason, **known)
            artifacts |= {k: v for k, v in left.items() if isinstance(v, bytes)}
        return await self._graded(job.grading, artifacts, known)

    async def _execute(
        self, execution: Execution, seconds: dict[str, float]
    ) -> tuple[Ran, Mapping[str, bytes | str]]:
        """How the command ended, and once nothing of it is alive, its artifacts."""
        start = time.monotonic()
        limits = execution.limits
        sandbox = await self._backend.open(limits)
        try:
            await sandbox.write_files(execution.files)
            seconds["acquire"] = time.monotonic() - start
            start = time.monotonic()
            ran = await sandbox.run(execution.command, limits=limits, stdin=execution.stdin)
            await sandbox.stop()
            left = {}
            if ran.reason is None:
                left = await sandbox.read_files(
                    execution.artifacts, max_bytes=limits.file_bytes
                )
            seconds["execute"] = time.monotonic() - start
        finally:
            await asyncio.shield(sandbox.close())
        return ran, left

    async def _grade_session(self, session: _Session, request: Grade) -> Result:
        known: dict[str, Any] = {"job_id": session.request.session_id, "seconds": {}}
        await session.sandbox.stop()
        found = await session.sandbox.read_files(
            request.artifacts, max_bytes=session.request.limits.file_bytes
        )
        for why in found.values():
            if isinstance(why, str):
                return Result(outcome="policy_fail", reason=why, **known)
        result = await self._graded(request.grading, found, known)
        for _ in range(_GRADINGS - 1):  # the files are at hand, so nothing is done twice
            if result.outcome not in ("infra_fail", "grader_fail"):
                break
            known.pop("stderr", None)
            result = await self._graded(request.grading, found, known)
        return result

    async def _graded(
        self, grading: Grading, artifacts: Mapping[str, Any], known: dict[str, Any]
    ) -> Result:
        start = time.monotonic()
        try:
            verdict = await self._graders.grade(grading, artifacts)
        except GraderFailed as error:
            known["seconds"]["grade"] = time.monotonic() - start
            known["stderr"] = _detail(error)
            return Result(outcome="grader_fail", reason=error.reason, **known)
        except (SandboxFailed, OSError) as error:
            known["stderr"] = _detail(error)
            return Result(outcome="infra_fail", reason="sandbox_failed", **known)
        known["seconds"]["grade"] = time.monotonic() - start
        return Result(outcome="ok", reason="graded", verdict=verdict, **known)


def _detail(error: Exception) -> Output:
    text = str(error).encode(errors="replace")
    return Output(tail=text, total_bytes=len(text))


async def serve(worker: Worker, lines: Lines) -> None:
    """Until the other end is gone."""
    tasks: set[asyncio.Task] = set()

    async def answer(line: bytes) -> None:
        try:
            request_id, request = opened(line, Request)
            reply = await worker.handle(request_id, request)
        except ProtocolError as error:
            request_id, reply = (
                error.message_id,
                Failed(reason="bad_request", detail=str(error)),
            )
        await lines.send(envelope(reply, request_id))

    async def beat() -> None:
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            await lines.send(envelope(worker.beat(), ""))

    beating = asyncio.create_task(beat())
    try:
        while True:
            task = asyncio.create_task(answer(await lines.receive()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    except (EOFError, LineTooLong):
        return
    finally:
        for task in (beating, *tasks):
            task.cancel()
        await asyncio.gather(beating, *tasks, return_exceptions=True)


async def _main(options: dict[str, Any]) -> None:
    try:
        make = BACKENDS[options["backend"]]
        backend = make(options["number"], **options["options"])
    except (SandboxUnavailable, OSError) as error:
        print(json.dumps({"unavailable": str(error)}), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    worker = Worker(backend, FolderStore(options["snapshots"]))
    lines = Lines(0, 1, max_bytes=_MAX_REQUEST_BYTES)
    try:
        await serve(worker, lines)
    finally:
        await worker.close()
        await backend.close()


def main() -> None:
    linux.die_with_parent()
    asyncio.run(_main(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
