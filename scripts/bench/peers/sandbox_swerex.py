"""SWE-ReX's local runtime behind `sandbox_driver`.

It has sessions of bash but no folders for them: each gets a temporary one here.
"""

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import sandbox_driver
from swerex.exceptions import CommandTimeoutError  # pyright: ignore[reportMissingImports]
from swerex.runtime import abstract, local  # pyright: ignore[reportMissingImports]


class SweRex:
    """See `sandbox_driver.Peer`; a session is its name and its folder."""

    def __init__(self):
        self._runtime = local.LocalRuntime(logger=logging.getLogger("quiet"))
        self._opened = 0
        self._entered: set[str] = set()  # sessions whose shell is in its folder

    async def start(self) -> None:
        logging.disable(logging.CRITICAL)

    async def open(self) -> tuple[str, Path]:
        self._opened += 1
        name = f"session-{self._opened}"
        folder = Path(tempfile.mkdtemp(prefix="jaxpt-swerex-"))
        request = abstract.CreateBashSessionRequest(session=name, startup_timeout=20.0)
        await self._runtime.create_session(request)
        return name, folder

    async def exec(
        self, session: tuple[str, Path], script: str, seconds: float
    ) -> dict[str, Any]:
        name, folder = session
        if name not in self._entered:
            self._entered.add(name)
            action = abstract.BashAction(command=f"cd {folder}", session=name, timeout=20)
            await self._runtime.run_in_session(action)
        action = abstract.BashAction(
            command=script, session=name, timeout=seconds, check="silent"
        )
        try:
            ran = await self._runtime.run_in_session(action)
        except CommandTimeoutError:
            return {"output": "", "code": None, "timed_out": True}
        return {"output": ran.output, "code": ran.exit_code, "timed_out": False}

    async def write(self, session: tuple[str, Path], path: str, data: bytes) -> None:
        request = abstract.WriteFileRequest(
            path=str(session[1] / path), content=data.decode()
        )
        await self._runtime.write_file(request)

    async def read(self, session: tuple[str, Path], path: str) -> bytes:
        request = abstract.ReadFileRequest(path=str(session[1] / path))
        return (await self._runtime.read_file(request)).content.encode()

    async def close(self, session: tuple[str, Path]) -> None:
        request = abstract.CloseBashSessionRequest(session=session[0])
        await self._runtime.close_session(request)
        shutil.rmtree(session[1], ignore_errors=True)


if __name__ == "__main__":
    sandbox_driver.main(SweRex())
