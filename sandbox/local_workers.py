"""Worker processes of this machine, as a pool sees them: started, listened to, replaced."""

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox.items import Resources
from sandbox.lines import Lines, LineTooLong
from sandbox.sessions import Beat, ProtocolError, Reply, Request, envelope, opened
from sandbox.workers import Members, WorkerLost

_STARTUP_SECONDS = 60.0
_MAX_REPLY_BYTES = 256 << 20


_SILENCE_SECONDS = 20.0  # without a beat, before a worker counts as stuck
_LONGEST_PAUSE = 5.0  # seconds between attempts to start a worker


def machine(workers: int = 1) -> Resources:
    """What one of so many workers of this machine may give away; at least one CPU."""
    with open("/proc/meminfo") as file:
        kilobytes = int(file.readline().split()[1])
    return Resources(
        cpus=round(max(len(os.sched_getaffinity(0)) / workers, 1.0), 3),
        memory_bytes=int(kilobytes * 1024 * 0.8) // workers,
        disk_bytes=0,
    )


class LocalWorkers:
    """`count` worker processes of this machine, each replaced when it is lost.

    capacity: of each; what this machine has, divided, if not given.
    backend, options: a name in `worker.BACKENDS`, and the arguments of what it names.
    gpus: of this machine, for sandboxes of the docker backend, as Docker names them; each
      worker gets as many, for itself.
    """

    def __init__(
        self,
        count: int = 2,
        *,
        capacity: Resources | None = None,
        backend: str = "local",
        options: Mapping[str, Any] | None = None,
        gpus: Sequence[str] = (),
    ):
        if count < 1:
            raise ValueError(f"count={count} must be 1 or more.")
        if len(gpus) % count:
            raise ValueError(f"{len(gpus)} GPUs can't be shared evenly by {count} workers.")
        self._count = count
        self._gpus = gpus
        self.leaves_containers = backend == "docker"
        self._backend = backend
        self._options = dict(options or {})
        each = len(gpus) // count
        capacity = capacity or dataclasses.replace(machine(count), gpus=each)
        if capacity.gpus != each:
            raise ValueError(f"{capacity} must have gpus={each}, as so many are named.")
        self.largest = capacity
        self._pids: dict[int, int] = {}

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are up."""
        return list(self._pids.values())

    async def run(self, members: Members, snapshots: str) -> None:
        """Keeps the workers running until it is cancelled; see `workers.Workers`."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._keep(number, members, snapshots))

    def made_by(self, number: int) -> dict[str, Any]:
        """The backend of the worker under this number, and its options."""
        options = self._options
        if self._gpus:
            options = options | {"gpus": self._gpus[number :: self._count]}
        return {"backend": self._backend, "options": options}

    async def _keep(self, number: int, members: Members, snapshots: str) -> None:
        """A worker under this number, and another whenever it is lost."""
        generation, pause = 0, 0.0
        while True:
            generation += 1
            worker_id = f"{number}.{generation}"
            settings = {"number": number, "snapshots": snapshots, **self.made_by(number)}
            link = WorkerLink(settings)
            try:
                await link.start()
                pause = 0.0
                self._pids[number] = link.pid
                members.joined(worker_id, link, self.largest)
                lost = await link.listen()
                # Those who wait for it hear of it first.
                await asyncio.sleep(0)
                members.left(worker_id, lost)
            except WorkerLost as lost:
                members.failed_to_join(lost)
                pause = min(2 * pause + 0.1, _LONGEST_PAUSE)
            finally:
                self._pids.pop(number, None)
                link.close()
            await asyncio.sleep(pause)


class WorkerLink:
    """A worker process and the requests that it has not answered.

    options: for `sandbox.worker`.
    """

    def __init__(self, options: dict[str, Any]):
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._killed_for = WorkerLost("worker_died")
        self._heard = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sandbox.worker", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={
                "PATH": os.environ.get("PATH", ""),
                "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
            },
        )
        assert self._process.stdin and self._process.stdout
        self._lines = Lines(
            self._process.stdout.fileno(),
            self._process.stdin.fileno(),
            max_bytes=_MAX_REPLY_BYTES,
        )
        self._said = bytearray()
        assert self._process.stderr
        os.set_blocking(self._process.stderr.fileno(), False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._process.stderr.fileno(), self._overhear)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        """Until it is ready. Raises WorkerLost, with what is missing as its detail."""
        try:
            async with asyncio.timeout(_STARTUP_SECONDS):
                hello = json.loads(await self._lines.receive())
        except (TimeoutError, EOFError, LineTooLong, ValueError) as error:
            raise WorkerLost("worker_died", self.last_words() or repr(error)) from error
        if "unavailable" in hello:
            raise WorkerLost("sandbox_failed", hello["unavailable"])
        self._heard = time.monotonic()

    async def listen(self) -> WorkerLost:
        """Hands out replies until the worker is lost, or silent; how it was."""
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                line = await self._lines.receive()
                message_id, reply = opened(line, Reply)
                self._heard = time.monotonic()
                if isinstance(reply, Beat):
                    continue
                waiter = self._waiting.pop(message_id, None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(reply)
        except EOFError:
            lost = self._killed_for
            if lost.reason == "worker_died":
                lost = WorkerLost("worker_died", self.last_words())
        except (ProtocolError, LineTooLong) as error:
            lost = WorkerLost("worker_died", f"it answered nonsense: {error}")
        finally:
            watching.cancel()
        self.kill()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(WorkerLost(lost.reason, lost.detail))
                waiter.exception()  # whoever waits hears of it; nobody else has to
        self._waiting.clear()
        return lost

    async def _watch(self) -> None:
        while time.monotonic() - self._heard < _SILENCE_SECONDS:
            await asyncio.sleep(min(_SILENCE_SECONDS / 4, 1.0))
        detail = f"no sign of life in {_SILENCE_SECONDS:.0f} s"
        self.kill("worker_unresponsive", detail)

    async def request(self, request_id: str, request: Request) -> Reply:
        """Raises WorkerLost if no reply will come."""
        if self._process.poll() is not None:
            raise WorkerLost("worker_died", self.last_words())
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = waiter
        sending = asyncio.ensure_future(self._lines.send(envelope(request, request_id)))
        sending.add_done_callback(lambda sent: sent.cancelled() or sent.exception())
        try:
            return await waiter
        finally:
            self._waiting.pop(request_id, None)

    def _overhear(self) -> None:
        assert self._process.stderr
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._process.stderr.fileno(), 1 << 16)
            if not data:
                asyncio.get_running_loop().remove_reader(self._process.stderr.fileno())
        self._said += data
        del self._said[:-4000]

    def last_words(self) -> str:
        """What the worker said on stderr, lately."""
        with contextlib.suppress(ValueError, OSError):
            self._overhear()
        return self._said[-2000:].decode(errors="replace").strip()

    def kill(self, reason: str = "worker_died", detail: str = "") -> None:
        """Ends the worker, and with it all its sandboxes."""
        if self._process.poll() is None:
            self._killed_for = WorkerLost(reason, detail)
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Lets go of the pipes of a worker that has ended."""
        self.kill()
        loop = asyncio.get_running_loop()
        self._lines.close()
        assert self._process.stderr
        with contextlib.suppress(ValueError):
            loop.remove_reader(self._process.stderr.fileno())
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(BrokenPipeError):
                if stream:
                    stream.close()
