"""What programs print and read, by pipes that are never waited for."""

import base64
import os
import select
from collections.abc import Callable

_READ_BYTES = 1 << 18


class Capture:
    """Keeps the head and the tail of a stream, and counts all of it."""

    def __init__(self, keep: int):
        self._half = max(keep // 2, 1)
        self._head, self._tail = bytearray(), bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:][-self._half :]
        del self._tail[: -self._half]

    def told(self) -> dict:
        return {
            "head": base64.b64encode(self._head).decode(),
            "tail": base64.b64encode(self._tail).decode(),
            "total_bytes": self._total,
        }


class Loop:
    """Calls a function whenever its descriptor is ready."""

    def __init__(self):
        self._poll = select.poll()
        self._calls: dict[int, Callable[[], object]] = {}

    def watch(self, descriptor: int, events: int, call: Callable[[], object]) -> None:
        self._calls[descriptor] = call
        self._poll.register(descriptor, events)

    def forget(self, descriptor: int) -> None:
        if self._calls.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def turn(self) -> None:
        for descriptor, _ in self._poll.poll():
            if call := self._calls.get(descriptor):  # an earlier call may have closed it
                call()


class Stream:
    """One end of a pipe, which is its own to close."""

    def __init__(self, loop: Loop, descriptor: int):
        os.set_blocking(descriptor, False)
        self._loop = loop
        self._descriptor = descriptor
        self.is_open = True

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._loop.forget(self._descriptor)
            os.close(self._descriptor)


class Source(Stream):
    """Gives what a pipe carries to a function, as it comes; nothing at the end."""

    def __init__(self, loop: Loop, descriptor: int, take: Callable[[bytes], object]):
        super().__init__(loop, descriptor)
        self._take = take
        loop.watch(descriptor, select.POLLIN, self._read)

    def _read(self) -> bool:
        """Whether there may be more."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
        self._take(data)
        return len(data) == _READ_BYTES

    def drain(self) -> None:
        """Takes what is in the pipe now."""
        # Those who still write could go on for ever; a pipe holds less than this.
        for _ in range(8):
            if not self.is_open or not self._read():
                return


class Feeder(Stream):
    """Writes to a pipe as it takes."""

    def __init__(self, loop: Loop, descriptor: int):
        super().__init__(loop, descriptor)
        self._rest = memoryview(b"")
        self._closes = False

    def write(self, data: bytes, *, then_close: bool = False) -> None:
        self._rest = memoryview(bytes(self._rest) + data)
        self._closes = then_close
        self._loop.watch(self._descriptor, select.POLLOUT, self._write)

    def _write(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._descriptor, self._rest) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._rest = memoryview(b"")
        self._loop.forget(self._descriptor)
        if self._closes:
            self.close()
