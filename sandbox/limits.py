"""Resource limits of a sandbox's processes, and the cap on what they print."""

import contextlib
import resource
from collections.abc import Iterator

from sandbox.protocol import Limits, Output


def apply(limits: Limits, *, cpu: bool) -> None:
    """Sets this process's limits, which its children inherit; for the fork before exec.

    The limit on processes is set later, inside the user namespace, where it counts the
    sandbox's processes alone.
    """

    def both(which: int, value: int) -> None:
        resource.setrlimit(which, (value, value))

    both(resource.RLIMIT_CORE, 0)
    both(resource.RLIMIT_NOFILE, 256)
    both(resource.RLIMIT_AS, limits.memory_bytes)
    both(resource.RLIMIT_FSIZE, limits.file_bytes)
    if cpu:
        seconds = int(limits.cpu_seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def volunteer_when_memory_runs_out() -> None:
    """Lets the kernel kill this process and its children before the machine's others.

    Memory that no limit counts (shared segments, many processes) may fill the machine,
    and should not cost the trainer then. A child can take it back, unless this process
    has CAP_SYS_RESOURCE.
    """
    _set_oom_score(500)


@contextlib.contextmanager
def children_killed_first() -> Iterator[None]:
    """Within, children are started that the kernel kills before this process."""
    _set_oom_score(1000)
    try:
        yield
    finally:
        _set_oom_score(500)


def _set_oom_score(score: int) -> None:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(score))


class Capture:
    """Keeps the head and the tail of a stream, and counts all of it."""

    def __init__(self, keep: int):
        self._half = max(keep // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:][-self._half :]
        del self._tail[: -self._half]

    def output(self) -> Output:
        return Output(
            head=bytes(self._head), tail=bytes(self._tail), total_bytes=self._total
        )
