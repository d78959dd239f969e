"""The first process of a sandbox: confines itself, then starts programs when asked.

It is forked from a slot into fresh namespaces and prepares all that does not depend on the
job, so that it can wait, warm, for one. What it gives up it gives up for all its children.
Nobody in the sandbox can stop it, look into it, or send it a signal that it heeds.
"""

import contextlib
import dataclasses
import os
import resource
import select
import signal
import socket
import traceback

from sandbox import landlock, linux
from sandbox.backends.local import interpreter, messages

_WRITABLE = ("/workspace", "/tmp", "/dev")  # as far as mounts allow, which is less
_HELD = 64  # descriptors from here on are never a program's
_INSIDE_UID = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The same for all sandboxes of a worker.

    uids: by role; None where the worker has but one user.
    filter: of system calls, in the kernel's form.
    last_capability: the kernel's highest number of one.
    """

    uids: dict[str, int | None]
    filter: bytes
    last_capability: int
    python: str
    tmp_bytes: int


def main(control: socket.socket, settings: Settings) -> None:
    """Serves requests on `control` until it ends; never raises."""
    try:
        _prepare(settings)
        messages.send(control, {"ready": True})
        request, (workspace,) = messages.receive(control)
        linux.attach(workspace, "/workspace")
        os.close(workspace)
        os.chdir("/workspace")
        _confine(settings, request["role"], request["processes"])
        messages.send(control, {"begun": True})
        _Server(control, settings).serve()
    except EOFError:
        return
    except Exception:
        with contextlib.suppress(OSError):
            messages.send(control, {"failed": traceback.format_exc()})


def _prepare(settings: Settings) -> None:
    linux.write_file("/proc/self/oom_score_adj", "1000")  # the sandbox goes first
    flags = linux.NO_SUID | linux.NO_DEVICES | linux.NO_EXEC
    linux.mount("proc", "/proc", flags=flags)
    for path in ("/tmp", "/dev/shm"):
        linux.mount_tmpfs(path, size=settings.tmp_bytes, mode=0o1777)
    options = "newinstance,ptmxmode=0666,mode=620"
    linux.mount("devpts", "/dev/pts", flags=linux.NO_SUID | linux.NO_EXEC, options=options)
    socket.sethostname("sandbox")


def _confine(settings: Settings, role: str, processes: int) -> None:
    """Leaves root, capabilities, and most of files and system calls behind, for good."""
    uid = settings.uids[role]
    if uid is None:
        uid = 0  # of the worker's user namespace: its only user
    else:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    linux.unshare(linux.NEW_USER)
    linux.set_dumpable(True)  # or its own files in /proc are not its own
    linux.map_users(_INSIDE_UID, uid, uid)
    linux.set_dumpable(False)
    linux.drop_capabilities(settings.last_capability)
    most = processes + 1  # with this one
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    landlock.restrict(writable=_WRITABLE)
    # A signal that has a handler would reach even this process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    linux.filter_calls(settings.filter)


class _Server:
    """Requests of the worker: `run`, `end_but` and `signal`; it hears of programs' ends."""

    def __init__(self, control: socket.socket, settings: Settings):
        self._control = control
        self._settings = settings
        self._programs: dict[int, int] = {}  # process to the worker's number for it

    def serve(self) -> None:
        woken, wake = os.pipe()
        for descriptor in (woken, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        for descriptor in (woken, self._control.fileno()):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 1 << 10)
                    self._reap()
                else:
                    request, descriptors = messages.receive(self._control)
                    if "run" in request:
                        self._run(request, descriptors)
                    elif "signal" in request:
                        self._signal(request["signal"])
                    else:
                        self._end(request["end_but"])

    def _reap(self, *, options: int = os.WNOHANG) -> None:
        """Tells of the programs that have ended; with options=0, waits for all."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, options)
                if pid == 0:
                    return
                number = self._programs.pop(pid, None)
                if number is not None:
                    code = os.waitstatus_to_exitcode(status)
                    message = {
                        "exited": number,
                        "exit_code": code if code >= 0 else 128 - code,
                        "cpu_seconds": usage.ru_utime + usage.ru_stime,
                        "memory_bytes": usage.ru_maxrss << 10,
                    }
                    messages.send(self._control, message)

    def _end(self, but: int | None) -> None:
        """Kills every process but this one and the program of this number."""
        spared = {1, *(pid for pid, number in self._programs.items() if number == but)}
        if len(spared) == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            self._reap(options=0)
        else:
            # Again and again: a process may fork while the others are being killed.
            while others := _processes() - spared:
                for pid in others:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self._reap()
        messages.send(self._control, {"ended": True})

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, number)
        messages.send(self._control, {"ended": True})

    def _run(self, request: dict, descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # the limit on processes, used up by those of before
            message = {"exited": request["run"], "exit_code": 126, "failed": str(error)}
            messages.send(self._control, message)
            pid = None
        if pid == 0:
            try:
                _become(request, descriptors, self._settings)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(126)
        if pid is not None:
            self._programs[pid] = request["run"]
        for descriptor in descriptors:
            os.close(descriptor)


def _processes() -> set[int]:
    """Those that are alive; the dead may wait for a parent that is stopped to bury them."""
    names = (name for name in os.listdir("/proc") if name.isdigit())
    return {int(name) for name in names if linux.is_alive(name)}


def _become(request: dict, descriptors: list[int], settings: Settings) -> None:
    """Turns a fork of init into the program; the descriptors become its 0, 1, 2, ..."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, _HELD + number)
    for number in range(len(descriptors)):
        os.dup2(_HELD + number, number)
    os.closerange(len(descriptors), 1 << 16)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    linux.set_dumpable(True)
    for name, (soft, hard) in request["limits"].items():
        resource.setrlimit(getattr(resource, name), (soft, hard))
    arguments = request["argv"]
    if arguments[0] == "python":
        program = interpreter.parse(arguments[1:])
        if program is not None:
            interpreter.run(program)
        arguments = [settings.python, *arguments[1:]]
    try:
        os.execvp(arguments[0], arguments)
    except FileNotFoundError:
        os.write(2, f"{arguments[0]}: command not found\n".encode())
        os._exit(127)
    except OSError as error:
        os.write(2, f"{arguments[0]}: {error.strerror}\n".encode())
        os._exit(126)
