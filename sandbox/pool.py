"""A pool of workers: jobs and sessions in, futures of results out.

One thread with an event loop does everything, by a `Dispatcher`. A worker that dies or
stops answering is replaced; what fails for reasons of ours every time comes back as
`infra_fail` or `grader_fail`, never as a score.
"""

import asyncio
import collections
import contextlib
import dataclasses
import math
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sandbox import isolation
from sandbox.backends.backend import SandboxUnavailable
from sandbox.dispatcher import Dispatcher, Work, failed
from sandbox.items import (
    Item,
    Resources,
    Retry,
    RetryPolicy,
    SchedulerConfig,
)
from sandbox.local_workers import LocalWorkers
from sandbox.metrics import Metrics
from sandbox.nanny import Nanny
from sandbox.protocol import Job, Limits, Result
from sandbox.session import Session, SessionFailed
from sandbox.sessions import Open, Run
from sandbox.workers import Workers

_RESULTS_KEPT = 4096
_TMP_BYTES = 32 << 20  # of /tmp and /dev/shm, in memory


def needs(limits: Limits, share: float = 1.0) -> Resources:
    """What a sandbox with these limits takes of a worker, or a share of it."""
    return Resources(
        cpus=max(round(limits.cpus * share, 3), 0.001),
        memory_bytes=int(
            (limits.memory_bytes + limits.workspace_bytes + _TMP_BYTES) * share
        ),
        disk_bytes=0,
        gpus=limits.gpus,
    )


_ISOLATION_ATTEMPTS = 2  # what was only disturbed is not missing the second time


class Pool:
    """Workers, and the work for them; a context manager.

    workers: who brings them; processes of this machine, if not given.
    max_attempts: how often a job is tried when the infrastructure or the grader fails.
    weights: shares of the domains while there is more work than room; 1 if not named.
    session_share: of a session's limits that it reserves, as most sessions mostly wait.
    idle_seconds: without a request, after which a session is closed.
    snapshots: folder for those that outlive a worker; one that ends with the pool, if not
      given.

    waive: layers of isolation that may be missing; the names are `isolation.LAYERS`'.

    Raises:
      SandboxUnavailable: sandboxes don't isolate here; the message says what is missing.
    """

    def __init__(
        self,
        workers: Workers | None = None,
        *,
        max_attempts: int = 3,
        weights: Mapping[str, float] | None = None,
        session_share: float = 0.02,
        idle_seconds: float = 3600.0,
        snapshots: str | None = None,
        waive: Sequence[str] = (),
    ):
        isolation.check_waivers(tuple(waive))
        if max_attempts < 1:
            raise ValueError(f"max_attempts={max_attempts} must be 1 or more.")
        self.workers = workers = workers or LocalWorkers()
        self._largest = workers.largest
        self.metrics = Metrics()
        self._session_share = session_share
        self._idle_seconds = idle_seconds
        self._dispatcher = Dispatcher(
            _scheduling(workers.largest, max_attempts, weights or {}),
            self.metrics,
            self.call,
        )
        self._lock = threading.Lock()
        self._futures: collections.OrderedDict[str, Future] = collections.OrderedDict()
        self._calls: set[asyncio.Task] = set()
        self._closed = False
        self._closing = asyncio.Event()
        self._nanny = Nanny(containers=workers.leaves_containers)
        self._snapshots = snapshots or self._nanny.folder
        Path(self._snapshots).mkdir(parents=True, exist_ok=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete,
            args=(self._main(),),
            name="sandbox-pool",
            daemon=True,
        )
        self._thread.start()
        try:
            self._check_isolation(tuple(waive))
        except BaseException:
            self.close()
            raise

    def _check_isolation(self, waived: tuple[str, ...]) -> None:
        try:
            for attempt in range(_ISOLATION_ATTEMPTS):
                tried = [self.submit(job) for job in isolation.jobs(attempt)]
                results = [future.result() for future in tried]
                self.isolation = isolation.findings(results)
                complaint = isolation.complaint(self.isolation, waived)
                if complaint is None:
                    return
        except isolation.CannotIsolate as error:
            raise SandboxUnavailable(str(error)) from error
        raise SandboxUnavailable(complaint)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    @property
    def is_saturated(self) -> bool:
        """Whether so much work waits that the sampler should."""
        return self._dispatcher.is_saturated

    def wait_for_room(self, seconds: float = math.inf) -> bool:
        """Blocks while the pool is saturated; False if it still is after so long."""
        deadline = time.monotonic() + seconds
        while self.is_saturated and not self._closed:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def submit(
        self, job: Job, *, priority: int = 0, deadline_seconds: float | None = None
    ) -> "Future[Result]":
        """The result to come; never blocks, and the future never raises.

        A job_id seen before gets the same future (the last few thousand are known). Not
        yet begun, a job can be cancelled by its future.
        priority: one more is worth a minute of waiting, within its domain.

        Raises:
          ValueError: its limits are above what any worker has.
        """
        resources = needs(job.execution.limits if job.execution else job.grading.limits)
        self._check_fits(job.job_id, resources)
        with self._lock:
            if job.job_id in self._futures:
                return self._futures[job.job_id]
            future: Future[Result] = Future()
            self._futures[job.job_id] = future
            while len(self._futures) > _RESULTS_KEPT:
                oldest = next(iter(self._futures))
                if not self._futures[oldest].done():
                    break
                del self._futures[oldest]
            now = time.monotonic()
            item = Item(
                item_id=f"job/{job.job_id}",
                domain=job.domain or "-",
                resources=resources,
                priority=priority,
                deadline=None if deadline_seconds is None else now + deadline_seconds,
                safe_to_repeat=True,  # it has a sandbox for itself
            )
            work = Work(future, Run(job=job), now)
            if self._closed:
                future.set_result(failed(job.job_id, "pool_closed"))
            else:
                self._loop.call_soon_threadsafe(self._dispatcher.enter, item, work)
        return future

    def _check_fits(self, name: str, resources: Resources) -> None:
        for field in ("cpus", "memory_bytes", "gpus"):
            asked, there = getattr(resources, field), getattr(self._largest, field)
            if asked > there:
                raise ValueError(
                    f"{name!r} needs {field}={asked}, more than the {there} of a worker; "
                    "lower its limits or use fewer, larger workers."
                )

    def open(
        self,
        domain: str,
        limits: Limits = Limits(),
        *,
        image: str = "",
        snapshot_id: str = "",
        session_id: str = "",
        priority: int = 0,
    ) -> "Future[Session]":
        """A session to come; cancel the future to give it up before it has begun.

        snapshot_id: where it begins; an empty workspace, if not given.
        session_id: a new one, if not given. The future raises SessionFailed.

        Raises:
          ValueError: its limits are above what any worker has.
        """
        resources = needs(limits, self._session_share)
        self._check_fits(domain, needs(limits))
        request = Open(
            session_id=session_id or uuid.uuid4().hex,
            domain=domain,
            limits=limits,
            image=image,
            snapshot_id=snapshot_id,
        )
        item = Item(
            item_id=f"session/{request.session_id}",
            domain=domain or "-",
            resources=resources,
            priority=priority,
            safe_to_repeat=True,  # until it has begun; see `_apply`
        )
        work = Work(Future(), request, time.monotonic())
        with self._lock:
            if self._closed:
                work.future.set_exception(SessionFailed("pool_closed", is_lost=True))
            else:
                self._loop.call_soon_threadsafe(self._dispatcher.enter, item, work)
        return work.future

    def cancel(self, job_id: str) -> None:
        """Ends a job that may run already; it resolves as `infra_fail: cancelled`."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._dispatcher.cancel, f"job/{job_id}")

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        """Runs a coroutine in the pool's loop; cancelled when the pool closes."""

        async def tracked() -> Any:
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            return await coroutine

        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(tracked(), self._loop)
        coroutine.close()
        closed: Future = Future()
        closed.set_exception(SessionFailed("pool_closed", is_lost=True))
        return closed

    def close(self) -> None:
        """Ends every worker; jobs not yet done resolve as `infra_fail: pool_closed`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._closing.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def _main(self) -> None:
        """The pool's thread, until it is closed or a part of it fails, which is told."""
        dispatcher = self._dispatcher
        parts = [
            asyncio.create_task(self.workers.run(dispatcher, self._snapshots)),
            asyncio.create_task(dispatcher.run()),
            asyncio.create_task(dispatcher.close_idle(self._idle_seconds)),
            asyncio.create_task(self._watch_nanny()),
            asyncio.create_task(self._closing.wait()),
        ]
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        with self._lock:
            self._closed = True
        for part in parts:
            part.cancel()
        for ended in await asyncio.gather(*parts, return_exceptions=True):
            if isinstance(ended, Exception):
                print("The pool of sandboxes failed:", file=sys.stderr)
                traceback.print_exception(ended)
        # What arrived before the pool was closed is entered in this turn of the loop.
        await asyncio.sleep(0)
        for task in list(self._calls):
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await dispatcher.close()
        self._nanny.close()

    async def _watch_nanny(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._nanny.check()


def _scheduling(
    largest: Resources, max_attempts: int, weights: Mapping[str, float]
) -> SchedulerConfig:
    retry = Retry(max_attempts=max_attempts, base_seconds=0.02)
    at_once = dataclasses.replace(retry, base_seconds=0.0)
    return SchedulerConfig(
        weights=weights,
        largest=largest,
        retries=RetryPolicy(rules={"infra_fail": retry, "grader_fail": at_once}),
        # Whoever brings the workers sees them die, or be silent, and says so.
        heartbeat_seconds=1e9,
        lease_seconds=1e9,
        remembered=_RESULTS_KEPT,  # no more than the pool itself, or it grows for hours
    )
