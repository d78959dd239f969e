"""inspect_ai's sandboxes behind `sandbox_driver`: `local`, or `docker IMAGE`."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import sandbox_driver
from inspect_ai._util.error import (  # pyright: ignore[reportMissingImports]
    PrerequisiteError,
)
from inspect_ai.util._sandbox.docker import (  # pyright: ignore[reportMissingImports]
    docker,
)
from inspect_ai.util._sandbox.local import (  # pyright: ignore[reportMissingImports]
    LocalSandboxEnvironment,
)

_COMPOSE = """
services:
  default:
    image: {}
    command: tail -f /dev/null
    init: true
    network_mode: none
"""


class Inspect:
    """See `sandbox_driver.Peer`; a session is the environments of a sample.

    image: of Docker's sandbox; without one it is the local sandbox.
    """

    def __init__(self, image: str | None):
        self._kind: Any = docker.DockerSandboxEnvironment if image else None
        self._kind = self._kind or LocalSandboxEnvironment
        self._config = None
        if image:
            self._config = str(Path(tempfile.mkdtemp(), "compose.yaml"))
            Path(self._config).write_text(_COMPOSE.format(image))

    async def start(self) -> None:
        if self._config is None:
            return
        try:
            await docker.validate_prereqs()
            await self._kind.task_init("bench", self._config)
        except PrerequisiteError as error:
            raise sandbox_driver.Unavailable(" ".join(str(error).split())) from error

    async def open(self) -> dict[str, Any]:
        return await self._kind.sample_init("bench", self._config, {})

    async def exec(
        self, session: dict[str, Any], script: str, seconds: float
    ) -> dict[str, Any]:
        command = ["bash", "-c", script]
        try:
            ran = await session["default"].exec(
                command, timeout=max(int(seconds), 1), timeout_retry=False
            )
        except TimeoutError:
            return {"output": "", "code": None, "timed_out": True}
        output = ran.stdout + ran.stderr
        return {"output": output, "code": ran.returncode, "timed_out": False}

    async def write(self, session: dict[str, Any], path: str, data: bytes) -> None:
        await session["default"].write_file(path, data)

    async def read(self, session: dict[str, Any], path: str) -> bytes:
        return await session["default"].read_file(path, text=False)

    async def close(self, session: dict[str, Any]) -> None:
        await self._kind.sample_cleanup("bench", self._config, session, False)


if __name__ == "__main__":
    sandbox_driver.main(Inspect(sys.argv[2] if sys.argv[1] == "docker" else None))
