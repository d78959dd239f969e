"""Control groups: bounds on what all processes of a sandbox use together.

A group is made in every hierarchy, of version 1 or 2, below the group that this process is
in, where it may. Where none can be made, limits on single processes are all there is.
"""

import contextlib
import dataclasses
import functools
import os
import time
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
    """This process's own group, in which all its children are born.

    To move a process into a group takes the kernel milliseconds, so none is made for each
    sandbox: `allow` says anew what may be used on top of what is used now. It stays when
    this process ends, for another to remove.
    """

    def __init__(self):
        self._folders: dict[str, tuple[Path, int]] = {}
        for hierarchy in hierarchies():
            folder = hierarchy.folder / f"{_PREFIX}-{os.getpid()}"
            try:
                folder.mkdir()
                (folder / "cgroup.procs").write_text("0")
            except OSError:  # not ours to divide
                with contextlib.suppress(OSError):
                    folder.rmdir()
                continue
            for controller in hierarchy.controllers:
                self._folders[controller] = (folder, hierarchy.version)

    def allow(self, *, memory_bytes: int, processes: int) -> None:
        """Bounds what is used from now on, beside what is in use already.

        memory_bytes: of processes and of the files that they write into memory.
        processes: threads count as well.
        """
        if "memory" in self._folders:
            self._allow_memory(memory_bytes)
        if "pids" in self._folders:
            folder, _ = self._folders["pids"]
            used = int((folder / "pids.current").read_text())
            (folder / "pids.max").write_text(str(used + processes))

    def _allow_memory(self, size: int) -> None:
        folder, version = self._folders["memory"]
        if version == 2:
            used = int((folder / "memory.current").read_text())
            (folder / "memory.max").write_text(str(used + size))
            with contextlib.suppress(FileNotFoundError):  # there is no swap
                (folder / "memory.swap.max").write_text("0")
            return
        used = int((folder / "memory.usage_in_bytes").read_text())
        with_swap = folder / "memory.memsw.limit_in_bytes"
        if with_swap.exists():  # it must never be the smaller of the two
            with_swap.write_text("-1")
        (folder / "memory.limit_in_bytes").write_text(str(used + size))
        if with_swap.exists():
            with_swap.write_text(str(used + size))

    def killed_for_memory(self) -> int:
        """How many processes the kernel has killed here for want of memory."""
        if "memory" not in self._folders:
            return 0
        folder, version = self._folders["memory"]
        name = "memory.oom_control" if version == 1 else "memory.events"
        counts = dict(line.split() for line in (folder / name).read_text().splitlines())
        return int(counts["oom_kill"])


def remove_those_of_the_dead() -> None:
    """Removes the groups that processes left which did not come to close them."""
    for hierarchy in hierarchies():
        for folder in hierarchy.folder.glob(f"{_PREFIX}-*"):
            pid = folder.name.removeprefix(f"{_PREFIX}-")
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
