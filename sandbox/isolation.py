"""The layers that isolate a sandbox, and programs that try to break each of them.

Nothing here reads a version or a setting: a layer is enforced if what it forbids failed
when it was tried, from inside of a sandbox that the pool made like any other.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from sandbox.protocol import Execution, Grading, Job, Limits, Result

_KINDS = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
_NAMESPACES = (
    "sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=15000; in a "
    "container, run it with a seccomp profile that allows clone and unshare; for Docker, "
    "userns-remap in its daemon.json"
)
_KERNEL = "a Linux kernel from 5.13 with this feature compiled in"
_FOLDERS = ("/", "/boot", "/dev", "/etc", "/home", "/opt", "/root", "/run", "/srv", "/tmp")
_FOLDERS += ("/dev/shm", "/sys", "/var", str(Path(__file__).parent))
_USERS = "run the worker as root, which has users to give away"
_CONTROL_GROUPS = (
    "run the worker where it may make control groups: as root, or in a delegated group "
    "(systemd-run --user --scope -p Delegate=yes ...)"
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """name: for waivers. what: it keeps a program from. remedy: brings it back."""

    name: str
    what: str
    remedy: str


LAYERS = (
    *(
        Layer(f"namespace.{kind}", f"sharing the machine's {kind} namespace", _NAMESPACES)
        for kind in _KINDS
    ),
    Layer("network", "reaching anything but its own loopback", _NAMESPACES),
    Layer(
        "root", "writing outside its folders, or seeing the machine's files", _NAMESPACES
    ),
    Layer(
        "proc", "seeing or changing processes and settings that are not its own", _KERNEL
    ),
    Layer("capabilities", "any privilege of root", _NAMESPACES),
    Layer("no_new_privileges", "gaining privileges by programs that have them", _KERNEL),
    Layer("further_namespaces", "making namespaces, in which it would be root", _KERNEL),
    Layer("seccomp", "tracing, kernel keys, bpf, io_uring and the like", _KERNEL),
    Layer("landlock", "making device files, which an overlay takes for erasures", _KERNEL),
    Layer("limits", "memory, files, time and descriptors without end", _KERNEL),
    Layer("processes", "processes without number", _KERNEL),
    Layer("quota", "filling memory with files", _KERNEL),
    Layer("environment", "seeing the worker's variables and descriptors", _KERNEL),
    Layer("grader.namespaces", "sharing namespaces with its grader", _NAMESPACES),
    Layer("grader.user", "having its grader's user, or the worker's", _USERS),
    Layer("group.memory", "memory without end by many processes together", _CONTROL_GROUPS),
    Layer("group.cpu", "more processor time than its limit, by many", _CONTROL_GROUPS),
    Layer("death", "leaving processes behind", _NAMESPACES),
)
_BY_NAME = {layer.name: layer for layer in LAYERS}

_GRADER = """
import json, os

def shared(others):
    return [
        f"namespace.{name}" for name, there in others.items()
        if os.readlink(f"/proc/self/ns/{name}") == there
    ]

def grade(artifacts, payload):
    found = json.loads(artifacts["found"])
    agents = found["namespaces"] if payload["beside"] else {}
    if same := shared(payload["namespaces"]) + shared(agents):
        found["broken"]["grader.namespaces"] = same
    with open("/proc/self/uid_map") as file:
        inside, outside, _ = map(int, file.readline().split())
    owner = outside + os.getuid() - inside
    if owner == found["owner"]:
        found["broken"]["grader.user"] = ["it is the agent's"]
    if owner == payload["owner"]:
        found["broken"]["grader.user"] = ["it is the worker's"]
    return {"components": {}, "why": json.dumps(found["broken"])}
"""
_MEMORY_BYTES, _WORKSPACE_BYTES = 128 << 20, 16 << 20


# Six processes that have less than their limit each, and together three times as much.
_HOG = """
import mmap, os
size = 24 << 20
for _ in range(6):
    if os.fork() == 0:
        region = mmap.mmap(-1, size)
        for place in range(0, size, 4096):
            region[place] = 1
        os.kill(os.getpid(), 19)
        os._exit(0)
stopped = 0
for _ in range(6):
    _, status = os.waitpid(-1, os.WUNTRACED)
    stopped += os.WIFSTOPPED(status)
raise SystemExit(int(stopped < 6))
"""
_BUSY = """
import time
end = time.monotonic() + 0.4
while time.monotonic() < end: pass
"""
_BUSY_SECONDS, _BUSY_CPUS = 0.4, 0.1


def _small(name: str, program: str, **limits) -> Job:
    return Job(
        job_id=f"isolation/{name}",
        domain="isolation",
        execution=Execution(
            command=("python", "-I", "-S", "main.py"),
            files={"main.py": program.encode()},
            limits=Limits(wall_seconds=60, **limits),
        ),
        grading=Grading(
            program="def grade(artifacts, payload): return {'components': {}, 'why': ''}",
            payload=None,
            limits=Limits(wall_seconds=30),
        ),
    )


def jobs(attempt: int = 0) -> tuple[Job, ...]:
    """They try every layer, in less than a second; part of every pool's start."""
    return (
        breaker(f"isolation/breaker/{attempt}"),
        _small(
            f"memory/{attempt}",
            _HOG,
            memory_bytes=48 << 20,
            workspace_bytes=1 << 20,
            processes=10,
        ),
        _small(f"cpu/{attempt}", _BUSY, cpus=_BUSY_CPUS, cpu_seconds=10),
    )


def breaker(job_id: str, *, beside: bool = False) -> Job:
    """Tries every layer that takes no time to break.

    beside: the grader of an earlier one is still there, and shares no namespace either.
    Otherwise that can't be told: the kernel gives numbers of namespaces that are gone to
    new ones.
    """
    outside = {name: os.readlink(f"/proc/self/ns/{name}") for name in _KINDS}
    known = {
        "namespaces": outside,
        "folders": {path: _number(path) for path in _FOLDERS if os.path.exists(path)},
        "memory_bytes": _MEMORY_BYTES,
        "workspace_bytes": _WORKSPACE_BYTES,
    }
    program = (Path(__file__).parent / "breaker_main.py").read_bytes()
    return Job(
        job_id=job_id,
        domain="isolation",
        execution=Execution(
            command=("python", "-I", "-S", "breaker_main.py"),
            files={"breaker_main.py": program, "known": json.dumps(known).encode()},
            artifacts=("found",),
            limits=Limits(
                processes=6,
                wall_seconds=60,
                cpu_seconds=20,
                memory_bytes=_MEMORY_BYTES,
                workspace_bytes=_WORKSPACE_BYTES,
            ),
        ),
        grading=Grading(
            program=_GRADER,
            payload={"namespaces": outside, "owner": os.getuid(), "beside": beside},
            limits=Limits(wall_seconds=30),
        ),
    )


def _number(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


@dataclasses.dataclass(frozen=True)
class Finding:
    """A layer that was broken, and how."""

    layer: Layer
    how: str


class CannotIsolate(RuntimeError):
    """No sandbox came up at all; the message says what is known."""


def findings(results: Sequence[Result]) -> list[Finding]:
    """What the results of `jobs` say was broken. Raises CannotIsolate."""
    result, memory, busy = results
    if result.verdict is None:
        said = " ".join(result.stderr.text().split()) or "no details"
        remedy = f" To mend it: {_NAMESPACES}; or use the docker backend."
        if result.reason in ("broker_unreachable", "no_workers"):
            remedy = ""
        what = f"({result.reason}: {said[-1500:]})"
        raise CannotIsolate(f"No sandbox could be made here {what}.{remedy}")
    broken = json.loads(result.verdict["why"])
    if memory.outcome == "ok":
        broken["group.memory"] = ["six processes had 24 MiB each, of 48 MiB allowed"]
    allowed = 2.5 * _BUSY_SECONDS * _BUSY_CPUS
    if busy.outcome != "ok" or busy.usage.cpu_seconds > allowed:
        used = f"{busy.usage.cpu_seconds:.2f} s of a processor in {_BUSY_SECONDS} s"
        broken["group.cpu"] = [f"{used}, of {_BUSY_CPUS} of one allowed ({busy.reason})"]
    return [Finding(_BY_NAME[name], ", ".join(how)) for name, how in broken.items()]


def check_waivers(waived: tuple[str, ...]) -> None:
    """Raises ValueError for a name that is no layer's."""
    if unknown := sorted(set(waived) - set(_BY_NAME)):
        raise ValueError(f"waive names {unknown}; the layers are {sorted(_BY_NAME)}.")


def complaint(found: list[Finding], waived: tuple[str, ...]) -> str | None:
    """What is missing and not waived, and what to do about it; None if nothing is."""
    missing = [finding for finding in found if finding.layer.name not in waived]
    if not missing:
        return None
    lines = [
        f"{finding.layer.name} ({finding.how}; to mend it: {finding.layer.remedy})"
        for finding in missing
    ]
    names = ", ".join(repr(finding.layer.name) for finding in missing)
    return (
        f"Sandboxes here lack: {'; '.join(lines)}. To run all the same, waive them by "
        f"name: Pool(waive=({names},)). `python -m sandbox.doctor` says more."
    )
