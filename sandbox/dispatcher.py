"""What a pool's thread does: hands work to workers, and makes results of what comes back.

The scheduler decides what runs where and when it is tried again; here its decisions meet
the links to the workers, and whoever waits. Everything runs in one event loop.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from sandbox.items import (
    Change,
    Item,
    Lease,
    QueueFull,
    Resources,
    SchedulerConfig,
    TooLarge,
)
from sandbox.metrics import Metrics
from sandbox.protocol import Output, Result
from sandbox.scheduler import Scheduler
from sandbox.session import Session, SessionFailed
from sandbox.sessions import Cancel, Done, Failed, Open, Reply, Run
from sandbox.workers import Link, WorkerLost

_SLACK_SECONDS = 20.0  # beyond a job's own limits, before its worker counts as stuck
_OPEN_SECONDS = 60.0
_FAILURES_IN_A_ROW = 5  # of a worker's sandboxes, before it is replaced


@dataclasses.dataclass
class Work:
    """An item of the scheduler's, and who waits for what comes of it."""

    future: Future
    request: Run | Open
    submitted: float
    placed: float = 0.0
    link: Link | None = None


@dataclasses.dataclass
class _Family:
    """A session, its forks, and the lease that they live in."""

    lease: Lease
    members: set[Session] = dataclasses.field(default_factory=set)


class Dispatcher:
    """Of one pool: its queue, its links, its open sessions; `workers.Members` as well.

    call: runs a coroutine in the pool's loop, from any thread.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        metrics: Metrics,
        call: Callable[[Coroutine[Any, Any, Any]], Future],
    ):
        self._scheduler = Scheduler(config)
        assert config.largest is not None
        self._largest = config.largest
        self._metrics = metrics
        self._call = call
        self._work: dict[str, Work] = {}
        self._families: dict[str, _Family] = {}  # by their first session's item
        self._links: dict[str, Link] = {}
        self._failures: Counter[str] = Counter()  # by worker, one after the other
        self._tasks: set[asyncio.Task] = set()
        self._stirred = asyncio.Event()  # there may be something to hand out
        metrics.watch(
            {
                "queued": ("Waiting.", lambda: self._scheduler.num_queued),
                "leased": ("Placed on workers.", lambda: self._scheduler.num_leased),
                "workers": ("That are up.", lambda: len(self._links)),
                "sessions": ("That are open.", self._num_sessions),
            }
        )

    @property
    def is_saturated(self) -> bool:
        return self._scheduler.is_saturated()

    def enter(self, item: Item, work: Work) -> None:
        """Queues the work; refused, it is resolved at once."""
        try:
            is_new = self._scheduler.submit(item, time.monotonic())
        except (QueueFull, TooLarge) as error:
            reason = "queue_full" if isinstance(error, QueueFull) else "too_large"
            self._resolve(item.item_id, work, failed(item.item_id, reason, str(error)))
            return
        if is_new:
            self._work[item.item_id] = work
            self._stirred.set()
        else:
            self._resolve(item.item_id, work, failed(item.item_id, "id_known"))

    def cancel(self, item_id: str) -> None:
        change = self._scheduler.cancel(item_id, time.monotonic())
        if change is not None:
            self._apply(change, None)

    async def close(self) -> None:
        """Resolves everything as `pool_closed`; the workers are gone already."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for item_id, work in list(self._work.items()):
            self._resolve(item_id, work, failed(item_id, "pool_closed"))
        self._work.clear()
        for family in list(self._families.values()):
            for session in list(family.members):
                session.lose("pool_closed")

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Workers.

    def joined(self, worker_id: str, link: Link, capacity: Resources) -> None:
        """See `workers.Members`, like the next two."""
        self._links[worker_id] = link
        self._scheduler.join(worker_id, capacity, time.monotonic())
        self._stirred.set()

    def left(self, worker_id: str, lost: WorkerLost) -> None:
        del self._links[worker_id]
        self._failures.pop(worker_id, None)
        for change in self._scheduler.leave(worker_id, time.monotonic()):
            self._apply(change, failed(change.item_id, lost.reason, lost.detail))
        self._stirred.set()

    def failed_to_join(self, lost: WorkerLost) -> None:
        if self._links:
            return
        now = time.monotonic()
        self._scheduler.join("none", self._largest, now)
        for lease in self._scheduler.next_leases(now):
            self._finish(lease, failed(lease.item_id, lost.reason, lost.detail))
        self._scheduler.leave("none", time.monotonic())
        self._stirred.set()

    # Work.

    async def run(self) -> None:
        """Hands out work whenever something has changed, or time has; until cancelled."""
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

    async def _attempt(self, lease: Lease) -> None:
        """One lease of a job, from its request to its reply."""
        work = self._work.get(lease.item_id)
        if work is None:
            return
        if not work.future.running() and not work.future.set_running_or_notify_cancel():
            self._scheduler.cancel(lease.item_id, time.monotonic())
            self._finish(lease, failed(lease.item_id, "cancelled"), began=False)
            del self._work[lease.item_id]
            return
        work.placed = work.placed or time.monotonic()
        link = work.link = self._links[lease.worker_id]
        try:
            reply = await self._ask(link, lease, work.request)
        except WorkerLost as lost:
            reply = failed(lease.item_id, lost.reason, lost.detail)
        if isinstance(work.request, Open) and isinstance(reply, Done):
            self._begin(lease, work, link, reply)
        else:
            self._finish(lease, reply)

    async def _ask(self, link: Link, lease: Lease, request: Run | Open) -> Reply:
        try:
            async with asyncio.timeout(_patience(request)):
                return await link.request(lease.lease_id, request)
        except TimeoutError:
            detail = f"no answer in {_patience(request):.0f} s"
            self._give_up(lease.worker_id, "worker_unresponsive", detail)
            raise WorkerLost("worker_unresponsive", detail) from None

    def _give_up(self, worker_id: str, reason: str, detail: str) -> None:
        """Ends a worker, which from now on gets nothing more; another will come."""
        if worker_id in self._links:
            self._scheduler.drain(worker_id, time.monotonic())
            self._links[worker_id].kill(reason, detail)

    def _finish(self, lease: Lease, reply: Reply, *, began: bool = True) -> None:
        """The end of an attempt: of the work as well, or it waits for the next one."""
        if isinstance(reply, Failed):
            reply = failed(lease.item_id, reply.reason, reply.detail)
        assert isinstance(reply, Result)
        self._judge(lease.worker_id, reply)
        change = self._scheduler.complete(
            lease.lease_id, reply.outcome, reply.reason, time.monotonic(), began=began
        )
        if change is not None:
            self._apply(change, reply)
        self._stirred.set()

    def _judge(self, worker_id: str, result: Result) -> None:
        """A worker whose sandboxes fail one after the other is replaced."""
        if result.reason != "sandbox_failed":
            self._failures[worker_id] = 0
            return
        self._failures[worker_id] += 1
        if self._failures[worker_id] >= _FAILURES_IN_A_ROW:
            detail = f"{_FAILURES_IN_A_ROW} sandboxes failed: {result.stderr.text()}"
            self._give_up(worker_id, "sandbox_failed", detail)

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
            result = failed(change.item_id, change.reason)
        result = dataclasses.replace(result, attempts=max(change.attempts, 1))
        self._resolve(change.item_id, work, result)

    async def _kill_attempt(self, link: Link, lease_id: str) -> None:
        with contextlib.suppress(WorkerLost):
            await link.request(f"cancel/{lease_id}", Cancel(request_id=lease_id))

    def _resolve(self, item_id: str, work: Work, result: Result) -> None:
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
        self._metrics.count_result(work.request.job.domain, result)
        work.future.set_result(result)

    # Sessions.

    def _begin(self, lease: Lease, work: Work, link: Link, reply: Done) -> None:
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
                call=self._call,
                on_fork=lambda parent, forked: join(forked, parent.state),
                on_close=lambda session: self._leave(family, session),
                metrics=self._metrics,
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

    async def close_idle(self, idle_seconds: float) -> None:
        """Ends sessions that nobody has used for so long; until cancelled."""
        while True:
            await asyncio.sleep(min(idle_seconds / 4, 10.0))
            bound = time.monotonic() - idle_seconds
            for family in list(self._families.values()):
                for session in list(family.members):
                    if session.used_at < bound:
                        self._spawn(session.end("idle_timeout"))


def _patience(request: Run | Open) -> float:
    if isinstance(request, Open):
        return _OPEN_SECONDS
    job = request.job
    seconds = job.grading.limits.wall_seconds + _SLACK_SECONDS
    return seconds + (job.execution.limits.wall_seconds if job.execution else 0.0)


def failed(job_id: str, reason: str, detail: str = "") -> Result:
    """What came of a job that never reached a verdict."""
    encoded = detail.encode(errors="replace")
    return Result(
        job_id=job_id,
        outcome="infra_fail",
        reason=reason,
        stderr=Output(tail=encoded, total_bytes=len(encoded)),
    )
