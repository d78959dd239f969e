"""What a worker asks of a backend, whatever makes its sandboxes.

    sandbox = await backend.open(limits)
    await sandbox.write_files({"main.py": b"..."})
    ran = await sandbox.run(("python", "main.py"), limits=limits)
    await sandbox.stop()
    left = sandbox.read_files(("out",), max_bytes=1 << 20)
    await sandbox.close()

Everything is safe to cancel, and leaves nothing behind that `close` does not end.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sandbox.protocol import Limits, Ran


class SandboxUnavailable(RuntimeError):
    """This machine can't isolate; the message says what is missing and what to do."""


class SandboxFailed(RuntimeError):
    """A sandbox did not come up or could not be ended: not the doing of what ran in it."""


class SandboxDied(SandboxFailed):
    """A sandbox's first process ended while something ran in it; found on the next call.

    reason: `out_of_memory` if it was killed for that, else `sandbox_died`.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(detail or reason)
        self.reason = reason


class GraderChannel(Protocol):
    """A grading program at work in a sandbox of its own."""

    @property
    def requests(self) -> int: ...  # a descriptor to write lines to
    @property
    def verdicts(self) -> int: ...  # a descriptor to read lines from
    async def close(self) -> None: ...


class Sandbox(Protocol):
    """A workspace, and the processes that share it; calls come one after the other."""

    async def run(
        self, command: Sequence[str], *, limits: Limits, stdin: bytes = b""
    ) -> Ran:
        """Runs a command to its end, beside the shell and its children."""
        ...

    async def exec(self, script: str, *, limits: Limits) -> Ran:
        """Runs a script in the sandbox's persistent shell.

        At `limits.wall_seconds` everything but the shell is killed, and the shell too if it
        is stuck. What a script leaves running in the background lives on after it.
        """
        ...

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Raises OSError (ENOSPC for a full workspace); folders are made as needed."""
        ...

    async def read_files(
        self, paths: Sequence[str], *, max_bytes: int
    ) -> dict[str, bytes | str]:
        """Of each path its bytes, or the reason why there are none; follows no links."""
        ...

    async def snapshot(self, *, keep_processes: bool) -> Any:
        """The workspace as it is, to open sandboxes from; nothing can change it.

        keep_processes: they are frozen while files are copied. Otherwise they are killed,
        nothing is copied, and the next `exec` has a new shell in the old one's folder with
        its exported variables.
        """
        ...

    async def stop(self) -> None:
        """Kills every process; the workspace stays. They are dead on return."""
        ...

    async def close(self) -> None:
        """Stops, and lets go of the workspace."""
        ...


class Backend(Protocol):
    """Makes sandboxes; one for a worker process."""

    async def open(
        self, limits: Limits, *, snapshot: Any = None, image: str = ""
    ) -> Sandbox:
        """A sandbox with an empty workspace, or with a snapshot's.

        Raises SandboxFailed.
        """
        ...

    async def start_grader(self, program: str, limits: Limits) -> GraderChannel: ...

    async def pack(self, snapshot: Any) -> bytes:
        """A snapshot as a tar archive, which `unpack` takes on any machine."""
        ...

    async def unpack(self, archive: bytes, limits: Limits) -> Any: ...

    async def close(self) -> None: ...
