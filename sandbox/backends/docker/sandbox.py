"""A workspace, and while something runs in it a container around it."""

import asyncio
import base64
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sandbox.backends.backend import SandboxDied
from sandbox.backends.docker import shared
from sandbox.backends.docker.container import Container, Reply
from sandbox.backends.docker.shared import Snapshot, State, Workspace
from sandbox.protocol import Limits, Output, Ran, Usage

if TYPE_CHECKING:
    from sandbox.backends.docker.backend import DockerBackend

_STUCK_SECONDS = 0.5  # for a shell to answer, once all that it had started is dead
_STATE_LIMITS = Limits(wall_seconds=5, output_bytes=128 << 10)


class DockerSandbox:
    """See `backend.Sandbox` for what the methods promise."""

    def __init__(
        self,
        backend: "DockerBackend",
        files: Workspace,
        limits: Limits,
        state: State,
        image: str,
        gpus: Sequence[str],
    ):
        self._backend = backend
        self._files = files
        self._limits = limits
        self._state = state
        self._image = image
        self._gpus = gpus
        self._container: Container | None = None
        self._burial: asyncio.Task[None] | None = None
        self._has_shell = False
        self._was_cancelled = False  # in the middle of a command, which may go on

    async def _running(self) -> Container:
        if self._was_cancelled:
            await self.stop()
        if self._container is None:
            self._container = await self._backend.begin(
                self._files,
                self._limits,
                "agent",
                image=self._image,
                arguments=("serve",),
                gpus=self._gpus,
            )
            self._container.listen()
        return self._container

    async def run(
        self, command: Sequence[str], *, limits: Limits, stdin: bytes = b""
    ) -> Ran:
        """Runs a command to its end, or to its time, when all processes are killed."""
        container = await self._running()
        with _Meter(container, self._files) as meter:
            timed_out = False
            try:
                with self._noting_cancellation():
                    waiter = await container.ask(
                        "run",
                        argv=list(command),
                        stdin=base64.b64encode(stdin).decode(),
                        limits=_rlimits(limits),
                        keep=limits.output_bytes,
                    )
                    reply = await _in_time(waiter, limits.wall_seconds)
                    if reply is None:
                        timed_out = True
                        await container.end("all")
                        reply = await _in_time(waiter, _STUCK_SECONDS)
            except SandboxDied as death:
                return await self._dead(death, meter)
            except TimeoutError:
                reply = None
            kept = not (timed_out and self._has_shell)
            ran = _ran(container, reply, timed_out, meter, shell_kept=kept)
        if timed_out:
            await self.stop()
        return ran

    async def _dead(self, death: SandboxDied, meter: "_Meter") -> Ran:
        """After a sandbox's death: nothing of it is left, and if it was ours, says so."""
        await self.stop()
        if death.reason != "out_of_memory":
            raise death
        usage = meter.usage(None)
        return Ran(reason=death.reason, exit_code=None, usage=usage, shell_kept=False)

    async def exec(self, script: str, *, limits: Limits) -> Ran:
        """Runs a script in the persistent shell."""
        container = await self._running()
        with _Meter(container, self._files) as meter:
            timed_out = False
            try:
                with self._noting_cancellation():
                    if not self._has_shell:
                        await self._start_shell(container, limits)
                    waiter = await container.ask(
                        "exec", script=script, keep=limits.output_bytes
                    )
                    reply = await _in_time(waiter, limits.wall_seconds)
                    if reply is None:
                        timed_out = True
                        reply = await self._interrupt(container, waiter)
            except SandboxDied as death:
                return await self._dead(death, meter)
            except TimeoutError:
                reply = None
            self._has_shell = reply is not None and reply.shell_kept
            ran = _ran(container, reply, timed_out, meter, shell_kept=self._has_shell)
        if reply is None:
            await self.stop()
        return ran

    async def _start_shell(self, container: Container, limits: Limits) -> None:
        command = ["bash", "--noprofile", "--norc", "-c", shared.SHELL_LOOP, "bash"]
        command += [self._state.folder, self._state.exported]
        rlimits = _rlimits(limits)
        # Bash would use up what is meant for one of its children, over the time.
        del rlimits["RLIMIT_CPU"]
        await container.send({"shell": command, "limits": rlimits})
        self._has_shell = True

    async def _interrupt(
        self, container: Container, waiter: "asyncio.Future[Reply]"
    ) -> Reply | None:
        """Kills all but the shell, if that is alive; what is said of the script.

        Raises TimeoutError if it can't be done from inside.
        """
        await container.end("others")
        reply = await _in_time(waiter, _STUCK_SECONDS)
        if reply is not None:
            await container.end("others")  # what it went on to start
            return reply
        await container.end("all")
        return await _in_time(waiter, _STUCK_SECONDS)

    @contextlib.contextmanager
    def _noting_cancellation(self):
        try:
            yield
        except asyncio.CancelledError:
            self._was_cancelled = True
            raise

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        self._files.write(files)

    async def read_files(
        self, paths: Sequence[str], *, max_bytes: int
    ) -> dict[str, bytes | str]:
        return self._files.read(paths, max_bytes)

    async def snapshot(self, *, keep_processes: bool) -> Snapshot:
        """The workspace as it is.

        Raises:
          SandboxFailed: no room is left for the copy that keeping processes takes.
        """
        state = await self._shell_state()
        if keep_processes and self._container is not None:
            archive = await self._pack_frozen(self._container)
            copied = await self._backend.unpack(archive, self._limits)
            return Snapshot(copied.layers, state.folder, state.exported)
        await self.stop()
        self._state = state
        layers = self._files.freeze()
        if len(layers) > shared.MAX_LAYERS:
            archive = await self._backend.pack(Snapshot(layers))
            layers = (await self._backend.unpack(archive, self._limits)).layers
        self._files = self._backend.workspace(self._limits, layers)
        return Snapshot(layers, state.folder, state.exported)

    async def _pack_frozen(self, container: Container) -> bytes:
        engine, identity = self._backend.engine, container.identity
        freezing = asyncio.create_task(asyncio.to_thread(engine.pause, identity))
        try:
            await asyncio.shield(freezing)
            return await asyncio.to_thread(shared.pack, self._files.folder, {})
        finally:
            await asyncio.wait([freezing])
            await asyncio.to_thread(engine.unpause, identity)

    async def _shell_state(self) -> State:
        if not self._has_shell:
            return self._state
        ran = await self.exec(shared.TELL_STATE, limits=_STATE_LIMITS)
        if ran.reason is not None:
            return State()
        folder, _, exported = ran.stdout.text().partition("\n")
        return State(folder, exported)

    async def stop(self) -> None:
        """Kills every process; the workspace stays. They are dead on return."""
        self._has_shell = False
        self._was_cancelled = False
        if self._container is not None:
            container, self._container = self._container, None
            self._burial = self._backend.bury(container)
            await asyncio.shield(container.killed)

    async def close(self) -> None:
        try:
            await self.stop()
            if self._burial is not None:
                await asyncio.shield(self._burial)
        finally:
            self._files.close()
        # Not those of a container that could not be ended.
        gpus, self._gpus = self._gpus, ()
        self._backend.give_back(gpus)


def _rlimits(limits: Limits) -> dict[str, tuple[int, int]]:
    rlimits = shared.rlimits(limits)
    if limits.gpus:  # drivers map far more than they use, which the group bounds
        del rlimits["RLIMIT_AS"]
    return rlimits


async def _in_time(waiter: "asyncio.Future[Reply]", seconds: float) -> Reply | None:
    """Its result, or None if it takes longer."""
    await asyncio.wait([waiter], timeout=seconds)
    return waiter.result() if waiter.done() else None


def _ran(
    container: Container,
    reply: Reply | None,
    timed_out: bool,
    meter: "_Meter",
    *,
    shell_kept: bool,
) -> Ran:
    """reply: None if the first process could not be asked in the end."""
    stdout, stderr = (reply.stdout, reply.stderr) if reply else (Output(), Output())
    code = None if timed_out or reply is None else reply.exit_code
    reason = "wall_timeout" if timed_out else shared.reason_of(code, stderr)
    if reason not in (None, "wall_timeout") and container.out_of_memory():
        reason = "out_of_memory"
    return Ran(
        reason=reason,
        exit_code=code,
        stdout=stdout,
        stderr=stderr,
        usage=meter.usage(reply),
        shell_kept=shell_kept,
    )


class _Meter:
    """What a command uses, from entering it on."""

    def __init__(self, container: Container, files: Workspace):
        self._container = container
        self._group = container.group
        self._files = files
        self._processes = 0

    def __enter__(self) -> "_Meter":
        self._container.watch_memory()
        self._started = time.monotonic()
        self._cpu_before = 0.0
        with contextlib.suppress(OSError):
            self._cpu_before = self._group.cpu_seconds()
        self._sampling = asyncio.get_running_loop().call_later(0.1, self._sample)
        return self

    def __exit__(self, *_) -> None:
        self._sampling.cancel()

    def _sample(self) -> None:
        self._sampling = asyncio.get_running_loop().call_later(0.5, self._sample)
        with contextlib.suppress(OSError):
            self._processes = max(self._processes, self._container.processes())

    def usage(self, reply: Reply | None) -> Usage:
        """What was used; the reply tells where no control group does."""
        cpu_seconds = memory_bytes = 0
        with contextlib.suppress(OSError):
            cpu_seconds = self._group.cpu_seconds() - self._cpu_before
            memory_bytes = self._group.peak_memory_bytes()
            self._processes = max(self._processes, self._container.processes())
        if reply is not None:
            cpu_seconds = cpu_seconds or reply.cpu_seconds
            memory_bytes = memory_bytes or reply.memory_bytes
        return Usage(
            wall_seconds=time.monotonic() - self._started,
            cpu_seconds=cpu_seconds,
            memory_bytes=memory_bytes,
            processes=self._processes,
            workspace_bytes=self._files.used_bytes(),
        )
