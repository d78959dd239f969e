"""Starting programs as children of the first process."""

import contextlib
import os
import resource
import signal
import traceback
from collections.abc import Sequence

from sandbox import linux
from sandbox.backends.docker.inside.streams import Capture, Feeder, Loop, Source

_HELD = 200  # descriptors from here on, of the 256 that there may be, are never in use


class Program:
    """A process that was asked for, with its streams.

    extra: descriptors that become its 3, 4, ... All are closed here, whatever comes of it.
    Raises OSError.
    """

    def __init__(
        self,
        loop: Loop,
        argv: list[str],
        limits: dict,
        keep: int,
        extra: Sequence[int] = (),
    ):
        stdin, stdin_write = os.pipe()
        out, out_write = os.pipe()
        err, err_write = os.pipe()
        theirs = [stdin, out_write, err_write, *extra]
        try:
            self.pid = start(argv, limits, theirs)
        except OSError:
            for descriptor in (stdin_write, out, err):
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.keep(keep)
        self.stdin = Feeder(loop, stdin_write)
        self._out = Source(loop, out, self._take_out)
        self._err = Source(loop, err, self._take_err)

    def _take_out(self, data: bytes) -> None:
        self._stdout.add(data)

    def _take_err(self, data: bytes) -> None:
        self._stderr.add(data)

    def keep(self, size: int) -> None:
        """From now on that many bytes of each stream are kept, and none of before."""
        self._stdout, self._stderr = Capture(size), Capture(size)

    def drain(self) -> None:
        """Takes what is in its pipes now."""
        self._out.drain()
        self._err.drain()

    def told(self) -> dict:
        """Its output until now."""
        self.drain()
        return {"stdout": self._stdout.told(), "stderr": self._stderr.told()}

    def close(self) -> None:
        for stream in (self.stdin, self._out, self._err):
            stream.close()


def start(argv: list[str], limits: dict, descriptors: Sequence[int]) -> int:
    """The process of a program whose descriptors are 0, 1, 2, ...; raises OSError."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _become(argv, limits, descriptors)
    except FileNotFoundError:
        os.write(2, f"{argv[0]}: command not found\n".encode())
        os._exit(127)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(126)


def _become(argv: list[str], limits: dict, descriptors: Sequence[int]) -> None:
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, _HELD + number)
    for number in range(len(descriptors)):
        os.dup2(_HELD + number, number)
    os.closerange(len(descriptors), 1 << 12)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    linux.set_dumpable(True)
    with contextlib.suppress(OSError):  # it goes before the first process does
        linux.write_file("/proc/self/oom_score_adj", "1000")
    for name, (soft, hard) in limits.items():
        resource.setrlimit(getattr(resource, name), (soft, hard))
    os.execvp(argv[0], argv)


def exit_code(status: int) -> int:
    """Of a process, as a shell says it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
