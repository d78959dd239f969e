"""Outlives a pool that was killed, to remove what the kernel does not remove by itself.

    python -m sandbox.nanny FOLDER [containers]

It waits for the end of stdin, which comes with the pool's, however that was; then it
removes the control groups and containers of workers that are dead, and the folder.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sandbox import cgroups, linux

_DYING_SECONDS = 8.0  # for processes that were killed to be gone
_PREFIX = "jaxpt-snapshots-"


class Nanny:
    """Of this process: the other one that will clean up after it, and a folder.

    folder: of files that should not outlive this process.
    containers: whether Docker's may be left as well.
    """

    def __init__(self, *, containers: bool):
        self._containers = containers
        self.folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sandbox.nanny", self.folder),
                *(("containers",) if self._containers else ()),
            ],
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

    def check(self) -> None:
        """Starts another one, should it have been killed."""
        if self._process.poll() is not None:
            self.release()
            self._start()

    def release(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def close(self) -> None:
        """Has it clean up and end; does so itself if there is none."""
        self.release()
        if self._process.returncode != 0:
            clean(self.folder, containers=self._containers)


def clean(folder: str, *, containers: bool) -> None:
    """Removes what dead workers and dead pools left, and the folder."""
    deadline = time.monotonic() + _DYING_SECONDS
    while not cgroups.remove_those_of_the_dead() and time.monotonic() < deadline:
        time.sleep(0.05)
    if containers:
        _remove_containers()
    shutil.rmtree(folder, ignore_errors=True)
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = left.name.removeprefix(_PREFIX).partition("-")[0]
        if not linux.is_alive(pid):
            shutil.rmtree(left, ignore_errors=True)


def _remove_containers() -> None:
    # Here, as it takes longer to import than all the rest.
    from sandbox.backends.backend import SandboxFailed, SandboxUnavailable
    from sandbox.backends.docker.engine import Engine

    with contextlib.suppress(SandboxFailed, SandboxUnavailable):
        engine = Engine("runc")
        engine.remove_those_of_the_dead()
        engine.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    # Workers end with their pool, but it takes them a moment.
    for _ in range(2):
        clean(sys.argv[1], containers="containers" in sys.argv[2:])
        time.sleep(0.2)


if __name__ == "__main__":
    main()
