"""Lines of bytes over a pair of pipes, for one asyncio loop.

Whoever is at the other end may be dead or hostile: nothing here keeps much more than
`max_bytes` of a line. Who waits bounds the wait, by `asyncio.timeout`.
"""

import asyncio
import collections
import contextlib
import os

from sandbox import buffers


class LineTooLong(ValueError):
    """The other end wrote more than a line may hold."""


class Lines:
    """Lines written to one descriptor and read from another, which stay the caller's.

    Any number may send at a time; one at a time may receive.
    """

    def __init__(self, read_from: int, write_to: int, *, max_bytes: int):
        os.set_blocking(read_from, False)
        os.set_blocking(write_to, False)
        self._read_from = read_from
        self._write_to = write_to
        self._max_bytes = max_bytes
        self._pending = bytearray()
        self._lines: collections.deque[bytes] = collections.deque()
        self._problem: Exception | None = None
        self._arrived = asyncio.Event()
        self._sending = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(read_from, self._read)

    async def send(self, line: bytes) -> None:
        """Raises EOFError if the other end is gone."""
        async with self._sending:
            rest = memoryview(line + b"\n")
            while rest:
                try:
                    rest = rest[os.write(self._write_to, rest) :]
                except BlockingIOError:
                    await self._writable()
                except BrokenPipeError as error:
                    raise EOFError from error

    async def _writable(self) -> None:
        ready = asyncio.Event()
        self._loop.add_writer(self._write_to, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_writer(self._write_to)

    async def receive(self) -> bytes:
        """The next line.

        Raises:
          EOFError: the other end is gone.
          LineTooLong: more than `max_bytes` came without an end.
        """
        while not self._lines:
            if self._problem is not None:
                raise self._problem
            self._arrived.clear()
            await self._arrived.wait()
        return self._lines.popleft()

    def unread(self) -> bool:
        """Whether the other end has said something that nobody asked for."""
        self._read()
        return bool(self._lines or self._pending)

    def _read(self) -> None:
        if self._problem is not None:
            return
        try:
            data = buffers.read(self._read_from)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._fail(EOFError())
            return
        self._pending += data
        if b"\n" in data:
            *lines, rest = bytes(self._pending).split(b"\n")
            self._lines.extend(lines)
            self._pending[:] = rest
            self._arrived.set()
        if len(self._pending) > self._max_bytes:
            self._fail(LineTooLong(f"more than {self._max_bytes} bytes in a line"))

    def _fail(self, problem: Exception) -> None:
        self._problem = problem
        self._loop.remove_reader(self._read_from)
        self._arrived.set()

    def close(self) -> None:
        """Reads no more; the descriptors are the caller's to close."""
        with contextlib.suppress(ValueError, OSError):
            self._loop.remove_reader(self._read_from)
