"""Reads of unknown size, in a process that lives long.

`os.read(descriptor, 1 << 20)` takes a megabyte and gives back all but what came: beside
every object that is kept a hole is left, and the heap grows for hours. Here a result is
made once its size is known.
"""

import array
import os
import socket
import threading

MAX_BYTES = 1 << 18  # of a read


class _Buffer(threading.local):
    """A thread's own; each read is over before the thread's next begins."""

    def __init__(self):
        self.bytes = memoryview(bytearray(MAX_BYTES))


_buffer = _Buffer()


def read(descriptor: int) -> bytes:
    """What there is to read, at most 256 KiB; as `os.read`, of which see the errors."""
    return bytes(_buffer.bytes[: os.readv(descriptor, [_buffer.bytes])])


def receive(source: socket.socket, max_descriptors: int) -> tuple[bytes, list[int]]:
    """A message of at most 256 KiB and the descriptors with it, now the caller's."""
    descriptors = array.array("i")
    space = socket.CMSG_SPACE(max_descriptors * descriptors.itemsize)
    count, ancillary, _, _ = source.recvmsg_into([_buffer.bytes], space)
    for _, kind, data in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return bytes(_buffer.bytes[:count]), list(descriptors)
