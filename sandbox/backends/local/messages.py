"""JSON messages with descriptors over a pair of sockets; each message stays whole."""

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from sandbox import buffers

_MAX_DESCRIPTORS = 8


def pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * buffers.MAX_BYTES)
    return ends


def send(to: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """The descriptors stay the sender's to close."""
    socket.send_fds(to, [json.dumps(message).encode()], list(descriptors))


def receive(source: socket.socket) -> tuple[Any, list[int]]:
    """The next message and its descriptors, which are now the caller's.

    Raises:
      EOFError: the other end is gone.
    """
    try:
        data, descriptors = buffers.receive(source, _MAX_DESCRIPTORS)
    except ConnectionError as error:
        raise EOFError from error
    if not data:
        raise EOFError
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return json.loads(data), descriptors
