"""Outlives a pool that was killed, to remove what the kernel does not remove by itself.

    python -m sandbox.nanny FOLDER

It waits for the end of stdin, which comes with the pool's, however that was; then it
removes the control groups and containers of workers that are dead, and the folder.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from sandbox import cgroups

_WORKERS_DIE_SECONDS = 5.0


def start(folder: str) -> subprocess.Popen:
    """A nanny for this process; `close` its stdin to have it look after things and end."""
    return subprocess.Popen(
        [sys.executable, "-m", "sandbox.nanny", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        },
        start_new_session=True,  # what ends a whole terminal or job must not end it
    )


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    deadline = time.monotonic() + _WORKERS_DIE_SECONDS
    while True:
        cgroups.remove_those_of_the_dead()
        _remove_containers()
        if time.monotonic() > deadline or not cgroups.left_by_others():
            break
        time.sleep(0.1)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


def _remove_containers() -> None:
    with contextlib.suppress(ImportError):
        from sandbox.backends.docker import cleaning

        cleaning.remove_those_of_the_dead()


if __name__ == "__main__":
    main()
