"""Serves the worker: requests as JSON lines on stdin, replies on stdout.

{"run": 1, "argv": [...], "stdin": base64, "limits": {...}, "keep": 4096}
{"shell": [...], "limits": {...}}            without a reply: a bash that stays
{"exec": 2, "script": "...", "keep": 4096}   a script for that shell
{"end": "all"}                               or "others": everything but the shell

{"done": 1, "exit_code": 0, "stdout": {...}, "stderr": {...}, ...}
{"ended": true}
"""

import base64
import contextlib
import json
import os
import signal

from sandbox import linux
from sandbox.backends.docker.inside.programs import Program, exit_code
from sandbox.backends.docker.inside.streams import Capture, Feeder, Loop, Source


def say(message: dict) -> None:
    rest = memoryview(json.dumps(message).encode() + b"\n")
    while rest:
        rest = rest[os.write(1, rest) :]


class Server:
    """Requests of the worker, and ends of processes."""

    def __init__(self):
        self._loop = Loop()
        self._heard = bytearray()
        self._programs: dict[int, tuple[int, Program]] = {}  # process to request, program
        self._shell: Shell | None = None

    def serve(self) -> None:
        """Returns when the worker is gone."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        Source(self._loop, woken, lambda _: self._reap())
        requests = Source(self._loop, os.dup(0), self._hear)
        while requests.is_open:
            self._loop.turn()

    def _hear(self, data: bytes) -> None:
        self._heard += data
        if b"\n" in data:
            *lines, self._heard = self._heard.split(b"\n")
            for line in lines:
                self._serve(json.loads(line))

    def _serve(self, request: dict) -> None:
        if "run" in request:
            self._run(request)
        elif "shell" in request:
            with contextlib.suppress(OSError):  # the next script is told that there is none
                self._shell = Shell(self._loop, request["shell"], request["limits"])
        elif "exec" in request:
            if self._shell is None:
                why = "bash: the shell has ended, or could not be started\n"
                _refuse(request["exec"], why)
            else:
                self._shell.begin(request["exec"], request["script"], request["keep"])
        else:
            self._end(request["end"] == "others")
            say({"ended": True})

    def _run(self, request: dict) -> None:
        argv, limits = request["argv"], request["limits"]
        try:
            program = Program(self._loop, argv, limits, request["keep"])
        except OSError as error:  # the limit on processes, used up by those of before
            _refuse(request["run"], f"{argv[0]}: {error.strerror}\n")
            return
        program.stdin.write(base64.b64decode(request["stdin"]), then_close=True)
        self._programs[program.pid] = request["run"], program

    def _reap(self) -> None:
        """Tells of the programs that have ended."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._shell is not None and pid == self._shell.program.pid:
                self._shell.ended(exit_code(status))
                self._shell = None
            elif pid in self._programs:
                number, program = self._programs.pop(pid)
                used = {
                    "cpu_seconds": usage.ru_utime + usage.ru_stime,
                    "memory_bytes": usage.ru_maxrss << 10,
                }
                code = exit_code(status)
                say({"done": number, "exit_code": code, **program.told(), **used})
                program.close()

    def _end(self, but_shell: bool) -> None:
        """Kills every process but this one, and the shell; they are dead on return."""
        while True:
            spared = {1}
            if but_shell and self._shell is not None:
                spared.add(self._shell.program.pid)
            # Again and again: a process may fork while the others are being killed.
            # The dead may wait for a parent that is stopped to bury them.
            names = (name for name in os.listdir("/proc") if name.isdigit())
            others = {int(name) for name in names if linux.is_alive(name)} - spared
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            if not others:
                return


class Shell:
    """A bash that stays: scripts to its descriptor 3, their exit codes from its 4.

    Raises OSError.
    """

    def __init__(self, loop: Loop, argv: list[str], limits: dict):
        scripts, scripts_write = os.pipe()
        codes, codes_write = os.pipe()
        try:
            self.program = Program(loop, argv, limits, 1, (scripts, codes_write))
        except OSError:
            os.close(scripts_write)
            os.close(codes)
            raise
        self.program.stdin.close()
        self._scripts = Feeder(loop, scripts_write)
        self._codes = Source(loop, codes, self._hear)
        self._said = b""
        self._number: int | None = None  # of the request that it is at

    def begin(self, number: int, script: str, keep: int) -> None:
        """Runs a script, of whose end is told."""
        self.program.drain()
        self.program.keep(keep)
        self._number = number
        self._scripts.write(os.fsencode(script) + b"\0")

    def _hear(self, data: bytes) -> None:
        *words, rest = (self._said + data).split(b"\0")
        self._said = rest[-16:]
        for word in words:
            # A script can reach this pipe, to say nonsense about itself.
            self._tell(int(word) if word.isdigit() and len(word) < 4 else 255)

    def _tell(self, code: int, *, shell_kept: bool = True) -> None:
        if self._number is not None:
            told = {"exit_code": code, "shell_kept": shell_kept, **self.program.told()}
            say({"done": self._number, **told})
            self._number = None

    def ended(self, code: int) -> None:
        """Its process has; so has its script."""
        self._tell(code, shell_kept=False)
        for stream in (self.program, self._scripts, self._codes):
            stream.close()


def _refuse(number: int, why: str) -> None:
    stderr, nothing = Capture(1 << 12), Capture(1)
    stderr.add(why.encode())
    told = {"stdout": nothing.told(), "stderr": stderr.told(), "shell_kept": False}
    say({"done": number, "exit_code": 126, **told})
