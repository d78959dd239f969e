"""What the processes of a pool use, by kind: read from /proc, with no help of theirs.

A worker's descendants are told apart by how deep they are below it, as the local backend
starts them: worker, the process that ties the zygote to it, zygote, slots, inits, and what
runs in a sandbox.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

KINDS = ("worker", "tie", "zygote", "slot", "init", "program")
_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Process:
    """own_ms: of processor time; waited_ms: that of its children which it has buried."""

    pid: int
    parent: int
    own_ms: float
    waited_ms: float


def processes() -> dict[int, Process]:
    """All of the machine, by process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, which may hold anything, ends with the last bracket.
            words = path.read_text().rpartition(")")[2].split()
            own, waited = (sum(map(int, words[i : i + 2])) for i in (11, 13))
            pid = int(path.parent.name)
            found[pid] = Process(pid, int(words[1]), own * _TICK_MS, waited * _TICK_MS)
    return found


def by_kind(pool: int, workers: Sequence[int]) -> dict[str, list[Process]]:
    """The processes of a pool; `pool` is the process that owns it."""
    everyone = processes()
    children: dict[int, list[int]] = {}
    for process in everyone.values():
        children.setdefault(process.parent, []).append(process.pid)
    kinds = {"pool": [pool], "nanny": _nannies(children.get(pool, ()))}
    level = [pid for pid in workers if pid in everyone]
    for kind in KINDS:
        kinds[kind] = level
        level = [child for pid in level for child in children.get(pid, ())]
    while level:
        kinds[KINDS[-1]] += level
        level = [child for pid in level for child in children.get(pid, ())]
    return {
        kind: [everyone[pid] for pid in pids if pid in everyone]
        for kind, pids in kinds.items()
    }


def _nannies(pids: Iterable[int]) -> list[int]:
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if b"sandbox.nanny" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def cpu_ms(kinds: dict[str, list[Process]]) -> dict[str, float]:
    """Processor time so far; that of inits and programs comes once they are gone."""
    used = {
        kind: sum(process.own_ms for process in kinds[kind])
        for kind in ("pool", "worker", "tie", "zygote", "slot")
    }
    used["init and program"] = sum(process.waited_ms for process in kinds["slot"])
    return used


def memory_mb(kinds: dict[str, list[Process]]) -> dict[str, float]:
    """Proportional set size by kind, in MiB: a page that n processes share counts 1/n."""
    return {
        kind: sum(_pss_kb(process.pid) for process in members) / 1024
        for kind, members in kinds.items()
    }


def _pss_kb(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def resident_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / (1 << 20)
    return 0.0


def available_mb() -> float:
    """Memory of the machine that can still be had, in MiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable.")


def descriptors(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def mounts(pid: int) -> int:
    """In the mount namespace of a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/mountinfo").read_text().count("\n")
    return 0
