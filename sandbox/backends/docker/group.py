"""The control groups that the engine made for a container: what is used there."""

import os
from pathlib import Path

_NEEDED = frozenset({"memory", "pids", "cpu"})
_USED = _NEEDED | {"cpuacct"}


class ContainerGroup:
    """The groups of a process, of version 1 or 2; they are the engine's to remove.

    All of it raises OSError once they are gone, which is soon after the container's end.
    """

    def __init__(self, pid: int):
        self._folders: dict[str, tuple[Path, int]] = {}  # by controller; and the version
        paths: dict[str, str] = {}  # controller, or "" for version 2, to the group's path
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            paths |= dict.fromkeys(names.split(","), path)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            root, mounted = before.split()[3:5]
            kind, _, options = after.split()[:3]
            if kind == "cgroup":
                for name in _USED & set(options.split(",")) & set(paths):
                    self._folders[name] = (_below(mounted, root, paths[name]), 1)
            elif kind == "cgroup2" and "" in paths:
                folder = _below(mounted, root, paths[""])
                for name in _USED & _controllers(folder):
                    self._folders.setdefault(name, (folder, 2))
        if lacking := _NEEDED - set(self._folders):
            raise FileNotFoundError(
                f"Of a container's control groups, {sorted(lacking)} are not in sight: "
                "start the worker outside of any container."
            )

    def bound_processes(self, number: int) -> None:
        """From now on there may be this many, beside those that there are."""
        folder, _ = self._folders["pids"]
        (folder / "pids.max").write_text(str(self.processes() + number))

    def processes(self) -> int:
        """That are alive, threads as well."""
        return int(self._read("pids", "pids.current", "pids.current"))

    def killed_for_memory(self) -> int:
        """How many processes the kernel has killed for want of memory."""
        text = self._read("memory", "memory.oom_control", "memory.events")
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    def cpu_seconds(self) -> float:
        """Of processor time used so far."""
        if "cpuacct" in self._folders:
            return int(self._read("cpuacct", "cpuacct.usage", "")) * 1e-9
        lines = self._read("cpu", "cpu.stat", "cpu.stat").splitlines()
        return int(dict(line.split() for line in lines).get("usage_usec", 0)) * 1e-6

    def peak_memory_bytes(self) -> int:
        """The most that was used since the container began; 0 before Linux 5.19."""
        try:
            return int(self._read("memory", "memory.max_usage_in_bytes", "memory.peak"))
        except FileNotFoundError:
            return 0

    def _read(self, controller: str, first: str, second: str) -> str:
        """A file of a controller, by its names in versions 1 and 2."""
        folder, version = self._folders[controller]
        return (folder / (first if version == 1 else second)).read_text()


def _below(mounted: str, root: str, path: str) -> Path:
    return Path(mounted, os.path.relpath(path, root))


def _controllers(folder: Path) -> set[str]:
    try:
        return set((folder / "cgroup.controllers").read_text().split())
    except OSError:
        return set()
