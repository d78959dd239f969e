"""A grading program in a container: pipes for the worker, joined to the attached stream."""

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from sandbox.backends.docker.attached import read_some, write_all
from sandbox.backends.docker.container import Container
from sandbox.backends.docker.shared import Workspace

if TYPE_CHECKING:
    from sandbox.backends.docker.backend import DockerBackend


class DockerGrader:
    """A grader at work: requests to one descriptor, verdicts from the other."""

    def __init__(self, backend: "DockerBackend", files: Workspace, container: Container):
        self._backend = backend
        self._files = files
        self._container = container
        requests, self.requests = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.verdicts, verdicts = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._passing = [
            asyncio.create_task(self._pass_requests(requests)),
            asyncio.create_task(self._pass_verdicts(verdicts)),
        ]

    async def _pass_requests(self, descriptor: int) -> None:
        try:
            with contextlib.suppress(EOFError):
                while data := await read_some(descriptor):
                    await self._container.stream.send(data)
        finally:
            os.close(descriptor)

    async def _pass_verdicts(self, descriptor: int) -> None:
        try:
            with contextlib.suppress(EOFError):
                while data := await self._container.stream.receive():
                    await write_all(descriptor, data)
        finally:
            os.close(descriptor)

    async def close(self) -> None:
        os.close(self.requests)
        os.close(self.verdicts)
        for passing in self._passing:
            passing.cancel()
        await asyncio.wait(self._passing)
        try:
            await asyncio.shield(self._backend.bury(self._container))
        finally:
            self._files.close()
