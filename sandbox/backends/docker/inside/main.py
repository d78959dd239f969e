"""The first process of a container, which starts programs when asked, and reaps.

    main.py serve      for agents; see `server`
    main.py grade '{"argv": [...], "limits": {...}}'

The first line that it says is {"ready": [layers of the isolation that are missing]}. To
grade, it then leaves both streams to one program: requests to that one's stdin, and what it
writes to its descriptor 3 to stdout.

Nobody in the container can stop it, look into it, or send it a signal that it heeds.
"""

import errno
import json
import os
import signal
import socket
import sys

from sandbox import landlock, linux
from sandbox.backends.docker.inside import programs, server

_GET_NO_NEW_PRIVILEGES = 39


def missing() -> list[str]:
    """Layers of the isolation that are not there, by trying to do without them."""
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    lacks = []
    if os.getuid() == 0:
        lacks.append("a user without rights")
    if any(int(status[name], 16) for name in status if name.startswith("Cap")):
        lacks.append("dropped capabilities")
    if linux.prctl(_GET_NO_NEW_PRIVILEGES) != 1:
        lacks.append("no new privileges")
    if not _is_refused(lambda: linux.unshare(linux.NEW_USER)):
        lacks.append("filter of system calls")
    with open(
        "/proc/self/mountinfo"
    ) as file:  # where no flag of statvfs says so, in gVisor
        options = [words[5] for line in file if (words := line.split())[4] == "/"]
    if not all("ro" in of_mount.split(",") for of_mount in options):
        lacks.append("read-only root")
    if {name for _, name in socket.if_nameindex()} - {"lo"}:
        lacks.append("network without interfaces")
    return lacks


def _is_refused(call) -> bool:
    """Whether the filter refuses a call; whatever else does says something else."""
    try:
        call()
    except OSError as error:
        return error.errno == errno.ENOSYS
    return False


def grade(argv: list[str], limits: dict) -> None:
    """Gives the streams to a program, and ends when it does."""
    null = os.open(os.devnull, os.O_RDWR)
    pid = programs.start(argv, limits, [0, null, null, 1])
    os.dup2(null, 0)
    os.dup2(null, 1)
    while True:
        ended, status = os.wait()
        if ended == pid:
            os._exit(programs.exit_code(status))


def main() -> None:
    # A signal that has a handler would reach even this process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    linux.set_dumpable(False)
    if landlock.version():  # gVisor has none
        landlock.restrict(writable=("/workspace", "/tmp", "/dev"))
    os.environ.pop("HOSTNAME", None)
    server.say({"ready": missing()})
    if sys.argv[1] == "grade":
        grade(**json.loads(sys.argv[2]))
    server.Server().serve()
