"""A sandboxed command from its start to its proven end: fed, read, timed, killed.

The sandbox's first process ends after all its others, so its end is what is waited for.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time

from sandbox.protocol import Output


def init_pidfd(status) -> int | None:
    """A descriptor of the sandbox's first process; it ends after all its others."""
    line = status.readline()
    if not line:
        return None
    with contextlib.suppress(ValueError, KeyError, ProcessLookupError):
        return os.pidfd_open(json.loads(line)["child-pid"])
    return None


def pump(
    process: subprocess.Popen,
    stdin: bytes,
    captures: dict,
    init: int | None,
    *,
    deadline: float,
) -> bool:
    """Feeds and reads the process until its sandbox has ended; True if it ran too long.

    The sandbox's end is its first process's end, not that of the streams: then a stream
    is read on only for what is already in it.
    """
    feed = process.stdin
    assert feed is not None
    with selectors.DefaultSelector() as selector:
        for stream in captures:
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        pending = memoryview(stdin)
        if pending:
            os.set_blocking(feed.fileno(), False)
            selector.register(feed, selectors.EVENT_WRITE)
        else:
            feed.close()
        if init is not None:
            selector.register(init, selectors.EVENT_READ)

        def drain(stream) -> bool:
            try:
                data = os.read(stream.fileno(), 1 << 20)
            except BlockingIOError:
                return True
            if data:
                captures[stream].add(data)
            return bool(data)

        ended = False
        while not ended and selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return True
            for key, _ in selector.select(left):
                if key.fileobj == init:
                    ended = True
                elif key.fileobj is feed:
                    try:
                        pending = pending[os.write(feed.fileno(), pending) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        pending = pending[:0]
                    if not pending:
                        selector.unregister(feed)
                        feed.close()
                elif not drain(key.fileobj):
                    selector.unregister(key.fileobj)
        for stream in captures:
            with contextlib.suppress(BlockingIOError):
                while data := os.read(stream.fileno(), 1 << 20):
                    captures[stream].add(data)
    return False


def end(process: subprocess.Popen, init: int | None) -> bool:
    """Kills whatever is left of a sandbox; True once nothing of it is alive."""
    is_dead = True
    if init is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(init, signal.SIGKILL)
        with selectors.DefaultSelector() as selector:
            selector.register(init, selectors.EVENT_READ)
            is_dead = bool(selector.select(5))
        os.close(init)
    else:
        process.kill()
    if process.stdin and not process.stdin.closed:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    process.wait()  # not killed: it still has the command's exit code to tell
    return is_dead


def reason(code: int, stderr: Output) -> str | None:
    """Why a command that ended by itself did not end well; None if it did."""
    if code == 0:
        return None
    if code == 128 + signal.SIGXCPU:
        return "cpu_timeout"
    if b"MemoryError" in stderr.tail or b"MemoryError" in stderr.head:
        return "out_of_memory"
    if 128 < code <= 128 + signal.NSIG - 1:
        return f"killed_by_signal_{code - 128}"
    return "nonzero_exit"
