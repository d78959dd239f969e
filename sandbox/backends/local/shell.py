"""A shell that stays: scripts go in, and each comes back with its exit code.

Bash reads scripts from descriptor 3 and says on descriptor 4 what came of each, so that
nothing a script prints can be taken for its end.
"""

import asyncio
import contextlib
import dataclasses
import os

from sandbox.backends.local.box import Box, Exit, Reader, pipe
from sandbox.protocol import Limits

# Scripts end with NUL, which bash can't hold in a variable. The second read is of a place
# for the state: what a new shell needs to go on where this one is.
LOOP = r"""
cd -- "$1" 2>/dev/null || cd /workspace
eval "$2"
while IFS= read -r -d '' -u 3 REPLY; do
    eval "$REPLY" </dev/null 3<&- 4>&-
    printf '%s\0' "$?" >&4
done
"""
TELL_STATE = "pwd && export -p"  # prints a `State`, its folder in the first line


@dataclasses.dataclass(frozen=True)
class State:
    """What a new shell takes over from an old one: its folder and exported variables."""

    folder: str = "/workspace"
    exported: str = ""


class Shell:
    """One bash in a box, with its streams.

    keep: bytes kept of what a script prints on each stream.
    """

    def __init__(self, box: Box, limits: Limits, state: State):
        self._box = box
        scripts, self._scripts = pipe()
        codes, answers = pipe()
        out, out_write = pipe()
        err, err_write = pipe()
        null = os.open(os.devnull, os.O_RDONLY)
        theirs = [null, out_write, err_write, scripts, answers]
        command = ["bash", "--noprofile", "--norc", "-c", LOOP, "bash"]
        command += [state.folder, state.exported]
        try:
            # Bash would use up what is meant for one of its children, over the time.
            self.number, self.exit = box.start(command, limits, theirs, bound_cpu=False)
        except BaseException:
            for descriptor in (self._scripts, codes, out, err):
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.exit.add_done_callback(_look_at)
        os.set_blocking(self._scripts, False)
        os.set_blocking(codes, False)
        self._codes = codes
        self._said = bytearray()
        self._answers: asyncio.Queue[int] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(codes, self._hear)
        self.stdout = Reader(out, limits.output_bytes)
        self.stderr = Reader(err, limits.output_bytes)

    def _hear(self) -> None:
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._codes, 1 << 10)
        if not data:
            asyncio.get_running_loop().remove_reader(self._codes)
        self._said += data
        *words, rest = bytes(self._said).split(b"\0")
        self._said[:] = rest[-16:]
        for word in words:
            # A script can reach this pipe, to say nonsense about itself.
            self._answers.put_nowait(int(word) if word.isdigit() else 255)

    async def run(self, script: str) -> int:
        """The script's exit code.

        Raises:
          EOFError: the shell ended with it, with this code.
          SandboxDied: the sandbox did.
        """
        sending = asyncio.create_task(self._send(os.fsencode(script) + b"\0"))
        try:
            return await self.answer()
        finally:
            sending.cancel()

    async def answer(self) -> int:
        """The exit code of the script that runs; raises as `run` does."""
        answer = asyncio.create_task(self._answers.get())
        try:
            await asyncio.wait((answer, self.exit), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise EOFError(self.exit.result().exit_code)
        finally:
            answer.cancel()

    async def _send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._scripts, rest) :]
            except BlockingIOError:
                await asyncio.sleep(0.001)
            except BrokenPipeError:
                return

    def close(self) -> None:
        """Lets go of the streams; the process is the box's to end."""
        asyncio.get_running_loop().remove_reader(self._codes)
        os.close(self._codes)
        os.close(self._scripts)
        self.stdout.close()
        self.stderr.close()


def _look_at(exit_: "asyncio.Future[Exit]") -> None:
    """So that nobody is told of an end that nobody waited for."""
    if not exit_.cancelled():
        exit_.exception()
