"""The stream that Docker attaches to a container: bytes in, and frames of two kinds out."""

import asyncio
import os
import socket
import struct

_READ_BYTES = 1 << 18
_HEADER = struct.Struct(">BxxxI")  # what stream of the container, and bytes that follow
_STDOUT = 1
_MAX_LINE = 64 << 20
_WORDS = 4000  # bytes kept of what the first process says on its stderr


class Attached:
    """Both directions of a container's first process; the socket is its own."""

    def __init__(self, stream: socket.socket):
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._said = bytearray()
        self._sending = asyncio.Lock()
        self._words = bytearray()

    async def send(self, data: bytes) -> None:
        """Raises EOFError if the container is gone."""
        async with self._sending:
            try:
                await self._loop.sock_sendall(self._stream, data)
            except OSError as error:
                raise EOFError(str(error)) from error

    async def receive(self) -> bytes:
        """What is there of the container's stdout; empty at its end."""
        while not self._said:
            try:
                data = await self._loop.sock_recv(self._stream, _READ_BYTES)
            except OSError:
                return b""
            if not data:
                return b""
            self._buffer += data
            self._split()
        said = bytes(self._said)
        self._said.clear()
        return said

    def _split(self) -> None:
        """Takes whole frames, and the beginnings of long ones, out of the buffer."""
        while len(self._buffer) >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self._buffer)
            if len(self._buffer) < _HEADER.size + size:
                return
            payload = self._buffer[_HEADER.size : _HEADER.size + size]
            del self._buffer[: _HEADER.size + size]
            if kind == _STDOUT:
                self._said += payload
            else:
                self._words += payload
                del self._words[:-_WORDS]

    async def line(self) -> bytes:
        """The next line of stdout, without its end; what follows stays to be received.

        Raises EOFError; ValueError for a line of more than 64 MiB.
        """
        line = bytearray()
        while b"\n" not in line:
            data = await self.receive()
            if not data:
                raise EOFError(self.last_words())
            line += data
            if len(line) > _MAX_LINE:
                raise ValueError(f"a line of more than {_MAX_LINE} bytes")
        first, _, rest = line.partition(b"\n")
        self._said[:0] = rest
        return bytes(first)

    def last_words(self) -> str:
        """The end of what came from the container's stderr."""
        return self._words.decode(errors="replace").strip()

    def close(self) -> None:
        self._stream.close()


async def read_some(descriptor: int) -> bytes:
    """What a pipe holds, or will; empty at its end. The descriptor does not block."""
    while True:
        try:
            return os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            await _ready(descriptor, asyncio.get_running_loop().add_reader)


async def write_all(descriptor: int, data: bytes) -> None:
    """Raises EOFError if nobody will read it. The descriptor does not block."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            await _ready(descriptor, asyncio.get_running_loop().add_writer)
        except BrokenPipeError as error:
            raise EOFError from error


async def _ready(descriptor: int, watch) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    watch(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(descriptor) if watch == loop.add_writer else loop.remove_reader(
            descriptor
        )
