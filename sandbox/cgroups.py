"""Control groups: bounds on what all processes of a sandbox use together.

A group is made in every hierarchy, of version 1 or 2, below the group that this process is
in, where it may. Where none can be made, limits on single processes are all there is.
"""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "jaxpt-sandbox"
_USED = frozenset({"memory", "pids"})
_REMOVAL_SECONDS = 2.0  # for the kernel to bury what was killed


@dataclasses.dataclass(frozen=True)
class _Hierarchy:
    """A folder below which groups can be made, and which of _USED bind there."""

    folder: Path
    version: int
    controllers: frozenset[str]


@functools.cache
def hierarchies(proc: Path = Path("/proc/self")) -> tuple[_Hierarchy, ...]:
    """Those in which this process has a group and memory or processes can be bounded."""
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
    """A group for one sandbox; a context manager that removes it once it is empty.

    number: tells apart the groups of this process.
    memory_bytes: of all its processes and of the files that they write into memory.
    processes: counted with threads.

    `bounded` says which of "memory" and "pids" are bound here.
    """

    def __init__(self, number: int, *, memory_bytes: int, processes: int):
        self._folders: dict[str, tuple[Path, int]] = {}
        self._all: list[Path] = []
        name = f"{_PREFIX}-{os.getpid()}-{number}"
        for hierarchy in hierarchies():
            folder = hierarchy.folder / name
            try:
                folder.mkdir()
            except OSError:
                continue  # not ours to divide
            self._all.append(folder)
            for controller in hierarchy.controllers:
                self._folders[controller] = (folder, hierarchy.version)
        try:
            if "memory" in self._folders:
                self._bound_memory(memory_bytes)
            if "pids" in self._folders:
                (self._folders["pids"][0] / "pids.max").write_text(str(processes))
        except BaseException:
            self.close()
            raise

    def _bound_memory(self, size: int) -> None:
        folder, version = self._folders["memory"]
        names = {
            1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
            2: ("memory.max", "memory.swap.max"),
        }[version]
        (folder / names[0]).write_text(str(size))
        with_swap = folder / names[1]
        if with_swap.exists():  # version 1 bounds both together, 2 the swap alone
            with_swap.write_text(str(size if version == 1 else 0))

    @property
    def bounded(self) -> frozenset[str]:
        return frozenset(self._folders)

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    @contextlib.contextmanager
    def doors(self) -> Iterator[list[int]]:
        """Descriptors by which a process enters, whoever it is: it writes b"0" to each."""
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(open(folder / "cgroup.procs", "wb")).fileno()
                for folder in self._all
            ]

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed one of its processes for want of memory."""
        if "memory" not in self._folders:
            return False
        folder, version = self._folders["memory"]
        name = "memory.oom_control" if version == 1 else "memory.events"
        for line in (folder / name).read_text().splitlines():
            key, _, count = line.partition(" ")
            if key == "oom_kill":
                return int(count) > 0
        return False

    def close(self) -> None:
        for folder in self._all:
            _remove(folder)
        self._all = []


def remove_those_of_the_dead() -> None:
    """Removes the groups that processes left which did not come to close them."""
    for hierarchy in hierarchies():
        for folder in hierarchy.folder.glob(f"{_PREFIX}-*"):
            pid = folder.name.split("-")[2]
            if not Path("/proc", pid).exists():
                _remove(folder)


def _remove(folder: Path) -> None:
    """Waits for the group's last processes, which are dying, and removes it."""
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return  # someone else's turn: it is found again by its name
            time.sleep(0.002)
        else:
            return
