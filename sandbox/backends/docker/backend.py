"""Makes sandboxes in containers; see the package for what runs where."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from sandbox import limits as limits_lib
from sandbox.backends.backend import SandboxFailed, SandboxUnavailable
from sandbox.backends.docker import engine as engine_lib
from sandbox.backends.docker import policy, shared
from sandbox.backends.docker.container import Container
from sandbox.backends.docker.engine import Engine, Started
from sandbox.backends.docker.grader import DockerGrader
from sandbox.backends.docker.sandbox import DockerSandbox
from sandbox.backends.docker.shared import Layer, Snapshot, State, Workspace
from sandbox.protocol import Limits

_FIRST_UID = 300_000  # others than the local backend's
_PACKAGE = Path(__file__).resolve().parents[2]


class DockerBackend:
    """Makes sandboxes for one worker process, in containers of this machine's engine.

    number: the worker's, from which the sandboxes' uids follow.
    image: of sandboxes that are opened without one, and of graders.
    runtime: `runc`, or `runsc` for gVisor, whose kernel is not the machine's.
    gpus: of this machine, as Docker names them, that this worker alone may give out: each
      to one sandbox at a time, from its opening to its end.

    Raises:
      SandboxUnavailable: no engine answers, or it can't isolate, or the runtime gives no
        GPUs; with what to do.
    """

    def __init__(
        self,
        number: int,
        *,
        image: str = "jaxpt-sandbox:base",
        runtime: str = "runc",
        gpus: Sequence[str] = (),
    ):
        if runtime not in policy.RUNTIMES:
            raise SandboxUnavailable(
                f"Of the runtime {runtime!r} it is not known what it enforces; known are "
                f"{sorted(policy.RUNTIMES)}."
            )
        self.uids = {
            "agent": _FIRST_UID + 2 * number,
            "grader": _FIRST_UID + 2 * number + 1,
        }
        self._runtime = policy.RUNTIMES[runtime]
        if gpus and not self._runtime.gives_gpus:
            raise SandboxUnavailable(f"The runtime {runtime!r} gives no GPUs; use runc.")
        self._image = image
        self._num_gpus = len(gpus)
        self._free_gpus = list(gpus)
        self._numbers = itertools.count(1)
        self._burials: set[asyncio.Task[None]] = set()
        shared.set_own_limits()
        limits_lib.volunteer_when_memory_runs_out()
        self.engine = Engine(runtime)
        try:
            self.engine.remove_those_of_the_dead()
            self.engine.check_image(image)
            self._folder = engine_lib.new_folder()
        except (SandboxFailed, OSError) as error:
            self.engine.close()
            raise SandboxUnavailable(str(error)) from error
        policy.copy_inside(_PACKAGE, Path(self._folder, "inside"))
        for role, uid in self.uids.items():
            policy.write_users(Path(self._folder, role), uid)

    async def open(
        self, limits: Limits, *, snapshot: Snapshot | None = None, image: str = ""
    ) -> DockerSandbox:
        """A sandbox with an empty workspace, or with a snapshot's.

        Raises:
          SandboxFailed: there is no such image, no room for the workspace, or too few
            GPUs are left.
        """
        if image:
            await asyncio.to_thread(self.engine.check_image, image)
        snapshot = snapshot or Snapshot()
        gpus = self._take_gpus(limits.gpus)
        try:
            files = self.workspace(limits, snapshot.layers)
        except BaseException:
            self.give_back(gpus)
            raise
        state = State(snapshot.folder, snapshot.exported)
        return DockerSandbox(self, files, limits, state, image or self._image, gpus)

    def _take_gpus(self, count: int) -> list[str]:
        if count > len(self._free_gpus):
            raise SandboxFailed(
                f"{count} GPUs were asked of a worker that has {len(self._free_gpus)} left "
                f"of {self._num_gpus}: LocalWorkers(..., gpus=...) names those to give out."
            )
        taken, self._free_gpus = self._free_gpus[:count], self._free_gpus[count:]
        return taken

    def give_back(self, gpus: Sequence[str]) -> None:
        """For the next sandbox; nothing that uses them may be alive."""
        self._free_gpus += gpus

    def workspace(
        self, limits: Limits, layers: Sequence[Layer] = (), *, role: str = "agent"
    ) -> Workspace:
        """Raises SandboxFailed if there is no room for it."""
        path = f"{self._folder}/{next(self._numbers):x}"
        try:
            return Workspace(
                path, size=limits.workspace_bytes, uid=self.uids[role], layers=layers
            )
        except OSError as error:
            raise SandboxFailed(f"No workspace could be made: {error}") from error

    async def begin(
        self,
        files: Workspace,
        limits: Limits,
        role: str,
        *,
        image: str,
        arguments: Sequence[str],
        gpus: Sequence[str] = (),
    ) -> Container:
        """A container around a workspace, known to isolate; raises SandboxFailed."""
        wanted = policy.container(
            self.engine.api,
            limits,
            self._runtime,
            image=image,
            arguments=arguments,
            uid=self.uids[role],
            workspace=files.folder,
            read_only=role == "grader",
            inside=f"{self._folder}/inside",
            users=f"{self._folder}/{role}",
            gpus=gpus,
        )
        starting = asyncio.create_task(asyncio.to_thread(self.engine.start, wanted))
        try:
            started = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._in_background(self._undo(starting))
            raise
        try:
            counts = not self._runtime.own_processes
            container = Container(self.engine, started, counts_processes=counts)
        except OSError as error:
            self._in_background(self._undo(starting))
            raise SandboxFailed(f"No container came up: {error}") from error
        try:
            await container.begun()
            most = policy.most_processes(limits, self._runtime)
            container.group.bound_processes(most)
        except BaseException as error:
            await asyncio.shield(self.bury(container))
            if isinstance(error, OSError):
                raise SandboxFailed(f"No container came up: {error}") from error
            raise
        return container

    async def _undo(self, starting: "asyncio.Task[Started]") -> None:
        """Ends a container that nobody waits for any more."""
        with contextlib.suppress(SandboxFailed):
            started = await starting
            started.close()
            await asyncio.to_thread(self.engine.remove, started.identity)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        burial = asyncio.create_task(work)
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)
        return burial

    def bury(self, container: Container) -> "asyncio.Task[None]":
        """Ends a container, if it is alive, and removes it.

        The task raises SandboxFailed if it could not be ended.
        """

        async def end() -> None:
            try:
                await container.kill()
            finally:
                await asyncio.to_thread(self.engine.remove, container.identity)

        return self._in_background(end())

    async def start_grader(self, program: str, limits: Limits) -> DockerGrader:
        """A container that grades by `program`, for one request after the other.

        Raises SandboxFailed.
        """
        if limits.gpus:  # it is kept for later requests, which nobody has reserved any for
            raise SandboxFailed(f"A grader gets no GPUs; {limits.gpus} were asked.")
        files = self.workspace(Limits(workspace_bytes=4 << 20), role="grader")
        try:
            main = (_PACKAGE / "grader_main.py").read_bytes()
            files.write({"grader_main.py": main, "grader.py": program.encode()})
            argv = ["python", "-I", "-S", "grader_main.py", "grader.py"]
            rlimits = shared.rlimits(limits)
            del rlimits["RLIMIT_CPU"]  # a grader's time is bounded by the clock alone
            wanted = json.dumps({"argv": argv, "limits": rlimits})
            container = await self.begin(
                files, limits, "grader", image=self._image, arguments=("grade", wanted)
            )
        except BaseException:
            files.close()
            raise
        return DockerGrader(self, files, container)

    async def pack(self, snapshot: Snapshot) -> bytes:
        """A snapshot as a tar archive, which `unpack` takes on any machine."""
        size = sum(layer.used_bytes for layer in snapshot.layers) + (1 << 20)
        files = self.workspace(Limits(workspace_bytes=size), snapshot.layers)
        try:
            state = {"folder": snapshot.folder, "exported": snapshot.exported}
            return await asyncio.to_thread(shared.pack, files.folder, state)
        finally:
            files.close()

    async def unpack(self, archive: bytes, limits: Limits) -> Snapshot:
        files = self.workspace(limits)
        try:
            state = shared.unpack(archive, files)
        except BaseException:
            files.close()
            raise
        return Snapshot(files.freeze(), **state)

    async def close(self) -> None:
        """Ends what is being ended; sandboxes that are open are their owners' to close."""
        while self._burials:
            await asyncio.wait(self._burials)
        await asyncio.to_thread(engine_lib.clear, self._folder)
        self.engine.close()
