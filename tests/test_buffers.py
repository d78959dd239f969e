"""Reads through the one buffer are whole, exact in size, and carry descriptors."""

import os
import socket

import pytest

from sandbox import buffers
from sandbox.backends.local import messages


def test_a_read_is_exactly_what_came():
    read_from, write_to = os.pipe()
    try:
        for sent in (b"a", b"b" * 5000, b"c"):
            os.write(write_to, sent)
            assert buffers.read(read_from) == sent
        os.set_blocking(read_from, False)
        with pytest.raises(BlockingIOError):
            buffers.read(read_from)
        os.close(write_to)
        assert buffers.read(read_from) == b""
    finally:
        os.close(read_from)


def test_messages_stay_whole_and_bring_their_descriptors():
    ours, theirs = messages.pair()
    read_from, write_to = os.pipe()
    with ours, theirs:
        messages.send(ours, {"large": "x" * 200_000}, [write_to, read_from])
        messages.send(ours, {"small": 1})
        os.close(write_to)
        message, (write_again, read_again) = messages.receive(theirs)
        assert message == {"large": "x" * 200_000}
        assert messages.receive(theirs) == ({"small": 1}, [])
        os.write(write_again, b"through")
        assert os.read(read_from, 100) == b"through"
        assert not os.get_inheritable(read_again)
        for descriptor in (write_again, read_again, read_from):
            os.close(descriptor)
        ours.close()
        with pytest.raises(EOFError):
            messages.receive(theirs)


def test_a_message_of_another_kind_of_socket_has_no_descriptors():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.send(b"[1]")
        assert buffers.receive(theirs, 4) == (b"[1]", [])
