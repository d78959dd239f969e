"""What one has without any library, behind `sandbox_driver`.

sandbox_plain.py subprocess       bash in a temporary folder
sandbox_plain.py docker IMAGE     `docker exec` into a running container
"""

import asyncio
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import sandbox_driver


async def _run(
    *command: str, data: bytes | None = None, seconds: float = 60.0, folder: Any = None
) -> tuple[bytes, int]:
    """What a command printed, and its exit code; it alone is killed if it takes long."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL if data is None else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
    )
    try:
        async with asyncio.timeout(seconds):
            output, _ = await process.communicate(data)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return output, process.returncode


async def _ran(*command: str, seconds: float, folder: Any = None) -> dict[str, Any]:
    try:
        output, code = await _run(*command, seconds=seconds, folder=folder)
    except TimeoutError:
        return {"output": "", "code": None, "timed_out": True}
    text = output.decode(errors="replace")
    return {"output": text, "code": code, "timed_out": False}


class Subprocess:
    """See `sandbox_driver.Peer`; a session is a temporary folder."""

    async def start(self) -> None:
        pass

    async def open(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="jaxpt-plain-"))

    async def exec(self, session: Path, script: str, seconds: float) -> dict[str, Any]:
        return await _ran("bash", "-c", script, seconds=seconds, folder=session)

    async def write(self, session: Path, path: str, data: bytes) -> None:
        Path(session, path).write_bytes(data)

    async def read(self, session: Path, path: str) -> bytes:
        return Path(session, path).read_bytes()

    async def close(self, session: Path) -> None:
        shutil.rmtree(session, ignore_errors=True)


class DockerExec:
    """See `sandbox_driver.Peer`; a session is a container that sleeps."""

    def __init__(self, image: str):
        self._image = image

    async def start(self) -> None:
        try:
            shown = await _run("docker", "image", "inspect", self._image)
        except FileNotFoundError as error:
            raise sandbox_driver.Unavailable("There is no docker command.") from error
        if shown[1]:
            reason = shown[0].decode(errors="replace").split("\n")[-2:]
            raise sandbox_driver.Unavailable(" ".join(reason).strip())

    async def open(self) -> str:
        flags = ("--detach", "--rm", "--network", "none", "--workdir", "/workspace")
        output, code = await _run("docker", "run", *flags, self._image, "sleep", "3600")
        if code:
            raise RuntimeError(output.decode(errors="replace"))
        return output.decode().strip()

    async def exec(self, session: str, script: str, seconds: float) -> dict[str, Any]:
        command = ("docker", "exec", session, "bash", "-c", script)
        return await _ran(*command, seconds=seconds)

    async def write(self, session: str, path: str, data: bytes) -> None:
        command = ("docker", "exec", "-i", session, "bash", "-c", 'cat > "$0"', path)
        await _run(*command, data=data)

    async def read(self, session: str, path: str) -> bytes:
        output, code = await _run("docker", "exec", session, "cat", path)
        if code:
            raise FileNotFoundError(path)
        return output

    async def close(self, session: str) -> None:
        await _run("docker", "rm", "--force", session)


if __name__ == "__main__":
    if sys.argv[1] == "docker":
        sandbox_driver.main(DockerExec(sys.argv[2]))
    else:
        subprocess.run(["bash", "-c", "true"], check=True)
        sandbox_driver.main(Subprocess())
