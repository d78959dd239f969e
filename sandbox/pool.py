"""A pool of worker processes: jobs and sessions in, futures of results out.

One thread with an event loop owns everything: the scheduler, which decides what runs where
and when it is tried again, and the links to the workers. A worker that dies or stops
answering is replaced; what fails for reasons of ours every time comes back as `infra_fail`
or `grader_fail`, never as a score.
"""

import asyncio
import collections
import contextlib
import dataclasses
import threading
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sandbox import isolation
from sandbox.backends.backend import SandboxUnavailable
from sandbox.items import (
    Change,
    Item,
    Lease,
    Resources,
    Retry,
    RetryPolicy,
    SchedulerConfig,
)
from sandbox.local_workers import LocalWorkers
from sandbox.metrics import Metrics
from sandbox.nanny import Nanny
from sandbox.protocol import Job, Limits, Output, Result
from sandbox.scheduler import Scheduler
from sandbox.session import Session, SessionFailed
from sandbox.sessions import Cancel, Done, Failed, Open, Reply, Run
from sandbox.workers import Link, WorkerLost, Workers

_SLACK_SECONDS = 20.0  # beyond a job's own limits, before its worker counts as stuck
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
    )


@dataclasses.dataclass
class _Work:
    """An item of the scheduler's, and who waits for what comes of it."""

    future: Future
    request: Run | Open
    submitted: float
    placed: float = 0.0
    failure: Result | None = None  # of the last attempt, if it failed
    link: Link | None = None


@dataclasses.dataclass
class _Family:
    """A session, its forks, and the lease that they live in."""

    lease: Lease
    members: set[Session] = dataclasses.field(default_factory=set)


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
        self.workers = workers or LocalWorkers()
        self._largest = self.workers.largest
        self._session_share = session_share
        self._idle_seconds = idle_seconds
        retry = Retry(max_attempts=max_attempts, base_seconds=0.02)
        self._scheduler = Scheduler(
            SchedulerConfig(
                weights=weights or {},
                largest=self._largest,
                retries=RetryPolicy(
                    rules={
                        "infra_fail": retry,
                        "grader_fail": dataclasses.replace(retry, base_seconds=0.0),
                    }
                ),
                # Workers are on this machine: the pool sees them die, or be silent.
                heartbeat_seconds=1e9,
                lease_seconds=1e9,
            )
        )
        self._lock = threading.Lock()
        self._futures: collections.OrderedDict[str, Future] = collections.OrderedDict()
        self._work: dict[str, _Work] = {}
        self.metrics = Metrics()
        self.metrics.watch(
            {
                "queued": ("Waiting.", lambda: self._scheduler.num_queued),
                "leased": ("Placed on workers.", lambda: self._scheduler.num_leased),
                "workers": ("That are up.", lambda: len(self._links)),
                "sessions": ("That are open.", self._num_sessions),
            }
        )
        self._families: dict[str, _Family] = {}  # by their first session's item
        self._links: dict[str, Link] = {}
        self._tasks: set[asyncio.Task] = set()
        self._closed = False
        self._closing = asyncio.Event()
        self._stirred = asyncio.Event()  # there may be something to hand out
        self._nanny = Nanny()
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
            tried = [self.submit(job) for job in isolation.jobs()]
            self.isolation = isolation.findings([future.result() for future in tried])
        except isolation.CannotIsolate as error:
            raise SandboxUnavailable(str(error)) from error
        if complaint := isolation.complaint(self.isolation, waived):
            raise SandboxUnavailable(complaint)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    @property
    def is_saturated(self) -> bool:
        """Whether so much work waits that the sampler should."""
        return self._scheduler.is_saturated()

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
            work = _Work(future, Run(job=job), now)
            if self._closed:
                future.set_result(_failed(job.job_id, "pool_closed"))
            else:
                self._loop.call_soon_threadsafe(self._enter, item, work)
        return future

    def _check_fits(self, name: str, resources: Resources) -> None:
        for field in ("cpus", "memory_bytes"):
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
        work = _Work(Future(), request, time.monotonic())
        with self._lock:
            if self._closed:
                work.future.set_exception(SessionFailed("pool_closed", is_lost=True))
            else:
                self._loop.call_soon_threadsafe(self._enter, item, work)
        return work.future

    def cancel(self, job_id: str) -> None:
        """Ends a job that may run already; it resolves as `infra_fail: cancelled`."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel, f"job/{job_id}")

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        """Runs a coroutine in the pool's loop; cancelled when the pool closes."""

        async def tracked() -> Any:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
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

    # From here on everything runs in the pool's thread.

    async def _main(self) -> None:
        reaping = self._spawn(self._close_idle())
        watching = self._spawn(self._watch_nanny())
        running = self._spawn(self.workers.run(self, self._snapshots))
        turning = self._spawn(self._turn())
        await self._closing.wait()
        for task in (reaping, watching, turning, running):
            task.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for item_id, work in list(self._work.items()):
            self._resolve(item_id, work, _failed(item_id, "pool_closed"))
        for family in list(self._families.values()):
            for session in list(family.members):
                session.lose("pool_closed")
        # What arrived before the pool was closed is entered in this turn of the loop.
        await asyncio.sleep(0)
        self._nanny.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def joined(self, worker_id: str, link: Link, capacity: Resources) -> None:
        """See `workers.Members`, like the next two."""
        self._links[worker_id] = link
        self._scheduler.join(worker_id, capacity, time.monotonic())
        self._stirred.set()

    def left(self, worker_id: str, lost: WorkerLost) -> None:
        del self._links[worker_id]
        for change in self._scheduler.leave(worker_id, time.monotonic()):
            self._apply(change, _failed(change.item_id, lost.reason, str(lost)))
        self._stirred.set()

    def failed_to_join(self, lost: WorkerLost) -> None:
        if self._links:
            return
        now = time.monotonic()
        self._scheduler.join("none", self._largest, now)
        for lease in self._scheduler.next_leases(now):
            work = self._work[lease.item_id]
            work.failure = _failed(lease.item_id, lost.reason, str(lost))
            change = self._scheduler.complete(
                lease.lease_id, "infra_fail", lost.reason, time.monotonic()
            )
            if change is not None:
                self._apply(change, work.failure)
        self._scheduler.leave("none", time.monotonic())
        self._stirred.set()

    async def _turn(self) -> None:
        """Hands out leases whenever something has changed, or time has."""
        while True:
            now = time.monotonic()
            for change in self._scheduler.expire(now):
                self._apply(change, None)
            for lease in self._scheduler.next_leases(now):
                self._spawn(self._attempt(lease))
            due = self._scheduler.next_event(now)
            timeout = None if due is None else max(due - time.monotonic(), 0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._stirred.wait()
            self._stirred.clear()

    def _enter(self, item: Item, work: _Work) -> None:
        if self._closing.is_set():
            self._resolve(item.item_id, work, _failed(item.item_id, "pool_closed"))
            return
        if self._scheduler.submit(item, time.monotonic()):
            self._work[item.item_id] = work
            self._stirred.set()
        else:
            self._resolve(item.item_id, work, _failed(item.item_id, "job_id_known"))

    async def _attempt(self, lease: Lease) -> None:
        """One lease of a job, from its request to its reply."""
        work = self._work.get(lease.item_id)
        if work is None:
            return
        if not work.future.running() and not work.future.set_running_or_notify_cancel():
            self._scheduler.cancel(lease.item_id, time.monotonic())
            self._finish(lease, _failed(lease.item_id, "cancelled"), began=False)
            del self._work[lease.item_id]
            return
        work.placed = work.placed or time.monotonic()
        link = work.link = self._links[lease.worker_id]
        try:
            reply = await self._ask(link, lease.lease_id, work.request)
        except WorkerLost as lost:
            reply = _failed(lease.item_id, lost.reason, str(lost))
        if isinstance(work.request, Open) and isinstance(reply, Done):
            self._begin(lease, work, link, reply)
        else:
            self._finish(lease, reply)

    def _begin(self, lease: Lease, work: _Work, link: Link, reply: Done) -> None:
        """A session has begun: its item stays leased until its family has ended."""
        assert isinstance(work.request, Open)
        del self._work[lease.item_id]
        domain = work.request.domain
        family = self._families[lease.item_id] = _Family(lease)

        def join(session_id: str, state: Any) -> Session:
            session = Session(
                session_id,
                domain,
                link,
                state,
                call=self.call,
                on_fork=lambda parent, forked: join(forked, parent.state),
                on_close=lambda session: self._leave(family, session),
                metrics=self.metrics,
            )
            family.members.add(session)
            return session

        work.future.set_result(join(work.request.session_id, reply.state))

    def _leave(self, family: _Family, session: Session) -> None:
        family.members.discard(session)
        if not family.members and self._families.pop(family.lease.item_id, None):
            now = time.monotonic()
            self._scheduler.complete(family.lease.lease_id, "ok", "closed", now)
            self._stirred.set()

    def _num_sessions(self) -> int:
        return sum(len(family.members) for family in list(self._families.values()))

    async def _watch_nanny(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._nanny.check()

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(min(self._idle_seconds / 4, 10.0))
            bound = time.monotonic() - self._idle_seconds
            for family in list(self._families.values()):
                for session in list(family.members):
                    if session.used_at < bound:
                        self._spawn(session.end("idle_timeout"))

    async def _ask(self, link: Link, request_id: str, request: Run | Open) -> Reply:
        try:
            async with asyncio.timeout(_patience(request)):
                return await link.request(request_id, request)
        except TimeoutError:
            link.kill("worker_unresponsive", f"no answer in {_patience(request):.0f} s")
            raise WorkerLost("worker_unresponsive") from None

    def _finish(self, lease: Lease, reply: Reply, *, began: bool = True) -> None:
        """The end of an attempt: of the work as well, or it waits for the next one."""
        if isinstance(reply, Failed):
            reply = _failed(lease.item_id, reply.reason, reply.detail)
        assert isinstance(reply, Result)
        reply = dataclasses.replace(reply, attempts=lease.attempt)
        change = self._scheduler.complete(
            lease.lease_id, reply.outcome, reply.reason, time.monotonic(), began=began
        )
        if change is not None:
            self._apply(change, reply)
        self._stirred.set()

    def _apply(self, change: Change, result: Result | None) -> None:
        """What the scheduler says became of an item, and how its last attempt ended."""
        family = self._families.pop(change.item_id, None)
        if family is not None:
            # Begun anew it would be another session, with nothing in it.
            self._scheduler.cancel(change.item_id, time.monotonic())
            reason = result.reason if result else change.reason
            for session in list(family.members):
                session.lose(reason)
            return
        if change.kind != "resolved":
            return
        work = self._work.pop(change.item_id, None)
        if work is None:
            return
        if change.kill is not None and work.link is not None:
            self._spawn(self._kill_attempt(work.link, change.kill))
        if result is None:
            result = _failed(change.item_id, change.reason)
        result = dataclasses.replace(result, attempts=max(change.attempts, 1))
        self._resolve(change.item_id, work, result)

    async def _kill_attempt(self, link: Link, lease_id: str) -> None:
        with contextlib.suppress(WorkerLost):
            await link.request(f"cancel/{lease_id}", Cancel(request_id=lease_id))

    def _resolve(self, item_id: str, work: _Work, result: Result) -> None:
        if not work.future.running() and not work.future.set_running_or_notify_cancel():
            return
        if isinstance(work.request, Open):
            detail = result.stderr.text()
            work.future.set_exception(SessionFailed(result.reason, detail, is_lost=True))
            return
        now = time.monotonic()
        queued = (work.placed or now) - work.submitted
        seconds = {"queue": queued, **result.seconds}
        seconds["deliver"] = max(now - work.submitted - sum(seconds.values()), 0.0)
        result = dataclasses.replace(
            result, job_id=item_id.partition("/")[2], seconds=seconds
        )
        self.metrics.count_result(work.request.job.domain, result)
        work.future.set_result(result)

    def _cancel(self, item_id: str) -> None:
        change = self._scheduler.cancel(item_id, time.monotonic())
        if change is not None:
            self._apply(change, None)


def _patience(request: Run | Open) -> float:
    if isinstance(request, Open):
        return 60.0
    job = request.job
    seconds = job.grading.limits.wall_seconds + _SLACK_SECONDS
    return seconds + (job.execution.limits.wall_seconds if job.execution else 0.0)


def _failed(job_id: str, reason: str, detail: str = "") -> Result:
    encoded = detail.encode(errors="replace")
    return Result(
        job_id=job_id,
        outcome="infra_fail",
        reason=reason,
        stderr=Output(tail=encoded, total_bytes=len(encoded)),
    )
