"""A running container as the worker sees it: requests to its first process; its end."""

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import signal
from typing import Any

from sandbox.backends.backend import SandboxDied, SandboxFailed
from sandbox.backends.docker.attached import Attached
from sandbox.backends.docker.engine import Engine, Started
from sandbox.backends.docker.group import ContainerGroup
from sandbox.protocol import Output

PATIENCE = 30.0  # seconds for what takes milliseconds, on a machine that is overloaded
_ENDING_SECONDS = 10.0  # for the first process to kill all others
_DYING_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What the first process says of a command that has ended."""

    exit_code: int
    stdout: Output
    stderr: Output
    shell_kept: bool
    cpu_seconds: float
    memory_bytes: int

    @staticmethod
    def of(message: dict[str, Any]) -> "Reply":
        """Raises ValueError, TypeError or KeyError for what is none."""
        return Reply(
            exit_code=int(message["exit_code"]),
            stdout=_output(message["stdout"]),
            stderr=_output(message["stderr"]),
            shell_kept=bool(message.get("shell_kept", True)),
            cpu_seconds=float(message.get("cpu_seconds", 0)),
            memory_bytes=int(message.get("memory_bytes", 0)),
        )


def _output(told: dict[str, Any]) -> Output:
    return Output(
        head=base64.b64decode(told["head"]),
        tail=base64.b64decode(told["tail"]),
        total_bytes=int(told["total_bytes"]),
    )


class Container:
    """A container whose first process is `inside.main`.

    counts_processes: whether the machine sees its programs as processes.
    """

    def __init__(self, engine: Engine, started: Started, *, counts_processes: bool):
        self._counts_processes = counts_processes
        self._engine = engine
        self._pidfd = started.pidfd
        self.identity = started.identity
        self.stream = Attached(started.stream)
        self.group = ContainerGroup(started.pid)
        self._killed_before = 0
        self._waiting: dict[int, asyncio.Future] = {}
        self._ended: asyncio.Future | None = None
        self._number = 0
        self._death: SandboxDied | None = None
        self._listening: asyncio.Task | None = None
        self.killed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.killed.add_done_callback(_look_at)

    async def begun(self) -> None:
        """Waits for its first process. Raises SandboxFailed if it is not isolated."""
        try:
            async with asyncio.timeout(PATIENCE):
                lacks = json.loads(await self.stream.line())["ready"]
        except (TimeoutError, EOFError) as error:
            raise SandboxFailed(f"A container did not come up: {error!r}") from error
        if lacks:
            raise SandboxFailed(
                f"A container lacks {', '.join(lacks)}: Docker did not do as it was asked. "
                "Of gVisor this is asked for as sandbox/images/start_docker writes it: in "
                "daemon.json, runtimeArgs --network=none and --oci-seccomp."
            )

    def listen(self) -> None:
        """From now on replies are given to whom they are for."""
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        try:
            while True:
                self._take(json.loads(await self.stream.line()))
        except EOFError:
            self._death = await self._cause()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            # In gVisor of 2022 every process can write to the streams of the first.
            why = f"A container's first process made no sense: {error!r:.200}"
            self._death = SandboxDied("sandbox_died", why)
        for waiter in (*self._waiting.values(), self._ended):
            if waiter is not None and not waiter.done():
                waiter.set_exception(self._death)
        self._waiting.clear()

    def _take(self, message: dict[str, Any]) -> None:
        if "done" in message:
            waiter = self._waiting.pop(message["done"], None)
            result = Reply.of(message)
        else:
            waiter, self._ended = self._ended, None
            result = message["ended"]
        if waiter is not None and not waiter.done():
            waiter.set_result(result)

    async def _cause(self) -> SandboxDied:
        killed, words = self.out_of_memory(), self.stream.last_words()
        with contextlib.suppress(SandboxFailed):
            seen, code = await asyncio.to_thread(self._engine.end_of, self.identity)
            killed = killed or seen
            words = f"A container's first process is gone, with exit code {code}. {words}"
        if killed:
            return SandboxDied("out_of_memory")
        return SandboxDied("sandbox_died", words.strip())

    def watch_memory(self) -> None:
        """From now on `out_of_memory` is about what comes."""
        with contextlib.suppress(OSError):
            self._killed_before = self.group.killed_for_memory()

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed in this container for want of memory."""
        try:
            return self.group.killed_for_memory() > self._killed_before
        except OSError:  # the group is gone with its processes
            return False

    def processes(self) -> int:
        """That are alive in it, beside the first; 0 where the machine can't tell."""
        return max(self.group.processes() - 1, 0) if self._counts_processes else 0

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death

    async def send(self, request: dict[str, Any]) -> None:
        """Raises SandboxDied."""
        self._check_alive()
        try:
            await self.stream.send(json.dumps(request).encode() + b"\n")
        except EOFError:
            assert self._listening is not None
            await asyncio.wait([self._listening], timeout=PATIENCE)
            self._check_alive()
            raise SandboxDied("sandbox_died", "The container's stream is closed.") from None

    async def ask(self, kind: str, **rest: Any) -> "asyncio.Future[Reply]":
        """Sends a `run` or `exec`; the future is its reply, or raises SandboxDied."""
        self._number += 1
        number = self._number
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        waiter.add_done_callback(_look_at)
        self._waiting[number] = waiter
        try:
            await self.send({kind: number, **rest})
        except BaseException:
            self._waiting.pop(number, None)
            raise
        return waiter

    async def end(self, which: str) -> None:
        """Kills `all` processes, or `others` than the shell; they are dead on return.

        Raises:
          TimeoutError: the first process did not come to it.
        """
        self._ended = waiter = asyncio.get_running_loop().create_future()
        waiter.add_done_callback(_look_at)
        async with asyncio.timeout(_ENDING_SECONDS):
            await self.send({"end": which})
            await waiter

    async def kill(self) -> None:
        """Every process of the container is dead on return; what is left is the husk.

        `killed` tells others, of its failure as well.

        Raises:
          SandboxFailed: the kernel could not end one within seconds.
        """
        if self.killed.done():
            return
        try:
            await self._die()
        except SandboxFailed as error:
            self.killed.set_exception(error)
            raise
        self.killed.set_result(None)

    async def _die(self) -> None:
        # The first of a process namespace: it is not buried before all others are. And the
        # kernel's word is better than the engine's.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        loop = asyncio.get_running_loop()
        died = loop.create_future()
        loop.add_reader(self._pidfd, lambda: died.done() or died.set_result(None))
        try:
            async with asyncio.timeout(_DYING_SECONDS):
                await died
        except TimeoutError as error:
            raise SandboxFailed(
                f"A container outlived its SIGKILL by {_DYING_SECONDS:.0f} s."
            ) from error
        finally:
            loop.remove_reader(self._pidfd)
            if self._listening is not None:
                # It waits for the stream's descriptor, whose number may be another's soon.
                self._listening.cancel()
                await asyncio.wait([self._listening])
            os.close(self._pidfd)
            self.stream.close()


def _look_at(waiter: asyncio.Future) -> None:
    """So that nobody is told of an end that nobody waited for."""
    if not waiter.cancelled():
        waiter.exception()
