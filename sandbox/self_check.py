"""Proves that sandboxes isolate here, by a job that looks for each layer."""

import os

from sandbox.protocol import Execution, Grading, Job, Limits, Result

_REMEDY = (
    "Allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "user.max_user_namespaces > 0; in a container, also its seccomp profile), or use "
    "the Docker backend once it is there."
)
_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
_PROCESSES = 4

# `outside` are the namespaces of the process that owns the pool.
_LOOK = """
import os, resource

def missing(outside):
    return [
        f"{name} namespace" for name, there in outside.items()
        if os.readlink(f"/proc/self/ns/{name}") == there
    ]
"""

_PROGRAM = (
    _LOOK
    + """
import ast, ctypes, socket

lacks = missing(ast.literal_eval(open("outside").read()))
if [name for _, name in socket.if_nameindex()] != ["lo"]:
    lacks.append("network without interfaces")
if os.access("/usr", os.W_OK) or os.path.exists("/etc/shadow"):
    lacks.append("read-only root")
libc = ctypes.CDLL(None)
if libc.unshare(0x10000000) == 0:
    lacks.append("ban on further user namespaces")
if libc.ptrace(0, 0, 0, 0) == 0:  # a process may always ask to be traced by its parent
    lacks.append("filter of system calls")
children = 0
try:
    while children < 100:
        if os.fork() == 0:
            os.kill(os.getpid(), 19)  # stays, and counts
            os._exit(0)
        children += 1
except OSError:
    pass
if children == 100:
    lacks.append("limit on processes")
for which in ("AS", "FSIZE", "CPU", "NOFILE"):
    if resource.getrlimit(getattr(resource, "RLIMIT_" + which))[1] < 0:
        lacks.append(f"limit RLIMIT_{which}")
with open("lacks", "w") as file:
    file.write(", ".join(lacks))
"""
)

_GRADER = (
    _LOOK
    + """
def grade(artifacts, payload):
    lacks = artifacts["lacks"].decode()
    here = ", ".join(f"{name} of the grader" for name in missing(payload))
    return {"components": {}, "why": ", ".join(text for text in (lacks, here) if text)}
"""
)


def job() -> Job:
    outside = {name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES}
    return Job(
        job_id="self-check",
        domain="self-check",
        execution=Execution(
            command=("python", "-I", "-S", "check.py"),
            files={"check.py": _PROGRAM.encode(), "outside": repr(outside).encode()},
            artifacts=("lacks",),
            limits=Limits(processes=_PROCESSES, wall_seconds=30),
        ),
        grading=Grading(program=_GRADER, payload=outside, limits=Limits(wall_seconds=30)),
    )


def missing(result: Result) -> str | None:
    """What the job found to be missing and what to do, in a line; None if nothing."""
    if result.verdict is None:
        said = " ".join(result.stderr.text().split()) or "no details"
        return f"No sandbox could be made here ({result.reason}: {said}) {_REMEDY}"
    if result.verdict["why"]:
        return f"Sandboxes here lack: {result.verdict['why']}. {_REMEDY}"
    return None
