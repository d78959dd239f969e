"""Who goes first when memory runs out, and the cap on what programs print."""

from sandbox.protocol import Output


def volunteer_when_memory_runs_out() -> None:
    """Lets the kernel kill this process and its children before the machine's others.

    Memory that no limit counts (shared segments, many processes) may fill the machine,
    and should not cost the trainer then. A child can take it back, unless this process
    has CAP_SYS_RESOURCE.
    """
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


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
