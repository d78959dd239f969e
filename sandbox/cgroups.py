"""Control groups: bounds on what all processes of a sandbox use together.

A group is made in every hierarchy, of version 1 or 2, below the group that this process is
in, where it may. Where none can be made, limits on single processes are all there is.
"""

import contextlib
import dataclasses
import functools
import os
from pathlib import Path

from sandbox import linux

_PREFIX = "jaxpt-sandbox"
_USED = frozenset({"memory", "pids", "cpu", "cpuacct"})
_PERIOD = 100_000  # microseconds over which processor time is bounded


@dataclasses.dataclass(frozen=True)
class _Hierarchy:
    """A folder below which groups can be made, and which of _USED bind there."""

    folder: Path
    version: int
    controllers: frozenset[str]


@functools.cache
def hierarchies(proc: Path = Path("/proc/self")) -> tuple[_Hierarchy, ...]:
    """Those in which this process has a group and something can be bounded."""
    own: dict[str, str] = {}  # controller, or "" for version 2, to the group's path
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(","), path)
    found = []
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mounted = before.split()[3:5]
        kind, _, options = after.split()[:3]
        names = set(options.split(",")) if kind == "cgroup" else {""}
        if kind not in ("cgroup", "cgroup2") or not (here := names & set(own)):
            continue
        path = own[min(here)]
        if path != root and not path.startswith(root.rstrip("/") + "/"):
            continue  # the mount shows another part of the tree
        folder = Path(mounted + path[len(root.rstrip("/")) :])
        if kind == "cgroup2":
            with contextlib.suppress(OSError):
                names = set((folder / "cgroup.subtree_control").read_text().split())
        if bounded := _USED & names:
            found.append(_Hierarchy(folder, 1 + (kind == "cgroup2"), bounded))
    return tuple(found)


class Group:
    """A group of this process's, for others to enter.

    To move a process into a group takes the kernel milliseconds, so none is made for each
    sandbox: a process enters once, its children are born in it, and `allow` says anew what
    may be used on top of what is used now.
    """

    def __init__(self, name: str):
        self._folders: dict[str, tuple[str, int]] = {}
        made: list[Path] = []
        for hierarchy in hierarchies():
            folder = hierarchy.folder / f"{_PREFIX}-{os.getpid()}-{name}"
            try:
                folder.mkdir()
            except OSError:  # not ours to divide
                continue
            made.append(folder)
            for controller in hierarchy.controllers:
                self._folders[controller] = (str(folder), hierarchy.version)
        self._made = tuple(made)
        self._allowed: tuple | None = None
        self._open: dict[str, int] = {}  # files that are read again and again

    @property
    def controllers(self) -> frozenset[str]:
        """Which of `memory`, `pids` and `cpu` are bounded here."""
        return frozenset(self._folders) - {"cpuacct"}

    def doors(self) -> list[int]:
        """Descriptors for the caller to close; who writes "0" to each enters the group."""
        return [
            os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            for folder in self._made
        ]

    def allow(self, *, memory_bytes: int, processes: int, cpus: float) -> None:
        """Bounds what is used from now on, beside what is in use already.

        memory_bytes: of processes and of the files that they write into memory.
        processes: threads count as well.
        """
        allowed = (memory_bytes, processes, cpus)
        if allowed == self._allowed:
            # What a sandbox leaves behind in its group is small, and the bound as it was.
            self._forget_peak()
            return
        self._allowed = allowed
        if "memory" in self._folders:
            self._allow_memory(memory_bytes)
        if "pids" in self._folders:
            folder, _ = self._folders["pids"]
            used = self.processes()
            linux.write_file(f"{folder}/pids.max", str(used + processes))
        if "cpu" in self._folders:
            folder, version = self._folders["cpu"]
            quota = max(int(cpus * _PERIOD), 1000)
            if version == 2:
                linux.write_file(f"{folder}/cpu.max", f"{quota} {_PERIOD}")
            else:
                linux.write_file(f"{folder}/cpu.cfs_quota_us", str(quota))
        self._forget_peak()

    def _forget_peak(self) -> None:
        """Where that can be done, which is in version 1."""
        folder, version = self._folders.get("memory", (None, 0))
        if folder is not None and version == 1:
            linux.write_file(f"{folder}/memory.max_usage_in_bytes", "0")

    def _allow_memory(self, size: int) -> None:
        folder, version = self._folders["memory"]
        if version == 2:
            used = int(self._read(f"{folder}/memory.current"))
            linux.write_file(f"{folder}/memory.max", str(used + size))
            with contextlib.suppress(FileNotFoundError):  # there is no swap
                linux.write_file(f"{folder}/memory.swap.max", "0")
            return
        used = int(self._read(f"{folder}/memory.usage_in_bytes"))
        with_swap = f"{folder}/memory.memsw.limit_in_bytes"
        if os.path.exists(with_swap):  # it must never be the smaller of the two
            linux.write_file(with_swap, "-1")
        linux.write_file(f"{folder}/memory.limit_in_bytes", str(used + size))
        if os.path.exists(with_swap):
            linux.write_file(with_swap, str(used + size))

    def killed_for_memory(self) -> int:
        """How many processes the kernel has killed here for want of memory."""
        if "memory" not in self._folders:
            return 0
        folder, version = self._folders["memory"]
        name = "memory.oom_control" if version == 1 else "memory.events"
        counts = dict(line.split() for line in self._read(f"{folder}/{name}").splitlines())
        return int(counts["oom_kill"])

    def cpu_seconds(self) -> float:
        """Of processor time used here so far; 0 where none is counted."""
        if "cpuacct" in self._folders:
            folder, _ = self._folders["cpuacct"]
            return int(self._read(f"{folder}/cpuacct.usage")) * 1e-9
        folder, version = self._folders.get("cpu", (None, 0))
        if folder is None or version == 1:
            return 0.0
        lines = self._read(f"{folder}/cpu.stat").splitlines()
        return int(dict(line.split() for line in lines)["usage_usec"]) * 1e-6

    def processes(self) -> int:
        """That are alive here, threads as well; 0 where they are not counted."""
        if "pids" not in self._folders:
            return 0
        folder, _ = self._folders["pids"]
        return int(self._read(f"{folder}/pids.current"))

    def peak_memory_bytes(self) -> int:
        """The most that was used since `allow`; 0 where it is not counted.

        Version 2 counts from the group's beginning, before Linux 6.12.
        """
        if "memory" not in self._folders:
            return 0
        folder, version = self._folders["memory"]
        name = "memory.max_usage_in_bytes" if version == 1 else "memory.peak"
        try:
            return int(self._read(f"{folder}/{name}"))
        except FileNotFoundError:
            return 0

    def _read(self, path: str) -> str:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._open[path], 4096, 0).decode()

    def remove(self) -> bool:
        """Whether it is gone; it can't go before its last process."""
        for file in self._open.values():
            os.close(file)
        self._open.clear()
        self._folders.clear()
        return all([_remove(folder) for folder in self._made])


def remove_those_of_the_dead() -> bool:
    """Removes the groups that processes left which did not come to remove them.

    Whether none of them is left; the last processes in them may still be dying.
    """
    gone = True
    for hierarchy in hierarchies():
        for folder in hierarchy.folder.glob(f"{_PREFIX}-*"):
            pid = folder.name.removeprefix(f"{_PREFIX}-").partition("-")[0]
            if not linux.is_alive(pid):
                gone = _remove(folder) and gone
    return gone


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
