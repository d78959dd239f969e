"""Sandboxes of namespaces on this machine; see the package for what runs where.

Each has its own user, mount, process, network, ipc, uts and cgroup namespaces, a read-only
root made of the system's libraries and one Python, a workspace and temporary folders in
memory of bounded size, a fixed environment, no capabilities, a filter of system calls,
Landlock, and resource limits. A worker that runs as root starts them under unprivileged
uids, those of agents and of graders apart.

Control groups bound what a sandbox's processes use together, where the worker may make
them. Elsewhere each process is bounded alone.
"""

import asyncio
import collections
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence

from sandbox import cgroups, linux, seccomp
from sandbox import limits as limits_lib
from sandbox.backends.backend import (
    SandboxDied,
    SandboxFailed,
    SandboxUnavailable,
)
from sandbox.backends.local import workspace as workspace_lib
from sandbox.backends.local.box import (
    Box,
    Exit,
    Feeder,
    Reader,
    Slot,
    Zygote,
    base_python,
    pipe,
    set_own_limits,
)
from sandbox.backends.local.shell import TELL_STATE, Shell, State
from sandbox.backends.local.workspace import Layer, Snapshot, Workspace
from sandbox.protocol import Limits, Output, Ran, Usage

_FIRST_UID = 200_000
# The worker mounts its own files over this folder, in mounts that nobody else sees: so
# however it ends, nothing is left on the machine.
_ROOT = "/dev/shm"
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_OWN_FOLDERS = ("/dev", "/etc", "/proc", "/sys", "/tmp", "/workspace")
_TMP_BYTES = 16 << 20  # of /tmp, and of /dev/shm
_OWN_PROCESSES = 4  # in a sandbox's group, or about to be: the slot, init, one being forked
_STUCK_SECONDS = 0.5  # for a shell to answer, once all that it had started is dead
_STATE_LIMITS = Limits(wall_seconds=5, output_bytes=128 << 10)
_GRADER_MAIN = os.path.join(os.path.dirname(__file__), "..", "..", "grader_main.py")


class LocalBackend:
    """Makes sandboxes for one worker process, whose mounts and network it makes private.

    number: the worker's, from which the sandboxes' uids follow.
    warm: sandboxes kept ready, beside those in use, for the next ones to be opened.
    shown: folders of the machine that all its sandboxes see at the same path, read-only,
      such as one of packages that graders import. Agents see them too.

    Raises:
      SandboxUnavailable: this machine can't isolate, or a folder can't be shown.
    """

    def __init__(self, number: int, *, warm: int = 1, shown: Sequence[str] = ()):
        _check_shown(shown)
        agent_uid = _FIRST_UID + 2 * number
        has_uids = os.getuid() == 0 and _are_mapped(agent_uid, agent_uid + 1)
        uids = {"agent": agent_uid, "grader": agent_uid + 1}
        self.uids = uids if has_uids else dict.fromkeys(uids)
        self._warm = warm
        self._mounts = 0
        self._slots = 0
        self._free: collections.deque[Slot] = collections.deque()
        self._closed = False
        set_own_limits()
        limits_lib.volunteer_when_memory_runs_out()
        cgroups.remove_those_of_the_dead()
        try:
            _private_mounts_and_network()
            if missing := linux.missing_namespaces():
                raise SandboxUnavailable(f"Missing: the {', '.join(missing)} namespace.")
            linux.mount_tmpfs(_ROOT, size=16 << 20)
            self._zygote = self._start_zygote(shown)
        except (OSError, RuntimeError) as error:
            raise SandboxUnavailable(str(error)) from error

    def _start_zygote(self, shown: Sequence[str]) -> Zygote:
        python = base_python()
        prefix = os.path.dirname(os.path.dirname(python))
        root = f"{_ROOT}/root"
        os.mkdir(root)
        config = {
            "root": root,
            "shown": [path for path in (prefix, *shown) if not _is_within(path, "/usr")],
            "uids": self.uids,
            "filter": seccomp.program().hex(),
            "tmp_bytes": _TMP_BYTES,
        }
        return Zygote(config, python, _ENVIRONMENT)

    def _path(self) -> str:
        self._mounts += 1
        return f"{_ROOT}/{self._mounts:x}"

    async def open(
        self, limits: Limits, *, snapshot: Snapshot | None = None, image: str = ""
    ) -> "LocalSandbox":
        """A sandbox with an empty workspace, or with a snapshot's.

        Raises:
          SandboxFailed: there is no room for the workspace, or an image is asked for.
        """
        if limits.gpus:
            raise SandboxFailed(f"The local backend has no GPUs; {limits.gpus} were asked.")
        if image:
            raise SandboxFailed(
                f"The local backend has no images, so not {image!r}: it shows the "
                "machine's own libraries. Use the docker backend."
            )
        snapshot = snapshot or Snapshot()
        files = self.workspace(limits, snapshot.layers)
        state = State(snapshot.folder, snapshot.exported)
        sandbox = LocalSandbox(self, files, limits, state)
        try:
            await sandbox.running()
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    def workspace(self, limits: Limits, layers: Sequence[Layer] = ()) -> Workspace:
        """Raises SandboxFailed if there is no room for it."""
        try:
            return Workspace(
                self._path(),
                size=limits.workspace_bytes,
                uid=self.uids["agent"] or 0,
                layers=layers,
            )
        except OSError as error:
            raise SandboxFailed(f"No workspace could be made: {error}") from error

    async def begin(self, files: Workspace, limits: Limits, role: str) -> Box:
        """A confined sandbox around a workspace, in a slot of its own."""
        slot = self._free.popleft() if self._free else self._new_slot()
        if not self._free and self._warm:
            # One is made ahead, so that the next to ask finds it ready.
            self._free.append(self._new_slot())
            self._free[-1].warm_up()
        try:
            box = await slot.take()
            size = limits.memory_bytes + limits.workspace_bytes + 2 * _TMP_BYTES
            slot.group.allow(
                memory_bytes=size,
                # The limit on processes inside is met before this one.
                processes=limits.processes + _OWN_PROCESSES,
                cpus=limits.cpus,
            )
            tree = files.tree(read_only=role == "grader")
            try:
                await box.begin(tree, role=role, processes=limits.processes)
            finally:
                os.close(tree)
        except BaseException as error:
            slot.close()
            if isinstance(error, OSError):
                raise SandboxFailed(f"No sandbox came up: {error}") from error
            raise
        return box

    def _new_slot(self) -> Slot:
        self._slots += 1
        return Slot(self._zygote, str(self._slots))

    async def release(self, box: Box) -> None:
        """Ends a sandbox, and keeps its slot for the next one."""
        try:
            await box.kill()
        except BaseException:
            box.slot.close()
            raise
        if self._closed or box.slot.is_retired or len(self._free) > self._warm:
            box.slot.close()
        else:
            self._free.append(box.slot)
            box.slot.warm_up()

    async def start_grader(self, program: str, limits: Limits) -> "LocalGrader":
        """A sandbox that grades by `program`, for one request after the other."""
        files = Workspace(self._path(), size=4 << 20, uid=0)
        try:
            with open(_GRADER_MAIN, "rb") as file:
                main = file.read()
            files.write({"grader_main.py": main, "grader.py": program.encode()})
            box = await self.begin(files, limits, "grader")
        except BaseException:
            files.close()
            raise
        return LocalGrader(self, files, box, limits)

    async def pack(self, snapshot: Snapshot) -> bytes:
        """A snapshot as a tar archive, which `unpack` takes on any machine."""
        files = self._mount(snapshot)
        try:
            state = {"folder": snapshot.folder, "exported": snapshot.exported}
            return await asyncio.to_thread(workspace_lib.pack, files.folder, state)
        finally:
            files.close()

    async def unpack(self, archive: bytes, limits: Limits) -> Snapshot:
        files = self.workspace(limits)
        try:
            state = workspace_lib.unpack(archive, files)
        except BaseException:
            files.close()
            raise
        return Snapshot(files.freeze(), **state)

    def _mount(self, snapshot: Snapshot) -> Workspace:
        size = sum(layer.used_bytes for layer in snapshot.layers) + (1 << 20)
        uid = self.uids["agent"] or 0
        return Workspace(self._path(), size=size, uid=uid, layers=snapshot.layers)

    async def close(self) -> None:
        self._closed = True
        for slot in self._free:
            slot.close()
        self._free.clear()
        self._zygote.close()
        cgroups.remove_those_of_the_dead()


class LocalSandbox:
    """A workspace, and while something runs in it a box; see `backend.Sandbox`."""

    def __init__(
        self, backend: LocalBackend, files: Workspace, limits: Limits, state: State
    ):
        self._backend = backend
        self._files = files
        self._limits = limits
        self._state = state
        self._box: Box | None = None
        self._shell: Shell | None = None

    async def running(self) -> Box:
        """Its box; a new one if it was stopped."""
        if self._box is None:
            self._box = await self._backend.begin(self._files, self._limits, "agent")
        return self._box

    async def run(
        self, command: Sequence[str], *, limits: Limits, stdin: bytes = b""
    ) -> Ran:
        """Runs a command to its end, or to its limits; see `backend.Sandbox`."""
        box = await self.running()
        box.begin_command()
        meter = _Meter(box, self._files)
        stdin_read, stdin_write = pipe()
        out, out_write = pipe()
        err, err_write = pipe()
        theirs = (stdin_read, out_write, err_write)
        stdout, stderr = (Reader(end, limits.output_bytes) for end in (out, err))
        feeder = Feeder(stdin_write, stdin)
        try:
            try:
                _, waiter = box.start(command, limits, theirs)
            finally:
                for descriptor in theirs:
                    os.close(descriptor)
            timed_out = False
            try:
                async with asyncio.timeout(limits.wall_seconds):
                    exit_ = await waiter
            except TimeoutError:
                timed_out, exit_ = True, None
                await self.stop()
            stdout.drain()
            stderr.drain()
        except SandboxDied as death:
            await self._dead(death)
            return self._ran(death.reason, None, stdout, stderr, meter)
        finally:
            meter.stop()
            feeder.close()
            stdout.close()
            stderr.close()
        code = exit_.exit_code if exit_ else None
        reason = "wall_timeout" if timed_out else reason_of(code, stderr.capture.output())
        if reason not in (None, "wall_timeout") and box.out_of_memory():
            reason = "out_of_memory"
        kept = not timed_out
        return self._ran(reason, code, stdout, stderr, meter, exit_, shell_kept=kept)

    def _ran(
        self,
        reason: str | None,
        code: int | None,
        stdout: Reader,
        stderr: Reader,
        meter: "_Meter",
        exit_: Exit | None = None,
        shell_kept: bool = True,
    ) -> Ran:
        return Ran(
            reason=reason,
            exit_code=code,
            stdout=stdout.capture.output(),
            stderr=stderr.capture.output(),
            usage=meter.usage(exit_),
            shell_kept=shell_kept,
        )

    async def _dead(self, death: SandboxDied) -> None:
        """After a sandbox's death: nothing of it is left, and if it was ours, says so."""
        await self.stop()
        if death.reason != "out_of_memory":
            raise death

    async def exec(self, script: str, *, limits: Limits) -> Ran:
        """Runs a script in the persistent shell; see `backend.Sandbox`."""
        box = await self.running()
        box.begin_command()
        meter = _Meter(box, self._files)
        if self._shell is None:
            self._shell = Shell(box, limits, self._state)
            box.slot.retire()
        shell = self._shell
        for reader in (shell.stdout, shell.stderr):
            reader.capture = limits_lib.Capture(limits.output_bytes)
        reason, code, kept = None, None, True
        try:
            try:
                async with asyncio.timeout(limits.wall_seconds):
                    code = await shell.run(script)
            except TimeoutError:
                reason = "wall_timeout"
                kept = await self._interrupt(box, shell)
            except EOFError as end:
                code, kept = end.args[0], False
            shell.stdout.drain()
            shell.stderr.drain()
        except SandboxDied as death:
            await self._dead(death)
            return self._ran(death.reason, None, shell.stdout, shell.stderr, meter)
        finally:
            meter.stop()
        if reason is None:
            reason = reason_of(code, shell.stderr.capture.output())
            if reason is not None and box.out_of_memory():
                reason = "out_of_memory"
        ran = self._ran(reason, code, shell.stdout, shell.stderr, meter, shell_kept=kept)
        if not kept:
            shell.close()
            self._shell = None
        return ran

    async def _interrupt(self, box: Box, shell: Shell) -> bool:
        """Kills all that runs; whether the shell is alive, and ready for more."""
        await box.end_all_but(shell.number)
        with contextlib.suppress(TimeoutError, EOFError):
            async with asyncio.timeout(_STUCK_SECONDS):
                await shell.answer()
            # What it had started between the first killing and the script's end.
            await box.end_all_but(shell.number)
            return True
        await box.end_all_but(None)
        return False

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        self._files.write(files)

    async def read_files(
        self, paths: Sequence[str], *, max_bytes: int
    ) -> dict[str, bytes | str]:
        return self._files.read(paths, max_bytes)

    async def snapshot(self, *, keep_processes: bool) -> Snapshot:
        """The workspace as it is; see `backend.Sandbox`.

        Raises:
          SandboxFailed: no room is left for the copy that keeping processes takes.
        """
        state = await self._shell_state()
        if keep_processes and self._box is not None:
            await self._box.signal(signal.SIGSTOP)
            try:
                archive = workspace_lib.pack(self._files.folder, {})
            finally:
                await self._box.signal(signal.SIGCONT)
            copied = await self._backend.unpack(archive, self._limits)
            return Snapshot(copied.layers, state.folder, state.exported)
        await self.stop()
        self._state = state
        layers = self._files.freeze()
        if len(layers) > workspace_lib.MAX_LAYERS:
            archive = await self._backend.pack(Snapshot(layers))
            layers = (await self._backend.unpack(archive, self._limits)).layers
        self._files = self._backend.workspace(self._limits, layers)
        return Snapshot(layers, state.folder, state.exported)

    async def _shell_state(self) -> State:
        if self._shell is None:
            return self._state
        ran = await self.exec(TELL_STATE, limits=_STATE_LIMITS)
        if ran.reason is not None:
            return State()
        folder, _, exported = ran.stdout.text().partition("\n")
        return State(folder, exported)

    async def stop(self) -> None:
        """Kills every process; the workspace stays. They are dead on return."""
        if self._shell is not None:
            self._shell.close()
            self._shell = None
        if self._box is not None:
            box, self._box = self._box, None
            await self._backend.release(box)

    async def close(self) -> None:
        try:
            await self.stop()
        finally:
            self._files.close()


class _Meter:
    """What a command uses, from now on."""

    def __init__(self, box: Box, files: Workspace):
        self._group = box.slot.group
        self._files = files
        self._started = time.monotonic()
        self._cpu_before = self._group.cpu_seconds()
        self._processes = 0
        self._sampling = asyncio.get_running_loop().call_later(0.1, self._sample)

    def _sample(self) -> None:
        self._sampling = asyncio.get_running_loop().call_later(0.5, self._sample)
        with contextlib.suppress(OSError):
            self._processes = max(self._processes, self._group.processes())

    def stop(self) -> None:
        self._sampling.cancel()

    def usage(self, exit_: Exit | None) -> Usage:
        """What was used; `exit_` tells where no control group does."""
        self.stop()
        cpu_seconds = memory_bytes = 0
        with contextlib.suppress(OSError):
            cpu_seconds = self._group.cpu_seconds() - self._cpu_before
            memory_bytes = self._group.peak_memory_bytes()
            self._processes = max(self._processes, self._group.processes())
        if exit_ is not None:
            cpu_seconds = cpu_seconds or exit_.cpu_seconds
            memory_bytes = memory_bytes or exit_.memory_bytes
        return Usage(
            wall_seconds=time.monotonic() - self._started,
            cpu_seconds=cpu_seconds,
            memory_bytes=memory_bytes,
            processes=max(self._processes - _OWN_PROCESSES + 2, 0),
            workspace_bytes=self._files.used_bytes(),
        )


class LocalGrader:
    """A grader at work: requests to one descriptor, verdicts from the other."""

    def __init__(self, backend: LocalBackend, files: Workspace, box: Box, limits: Limits):
        self._backend = backend
        self._files = files
        self._box = box
        requests, self.requests = pipe()
        self.verdicts, verdicts = pipe()
        null = os.open(os.devnull, os.O_RDWR)
        program = ("python", "-I", "-S", "grader_main.py", "grader.py")
        try:
            streams = (requests, null, null, verdicts)
            _, exit_ = box.start(program, limits, streams, bound_cpu=False)
            exit_.add_done_callback(lambda ended: ended.exception())
        finally:
            for descriptor in (requests, null, verdicts):
                os.close(descriptor)

    async def close(self) -> None:
        os.close(self.requests)
        os.close(self.verdicts)
        try:
            await self._backend.release(self._box)
        finally:
            self._files.close()


def reason_of(code: int | None, stderr: Output) -> str | None:
    """Why a command that ended by itself did not end well; None if it did."""
    if code == 0:
        return None
    if code == 128 + signal.SIGXCPU:
        return "cpu_timeout"
    if b"MemoryError" in stderr.tail or b"MemoryError" in stderr.head:
        return "out_of_memory"
    if code is not None and 128 < code <= 128 + signal.NSIG - 1:
        return f"killed_by_signal_{code - 128}"
    return "nonzero_exit"


def _check_shown(paths: Sequence[str]) -> None:
    """Raises SandboxUnavailable for a path that would be no folder, or another, inside."""
    for path in paths:
        if not os.path.isdir(path) or os.path.realpath(path) != path:
            raise SandboxUnavailable(
                f"shown: {path!r} is no folder of this machine, or reached by a link; give "
                "its absolute path."
            )
        if path == "/" or any(_is_within(path, own) for own in _OWN_FOLDERS):
            raise SandboxUnavailable(
                f"shown: {path!r} can't be shown: sandboxes have their own of "
                f"{', '.join(_OWN_FOLDERS)}, and not all of the machine."
            )


def _is_within(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _private_mounts_and_network() -> None:
    """Gives this process mounts of its own and a network with nothing in it.

    Both end with it. Without root, within a user namespace in which it is root.
    """
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(linux.NEW_MOUNT | linux.NEW_NET | (linux.NEW_USER if uid else 0))
    if uid:
        linux.map_users(0, uid, gid)
    linux.make_mounts_private()


def _are_mapped(*uids: int) -> bool:
    """Whether this user namespace has these uids and gids, to which root may change."""
    for kind in ("uid", "gid"):
        with open(f"/proc/self/{kind}_map") as file:
            ranges = [[int(word) for word in line.split()] for line in file]
        for uid in uids:
            if not any(first <= uid < first + count for first, _, count in ranges):
                return False
    return True
