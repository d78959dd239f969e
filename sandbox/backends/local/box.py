"""The worker's side of zygote, slots and inits: starting them, and programs in them."""

import asyncio
import contextlib
import dataclasses
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sandbox import buffers, cgroups
from sandbox.backends.backend import SandboxDied, SandboxFailed
from sandbox.backends.local import messages
from sandbox.limits import Capture
from sandbox.protocol import Limits

_PATIENCE = 20.0  # seconds for what takes milliseconds, on a machine that is overloaded
_DYING_SECONDS = 5.0


class Connection:
    """Messages of one other process, each given to whoever waits for its kind."""

    def __init__(self, end: socket.socket, on_message: Callable[[dict, list[int]], None]):
        self._end = end
        self._on_message = on_message
        self.ended = asyncio.get_running_loop().create_future()
        end.setblocking(False)
        asyncio.get_running_loop().add_reader(end.fileno(), self._read)

    def send(self, message: dict, descriptors: Sequence[int] = ()) -> None:
        """Raises EOFError if the other end is gone."""
        try:
            messages.send(self._end, message, descriptors)
        except OSError as error:
            raise EOFError(str(error)) from error

    def _read(self) -> None:
        try:
            message, descriptors = messages.receive(self._end)
        except (BlockingIOError, InterruptedError):
            return
        except EOFError:
            self.close()
            return
        self._on_message(message, descriptors)

    def close(self) -> None:
        if self._end.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._end.fileno())
            self._end.close()
        if not self.ended.done():
            self.ended.set_result(None)


class Replies:
    """What is waited for, by name: one waiter for each."""

    def __init__(self):
        self._waiting: dict[str, asyncio.Future] = {}
        self._came: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        waiter = self._waiting.pop(name, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(value)
        else:
            self._came[name] = value

    async def get(self, name: str) -> Any:
        if name in self._came:
            return self._came.pop(name)
        waiter = self._waiting[name] = asyncio.get_running_loop().create_future()
        return await waiter


class Zygote:
    """The process that slots are forked from, and with it all sandboxes live and die."""

    def __init__(self, config: dict[str, Any], python: str, environment: dict[str, str]):
        ours, theirs = messages.pair()
        package_folder = str(Path(__file__).resolve().parents[3])
        main = "from sandbox.backends.local.zygote import main; main()"
        with theirs:
            self._process = subprocess.Popen(
                [python, "-S", "-c", main, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={"PYTHONPATH": package_folder, **environment},
                cwd="/",
            )
        messages.send(ours, config)
        ours.settimeout(_PATIENCE * 3)
        try:
            reply, _ = messages.receive(ours)
        except (EOFError, TimeoutError):
            reply = {"failed": self._last_words()}
        ours.settimeout(None)
        if "failed" in reply:
            self._process.kill()
            self._process.wait()
            raise SandboxFailed(f"The zygote did not start: {reply['failed'].strip()}")
        self._end = ours
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, _die, "The zygote is gone.")

    def _last_words(self) -> str:
        self._process.kill()
        assert self._process.stderr
        return self._process.stderr.read().decode(errors="replace")

    def fork_slot(self, doors: Sequence[int]) -> socket.socket:
        """A new slot in the control groups behind these doors; messages to it."""
        ours, theirs = messages.pair()
        with theirs:
            try:
                messages.send(self._end, {"slot": True}, [theirs.fileno(), *doors])
            except OSError as error:
                raise SandboxFailed(f"The zygote is gone: {error}") from error
        return ours

    def close(self) -> None:
        """Kills it, and all that came of it."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._end.close()
        self._process.kill()
        self._process.wait()
        self._process.stderr.close()


def _die(why: str) -> None:
    """Ends this worker, for its pool to start another."""
    print(why, file=sys.stderr, flush=True)
    os._exit(1)


class Slot:
    """A place for one sandbox at a time; it keeps the next one warm.

    group: what bounds that sandbox.
    """

    def __init__(self, zygote: Zygote, name: str):
        self.group = cgroups.Group(name)
        doors = self.group.doors()
        try:
            end = zygote.fork_slot(doors)
        except BaseException:
            self.group.remove()
            raise
        finally:
            for door in doors:
                os.close(door)
        self._replies = Replies()
        self._connection = Connection(end, self._on_message)
        self._next: asyncio.Task[Box] | None = None
        self.is_retired = False

    def _on_message(self, message: dict, descriptors: list[int]) -> None:
        self._replies.put("started", (message, descriptors))

    def warm_up(self) -> None:
        """Begins to make the next sandbox, if none is being made."""
        if self._next is None:
            self._next = asyncio.create_task(self._make())

    async def take(self) -> "Box":
        """A sandbox that waits to begin. Raises SandboxFailed."""
        self.warm_up()
        assert self._next is not None
        making, self._next = self._next, None
        return await making

    async def _make(self) -> "Box":
        ours, theirs = messages.pair()
        try:
            async with asyncio.timeout(_PATIENCE):
                with theirs:
                    self._connection.send({"start": True}, [theirs.fileno()])
                reply, descriptors = await self._replies.get("started")
            if "failed" in reply:
                raise SandboxFailed(reply["failed"])
            box = Box(ours, descriptors[0], self)
            await box.ready()
            return box
        except (TimeoutError, EOFError) as error:
            ours.close()
            raise SandboxFailed(f"No sandbox came up: {error!r}") from error

    def retire(self) -> None:
        """Lets its process go, once it has made a sandbox that is here to stay."""
        self.is_retired = True
        self._connection.close()

    def close(self) -> None:
        """Ends it, with the sandbox that is being made; a running one is killed before."""
        if self._next is not None:
            self._next.cancel()
        self._connection.close()
        self._bury()

    def _bury(self) -> None:
        if not self.group.remove():  # it ends only now that its connection has
            asyncio.get_running_loop().call_later(0.05, self._bury)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exit:
    """How a program ended, and what it and its children used."""

    exit_code: int
    cpu_seconds: float
    memory_bytes: int


class Box:
    """One sandbox: its init, by a connection and a descriptor of the process."""

    def __init__(self, control: socket.socket, pidfd: int, slot: Slot):
        self.slot = slot
        self._pidfd = pidfd
        self._replies = Replies()
        self._exits: dict[int, asyncio.Future[Exit]] = {}
        self._started = 0
        self._connection = Connection(control, self._on_message)
        self._connection.ended.add_done_callback(self._on_end)
        self._oom_before = 0
        self.is_dead = False

    async def ready(self) -> None:
        await self._expect("ready")

    async def begin(self, tree: int, *, role: str, processes: int) -> None:
        """Confines it, around this workspace. Raises SandboxFailed."""
        self._oom_before = self.slot.group.killed_for_memory()
        request = {"begin": True, "role": role, "processes": processes}
        try:
            self._connection.send(request, [tree])
        except EOFError as error:
            raise self._death() from error
        await self._expect("begun")

    async def _expect(self, name: str) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                reply = await self._replies.get(name)
        except TimeoutError as error:
            raise SandboxFailed(f"init did not answer in {_PATIENCE:.0f} s") from error
        if isinstance(reply, Exception):
            raise reply
        if "failed" in reply:
            raise SandboxFailed(reply["failed"])

    def _on_message(self, message: dict, descriptors: list[int]) -> None:
        if "exited" in message:
            waiter = self._exits.pop(message["exited"], None)
            if waiter is not None and not waiter.done():
                waiter.set_result(
                    Exit(
                        exit_code=message["exit_code"],
                        cpu_seconds=message.get("cpu_seconds", 0.0),
                        memory_bytes=message.get("memory_bytes", 0),
                    )
                )
            return
        for name in ("ready", "begun", "ended"):
            if name in message:
                self._replies.put(name, message)
                return
        for name in ("ready", "begun", "ended"):
            self._replies.put(name, message)

    def _on_end(self, _) -> None:
        self.is_dead = True
        for name in ("ready", "begun", "ended"):
            self._replies.put(name, self._death())
        for waiter in self._exits.values():
            if not waiter.done():
                waiter.set_exception(self._death())
        self._exits.clear()

    def _death(self) -> SandboxDied:
        if self.out_of_memory():
            return SandboxDied("out_of_memory")
        return SandboxDied("sandbox_died", "The sandbox's first process is gone.")

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed in this sandbox for want of memory."""
        try:
            return self.slot.group.killed_for_memory() > self._oom_before
        except OSError:  # the group is gone with its slot
            return False

    def begin_command(self) -> None:
        """From here on `out_of_memory` is about the command that begins."""
        self._oom_before = self.slot.group.killed_for_memory()

    def start(
        self,
        command: Sequence[str],
        limits: Limits,
        descriptors: Sequence[int],
        *,
        bound_cpu: bool = True,
    ) -> tuple[int, asyncio.Future[Exit]]:
        """Starts a program with these as its descriptors 0, 1, 2, ...

        bound_cpu: whether `limits.cpu_seconds` bind each of its processes.
        The future raises SandboxDied if the sandbox ends first.
        """
        self._started += 1
        number = self._started
        waiter: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        if self.is_dead:
            raise self._death()
        self._exits[number] = waiter
        request = {"run": number, "argv": list(command), "limits": rlimits(limits)}
        if not bound_cpu:
            del request["limits"]["RLIMIT_CPU"]
        try:
            self._connection.send(request, descriptors)
        except EOFError as error:
            del self._exits[number]
            raise self._death() from error
        return number, waiter

    async def end_all_but(self, number: int | None) -> None:
        """Kills every process but the program of this number; they are dead on return."""
        try:
            self._connection.send({"end_but": number})
        except EOFError as error:
            raise self._death() from error
        await self._expect("ended")

    async def signal(self, number: int) -> None:
        """Sends a signal to every process of the sandbox."""
        try:
            self._connection.send({"signal": int(number)})
        except EOFError as error:
            raise self._death() from error
        await self._expect("ended")

    async def kill(self) -> None:
        """Ends the sandbox; every process of it is dead on return.

        Raises:
          SandboxFailed: the kernel could not end one within seconds.
        """
        if self._pidfd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        loop = asyncio.get_running_loop()
        if not select.select([self._pidfd], [], [], 0)[0]:
            died = loop.create_future()
            loop.add_reader(self._pidfd, lambda: died.done() or died.set_result(None))
            try:
                async with asyncio.timeout(_DYING_SECONDS):
                    await died
            except TimeoutError as error:
                raise SandboxFailed(
                    f"A sandbox outlived its SIGKILL by {_DYING_SECONDS:.0f} s."
                ) from error
            finally:
                loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._connection.close()


def rlimits(limits: Limits) -> dict[str, tuple[int, int]]:
    return {
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_NOFILE": (256, 256),
        "RLIMIT_AS": (limits.memory_bytes, limits.memory_bytes),
        "RLIMIT_FSIZE": (limits.file_bytes, limits.file_bytes),
        "RLIMIT_CPU": (limits.cpu_seconds, limits.cpu_seconds + 1),
    }


class Reader:
    """Keeps what a pipe carries, as it comes; the descriptor is its own."""

    def __init__(self, descriptor: int, keep: int):
        self.capture = Capture(keep)
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self.drain)

    def drain(self) -> None:
        """Takes what is in the pipe now."""
        with contextlib.suppress(BlockingIOError):
            while self._descriptor >= 0:
                data = buffers.read(self._descriptor)
                if not data:
                    self.close()
                    return
                self.capture.add(data)
                if len(data) < buffers.MAX_BYTES:
                    return  # others are waiting

    def close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


class Feeder:
    """Writes to a pipe as it takes, then closes it; the descriptor is its own."""

    def __init__(self, descriptor: int, data: bytes):
        self._descriptor = descriptor
        self._rest = memoryview(data)
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self._write()
        if self._descriptor >= 0:
            self._loop.add_writer(descriptor, self._write)

    def _write(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._descriptor, self._rest) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_writer(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def pipe() -> tuple[int, int]:
    """(to read, to write)"""
    return os.pipe2(os.O_CLOEXEC)


def set_own_limits() -> None:
    """This process will hold descriptors for many sandboxes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def base_python() -> str:
    return os.path.realpath(sys.executable)
