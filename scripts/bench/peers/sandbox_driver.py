"""Serves a peer's sandboxes to a benchmark: JSON lines in, JSON lines out.

Runs in the peer's own environment, with the standard library alone. A peer is an object
with the methods of `Peer`; what is measured is measured here, so that the pipe to the
benchmark does not count. Requests are served at the same time, as far as the peer can.
"""

import asyncio
import base64
import json
import os
import statistics
import sys
import time
from typing import Any, Protocol

PROGRAM = "open('out', 'w').write('5')"


class Unavailable(RuntimeError):
    """The peer can't run on this machine; the message is its own reason."""


class Peer(Protocol):
    """What a driver knows of a peer; a session is whatever `open` returns."""

    async def start(self) -> None:
        """Raises Unavailable."""
        ...

    async def open(self) -> Any: ...

    async def exec(self, session: Any, script: str, seconds: float) -> dict[str, Any]:
        """Runs a bash script: {"output": str, "code": int | None, "timed_out": bool}."""
        ...

    async def write(self, session: Any, path: str, data: bytes) -> None: ...

    async def read(self, session: Any, path: str) -> bytes:
        """A file by its path in the session's folder; raises if the peer refuses."""
        ...

    async def close(self, session: Any) -> None: ...


async def episode(peer: Peer) -> None:
    """A fresh sandbox, a Python program, its artifact, and the check of that."""
    session = await peer.open()
    try:
        await peer.write(session, "main.py", PROGRAM.encode())
        ran = await peer.exec(session, "python3 -I -S main.py", 30.0)
        if await peer.read(session, "out") != b"5":
            raise RuntimeError(f"The episode left no artifact: {ran}")
    finally:
        await peer.close(session)


class Driver:
    """Does the requests of one benchmark by one peer."""

    def __init__(self, peer: Peer):
        self._peer = peer
        self._sessions: dict[int, Any] = {}
        self._opened = 0

    async def do(self, request: dict[str, Any]) -> dict[str, Any]:
        return await getattr(self, f"do_{request.pop('do')}")(**request)

    async def do_open(self) -> dict[str, Any]:
        start = time.perf_counter()
        session = await self._peer.open()
        self._opened += 1
        self._sessions[self._opened] = session
        return {"session": self._opened, "elapsed": time.perf_counter() - start}

    async def do_exec(self, session: int, script: str, seconds: float) -> dict[str, Any]:
        start = time.perf_counter()
        ran = await self._peer.exec(self._sessions[session], script, seconds)
        output = ran["output"]
        kept = output if len(output) < 200_000 else output[:1000] + output[-1000:]
        elapsed = time.perf_counter() - start
        return ran | {"output": kept, "kept_bytes": len(output), "elapsed": elapsed}

    async def do_write(self, session: int, path: str, data: str) -> dict[str, Any]:
        await self._peer.write(self._sessions[session], path, base64.b64decode(data))
        return {}

    async def do_read(self, session: int, path: str) -> dict[str, Any]:
        """At most the first megabyte crosses, with the size of all."""
        data = await self._peer.read(self._sessions[session], path)
        head = base64.b64encode(data[: 1 << 20]).decode()
        return {"data": head, "total_bytes": len(data)}

    async def do_close(self, session: int) -> dict[str, Any]:
        await self._peer.close(self._sessions.pop(session))
        return {}

    async def do_acquire(self, count: int) -> dict[str, Any]:
        """The median of opening a session, in milliseconds."""
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            session = await self._peer.open()
            seconds.append(time.perf_counter() - start)
            await self._peer.close(session)
        return {"acquire_p50_ms": 1e3 * statistics.median(seconds)}

    async def do_execs(self, count: int, script: str) -> dict[str, Any]:
        """The median of running a script in one session, in milliseconds."""
        session = await self._peer.open()
        seconds = []
        try:
            for _ in range(count + 1):
                start = time.perf_counter()
                await self._peer.exec(session, script, 30.0)
                seconds.append(time.perf_counter() - start)
        finally:
            await self._peer.close(session)
        return {"exec_p50_ms": 1e3 * statistics.median(seconds[1:])}

    async def do_episodes(self, count: int, together: int) -> dict[str, Any]:
        """Whole episodes a second, `together` at a time."""
        left = iter(range(count))

        async def some() -> None:
            for _ in left:
                await episode(self._peer)

        start = time.perf_counter()
        await asyncio.gather(*(some() for _ in range(together)))
        return {"oneshot_per_s": count / (time.perf_counter() - start)}


async def _serve(peer: Peer, output: Any) -> None:
    driver = Driver(peer)
    try:
        await peer.start()
    except Unavailable as error:
        print(json.dumps({"unavailable": str(error)}), file=output, flush=True)
        return
    print(json.dumps({"ready": True}), file=output, flush=True)

    async def answer(line: bytes) -> None:
        request = json.loads(line)
        number = request.pop("number")
        try:
            reply = await driver.do(request)
        except Exception as error:
            reply = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps({"number": number, **reply}), file=output, flush=True)

    reader = asyncio.StreamReader(limit=64 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks: set[asyncio.Task] = set()
    while line := await reader.readline():
        task = asyncio.create_task(answer(line))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def main(peer: Peer) -> None:
    """Until stdin ends. What a peer prints goes to stderr, away from the replies."""
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        asyncio.run(_serve(peer, output))
