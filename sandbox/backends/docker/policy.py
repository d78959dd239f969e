"""What a container may do, in the form that Docker takes."""

import dataclasses
import functools
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandbox import seccomp
from sandbox.protocol import Limits

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
TMP_BYTES = 16 << 20  # of /tmp, and of /dev/shm
_INSIDE = "/jaxpt"
# runc has threads of its own in the container until it has become the first process.
_STARTING_PROCESSES = 32
_GPU_USE = ["gpu", "compute", "utility", "graphics"]  # what of a driver is shown
_PERIOD = 100_000  # microseconds over which processor time is bounded
# Docker's own list, which a list of ours replaces, and beyond it all of /sys: what is shown
# there is the machine's.
_MASKED = [
    *(f"/proc/{name}" for name in ("acpi", "asound", "interrupts", "kcore", "keys")),
    *(f"/proc/{name}" for name in ("latency_stats", "sched_debug", "scsi")),
    *(f"/proc/{name}" for name in ("timer_list", "timer_stats")),
    "/sys",
]
# Calls that send signals, or lead to that, by the number of the argument that says to whom.
_SIGNALS = {
    "kill": 0,
    "pidfd_open": 0,
    "rt_sigqueueinfo": 0,
    "rt_tgsigqueueinfo": 0,
    "tgkill": 0,
    "tkill": 0,
}
_USERS = {
    "passwd": "root:x:0:0::/:/bin/sh\nsandbox:x:{uid}:{uid}:sandbox:/workspace:/bin/bash\n",
    "group": "root:x:0:\nsandbox:x:{uid}:\n",
}
# A number of 32 bits, whatever is above those, that is not 1: its lowest bit is 0, or any
# other is 1.
_ANY_BUT_ONE = [(1, 0), *((1 << bit, 1 << bit) for bit in range(1, 32))]
_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """What makes containers.

    own_bytes, own_processes: that its own parts may use in one, beside those of programs.
    guards_first: whether its kernel keeps a container's first process from signals.
    has_own_users: whether a user's processes are counted for each container, and not for
    all on the machine, so that RLIMIT_NPROC bounds one container.
    gives_gpus: whether programs in its containers can use the machine's.
    """

    name: str
    own_bytes: int
    own_processes: int = 0
    guards_first: bool = True
    has_own_users: bool = False
    gives_gpus: bool = True


RUNTIMES = {
    "runc": Runtime(name="runc", own_bytes=16 << 20),
    # The machine sees the threads of gVisor's kernel, some to each program.
    "runsc": Runtime(
        name="runsc",
        own_bytes=64 << 20,
        own_processes=2000,
        guards_first=False,
        has_own_users=True,
        gives_gpus=False,  # of 2022
    ),
}


# The first process gives these up for all others by using them.
_TO_CONFINE_ITSELF = (
    "landlock_add_rule",
    "landlock_create_ruleset",
    "landlock_restrict_self",
)


@functools.cache
def seccomp_profile(runtime: Runtime) -> str:
    """The filter of `sandbox.seccomp` in Docker's form."""

    def allow(*names: str, **condition: Any) -> dict[str, Any]:
        rule: dict[str, Any] = {"names": list(names), "action": "SCMP_ACT_ALLOW"}
        return rule | ({"args": [condition]} if condition else {})

    signals = {} if runtime.guards_first else _SIGNALS
    in_part = {"clone", "socket", *seccomp.ABOUT_ITSELF, *signals}
    freely = sorted({*seccomp.ALLOWED, *_TO_CONFINE_ITSELF} - in_part)
    namespaces = seccomp.NEW_NAMESPACES
    rules = [
        allow(*freely),
        allow("clone", index=0, value=namespaces, valueTwo=0, op="SCMP_CMP_MASKED_EQ"),
        *(
            allow("socket", index=0, value=int(family), op="SCMP_CMP_EQ")
            for family in seccomp.FAMILIES
        ),
        *(
            allow(name, index=number, value=0, op="SCMP_CMP_EQ")
            for name, number in seccomp.ABOUT_ITSELF.items()
        ),
        *(
            allow(name, index=number, value=mask, valueTwo=bits, op="SCMP_CMP_MASKED_EQ")
            for name, number in signals.items()
            for mask, bits in _ANY_BUT_ONE
        ),
    ]
    return json.dumps(
        {
            # What a tracer should be asked fails with ENOSYS if there is none, and to trace
            # is among what is refused. Said outright, engines of 2022 make it an EPERM,
            # for which no library takes its other way.
            "defaultAction": "SCMP_ACT_TRACE",
            "architectures": [_ARCHITECTURES[platform.machine()]],
            "syscalls": rules,
        }
    )


def container(
    api: Any,
    limits: Limits,
    runtime: Runtime,
    *,
    image: str,
    arguments: Sequence[str],
    uid: int,
    workspace: str,
    read_only: bool,
    inside: str,
    users: str,
    gpus: Sequence[str] = (),
) -> dict[str, Any]:
    """Arguments for the creation of a container.

    arguments: of `inside.main`. workspace, inside, users: folders of this machine, the
    latter by `copy_inside` and `write_users`. gpus: as Docker names them.
    """
    from docker.types import DeviceRequest, LogConfig, Mount, Ulimit

    def bind(source: str, target: str, *, read_only: bool = True) -> Mount:
        return Mount(target, source, type="bind", read_only=read_only)

    files = limits.workspace_bytes + 2 * TMP_BYTES
    size = limits.memory_bytes + files + runtime.own_bytes
    ulimits = {"core": 0, "nofile": 256, "fsize": limits.file_bytes}
    if runtime.has_own_users:
        ulimits["nproc"] = limits.processes + 1  # with the first
    host_config = api.create_host_config(
        runtime=runtime.name,
        network_mode="none",
        ipc_mode="private",
        cgroupns="private",
        userns_mode="host",  # or the workspace would be of a user that does not exist
        read_only=True,
        cap_drop=["ALL"],
        oom_score_adj=500,  # it goes before the machine's others
        security_opt=["no-new-privileges", f"seccomp={seccomp_profile(runtime)}"],
        pids_limit=most_processes(limits, runtime) + _STARTING_PROCESSES,
        mem_limit=size,
        memswap_limit=size,
        cpu_period=_PERIOD,
        cpu_quota=max(int(limits.cpus * _PERIOD), 1000),
        ulimits=[Ulimit(name=key, soft=n, hard=n) for key, n in ulimits.items()],
        shm_size=TMP_BYTES,
        tmpfs={"/tmp": f"size={TMP_BYTES},mode=1777,exec,nosuid,nodev"},
        mounts=[
            bind(workspace, "/workspace", read_only=read_only),
            bind(inside, _INSIDE),
            *(bind(f"{users}/{name}", f"/etc/{name}") for name in _USERS),
        ],
        device_requests=[DeviceRequest(device_ids=list(gpus), capabilities=[_GPU_USE])]
        if gpus
        else None,
        # What the first process says is for the worker, and on no disk.
        log_config=LogConfig(type=LogConfig.types.NONE, config={}),
    )
    host_config["MaskedPaths"] = _MASKED
    start = f"import sys; sys.path.insert(0, {_INSIDE!r})\n"
    start += "from sandbox.backends.docker.inside import main; main.main()"
    return {
        "image": image,
        "entrypoint": ["/usr/bin/python3", "-I", "-S", "-c", start],
        "command": list(arguments),
        "user": f"{uid}:{uid}",
        "environment": ENVIRONMENT,
        "working_dir": "/workspace",
        "hostname": "sandbox",
        "network_disabled": True,
        "stdin_open": True,
        "host_config": host_config,
    }


def most_processes(limits: Limits, runtime: Runtime) -> int:
    """Of programs, once a container has come up; it is created with room for its start."""
    return limits.processes + runtime.own_processes


def copy_inside(package: Path, folder: Path) -> None:
    """Copies what a container gets of this package, readable whatever the files' modes."""
    sources = [package / "landlock.py", package / "linux.py"]
    sources += sorted((package / "backends" / "docker" / "inside").glob("*.py"))
    for source in sources:
        target = folder / "sandbox" / source.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    _make_readable(folder)


def write_users(folder: Path, uid: int) -> None:
    """Files for /etc in which `uid` is the user `sandbox`, beside root."""
    folder.mkdir()
    for name, form in _USERS.items():
        (folder / name).write_text(form.format(uid=uid))
    _make_readable(folder)


def _make_readable(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
