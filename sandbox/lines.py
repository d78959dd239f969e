"""Lines of bytes over a pair of pipes, each with a deadline.

Whoever is at the other end may be stuck, dead or hostile: nothing here waits longer
than it was told to, or keeps much more than `max_bytes` of a line.
"""

import contextlib
import os
import select
import time


class LineTooLong(ValueError):
    """The other end wrote more than a line may hold."""


class Lines:
    """Lines written to one descriptor and read from another, which stay the caller's.

    Deadlines are in `time.monotonic()`.

    Raises, from both methods:
      TimeoutError: the deadline passed.
      EOFError: the other end is gone.
    """

    def __init__(self, read_from: int, write_to: int, *, max_bytes: int):
        os.set_blocking(read_from, False)
        os.set_blocking(write_to, False)
        self._read_from = read_from
        self._write_to = write_to
        self._max_bytes = max_bytes
        self._pending = bytearray()

    def send(self, line: bytes, deadline: float) -> None:
        rest = memoryview(line + b"\n")
        while rest:
            _wait(self._write_to, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self._write_to, rest) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise EOFError from error

    def receive(self, deadline: float) -> bytes:
        """The next line; more than `max_bytes` without an end raises LineTooLong."""
        searched = 0
        while (end := self._pending.find(b"\n", searched)) < 0:
            searched = len(self._pending)
            if searched > self._max_bytes:
                raise LineTooLong(f"more than {self._max_bytes} bytes in a line")
            _wait(self._read_from, select.POLLIN, deadline)
            if not self._read():
                raise EOFError
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        return line

    def unread(self) -> bool:
        """Whether the other end has said something that nobody asked for."""
        with contextlib.suppress(BlockingIOError):
            self._read()
        return bool(self._pending)

    def _read(self) -> bool:
        data = os.read(self._read_from, 1 << 20)
        self._pending += data
        return bool(data)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    # poll, as select fails on descriptors from 1024 on, which a trainer may well have.
    poll = select.poll()
    poll.register(descriptor, event)
    left = deadline - time.monotonic()
    # Checked first: a flood is always ready and must not outlast the deadline.
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError
