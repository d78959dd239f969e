"""The scheduler of a sandbox pool: items and workers in, leases and outcomes out.

Pure logic: it reads no clock, starts no thread and does no IO; `now` is the caller's, and
never goes back. Its caller runs, whenever something arrived or `next_event` is reached:

    changes = scheduler.expire(now)          # what ended by time alone
    leases = scheduler.next_leases(now)      # what to send to which worker
    wake_at = scheduler.next_event(now)

The rules:
- Between domains: fair share of what was really used, by weight (`fair_share`).
- Within a domain: the item of least `submitted - priority * ageing_seconds`. One priority
  more is worth that many seconds, so that nothing waits for ever behind the urgent.
- Between workers: best fit (`placement`). An item that is first in line for
  `reserve_after_seconds`, but passed over as nothing has room for it, gets a worker
  reserved, and all room that comes free there.
- A lease may have been delivered once it was handed out. If it is lost, its item runs
  again only if that is safe, or the caller knows that it never began.
- Every item resolves exactly once; what an old lease says is refused.
"""

import collections
import dataclasses
from collections.abc import Iterable

from sandbox.fair_share import FairShare
from sandbox.items import (
    REQUEUED,
    RESOLVED,
    Change,
    Item,
    Lease,
    Need,
    QueueFull,
    Resources,
    SchedulerConfig,
    TooLarge,
    UnknownWorker,
)
from sandbox.lazy_heap import LazyHeap
from sandbox.placement import Placement, fits


@dataclasses.dataclass(slots=True, kw_only=True)
class _Record:
    """An item that is not resolved. state: waiting, queued, held or leased."""

    item: Item
    need: Need
    rank: tuple[float, int]
    state: str = "waiting"
    queued_at: float = 0.0
    attempt: int = 0
    cost: int = 0
    holder: str | None = None  # the worker whose room is held for it
    last_worker: str | None = None  # that had its last attempt
    lease_id: str | None = None


@dataclasses.dataclass(slots=True)
class _Running:
    """A lease, whose resources are taken. doomed: its item was resolved without it."""

    record: _Record
    worker_id: str
    expires: float
    doomed: bool = False


class Scheduler:
    """See the module."""

    def __init__(self, config: SchedulerConfig = SchedulerConfig()):
        self._config = config
        self._queues = FairShare(
            weights=config.weights, horizon_seconds=config.horizon_seconds
        )
        self._placement = Placement(max_held_share=config.max_held_share)
        self._records: dict[str, _Record] = {}
        self._leases: dict[str, _Running] = {}
        self._resolved: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._timers: LazyHeap[tuple[str, str]] = LazyHeap()
        # What workers have, present, dead or declared, that items are admitted for.
        self._known: dict[Resources, Need] = {}
        self._dead: dict[str, Resources] = {}  # died, and may come back
        self._queued: collections.Counter[str] = collections.Counter()
        self._num_queued = self._serial = 0
        self._note_known()

    @property
    def num_queued(self) -> int:
        return self._num_queued

    @property
    def num_leased(self) -> int:
        return len(self._leases)

    def is_saturated(self, domain: str | None = None) -> bool:
        """Whether the sampler should pause: all of it, or also this domain alone."""
        return self._num_queued >= self._config.max_queued or (
            domain is not None
            and self._queued[domain] >= self._config.max_queued_per_domain
        )

    # Workers.

    def join(self, worker_id: str, capacity: Resources, now: float) -> list[Change]:
        """A worker is there, empty: under an id that is present, it died in between."""
        changes = []
        if worker_id in self._placement.workers:
            changes = self._lose_worker(worker_id, now)
        self._dead.pop(worker_id, None)
        self._placement.join(worker_id, capacity, now)
        self._note_known()
        self._timers.set(("worker", worker_id), now + self._config.heartbeat_seconds)
        return changes

    def drain(self, worker_id: str, now: float) -> None:
        """It gets nothing more. Have it leave once it has no leases."""
        self._worker(worker_id)
        self._release_hold(self._placement.close(worker_id), now)

    def leave(self, worker_id: str, now: float) -> list[Change]:
        """It goes for good; what it still had ends as `worker_died`."""
        self._worker(worker_id)
        changes = self._lose_worker(worker_id, now)
        del self._dead[worker_id]
        self._note_known()
        return changes

    def heartbeat(self, worker_id: str, lease_ids: Iterable[str], now: float) -> list[str]:
        """The worker lives and has these leases; those among them that it must stop.

        Raises:
          UnknownWorker: it must stop all that it has, and join again.
        """
        self._worker(worker_id).heard = now
        expires = now + self._config.lease_seconds
        stop = []
        for lease_id in lease_ids:
            running = self._leases.get(lease_id)
            if running is None or running.worker_id != worker_id:
                stop.append(lease_id)
                continue
            running.expires = expires
            if running.doomed:
                stop.append(lease_id)
        return stop

    # Items.

    def submit(self, item: Item, now: float) -> bool:
        """Whether the item is new; an id that is known is not queued again.

        Raises:
          TooLarge: no worker that is here, has died or is declared could hold it.
          QueueFull: at twice the bounds of `is_saturated`.
        """
        if item.item_id in self._records or item.item_id in self._resolved:
            return False
        self._admit(item)
        self._serial += 1
        rank = (now - item.priority * self._config.ageing_seconds, self._serial)
        record = _Record(item=item, need=item.resources.units, rank=rank)
        self._records[item.item_id] = record
        self._count(record, 1)
        if item.deadline is not None:
            self._timers.set(("deadline", item.item_id), item.deadline)
        self._enqueue(record, now)
        return True

    def cancel(self, item_id: str, now: float) -> Change | None:
        """Resolves it as `cancelled`; None if it is not known or has been resolved."""
        record = self._records.get(item_id)
        return record and self._give_up(record, "cancelled", now)

    def next_leases(self, now: float) -> list[Lease]:
        """Everything that can be placed now, in the order of the rules; `expire` first."""
        placement, queues = self._placement, self._queues
        leases = []
        while True:
            while ready := placement.take_ready():
                worker_id, item_id = ready
                leases.append(self._grant(self._records[item_id], worker_id, now))
            grown = next(iter(placement.grown), None)
            free = placement.workers[grown].free if grown is not None else None
            choice = queues.choose(now, free=free, hopeless=placement.too_large)
            if choice is None:
                if grown is None:
                    return leases
                del placement.grown[grown]
                continue
            record = self._records[choice.item_id]
            avoid = record.last_worker
            if not choice.blocked:
                worker_id = placement.find(choice.need, avoid=avoid)
            elif grown == avoid and grown is not None:
                worker_id = placement.another(grown, choice.need)
            else:
                worker_id = grown
            if worker_id is None:
                queues.block(choice.need)
            elif choice.passed is None or not self._reserve(choice.passed, now):
                leases.append(self._grant(record, worker_id, now))

    def complete(
        self, lease_id: str, outcome: str, reason: str, now: float, *, began: bool = True
    ) -> Change | None:
        """The lease has ended; None if its item was resolved or given to another.

        began: False if the attempt certainly had no effect, as it was never delivered.
        """
        rule = self._config.retries.rule(outcome, reason)
        running = self._leases.get(lease_id)
        if running is None:
            return None
        self._free(lease_id, now)
        if running.doomed:
            return None
        record = running.record
        may_repeat = record.item.safe_to_repeat or not began
        if rule is None or not may_repeat or record.attempt >= rule.max_attempts:
            return self._resolve(record, outcome, reason, now)
        record.state, record.lease_id = "waiting", None
        self._count(record, 1)
        ready_at = now + rule.delay(record.item.item_id, record.attempt)
        self._timers.set(("ready", record.item.item_id), ready_at)
        return self._change(record, REQUEUED, outcome, reason)

    # Time.

    def expire(self, now: float) -> list[Change]:
        """Everything that happens by time alone until `now`."""
        changes = []
        while (due := self.next_event(now)) is not None and due <= now:
            entry = self._timers.first()
            assert entry is not None  # next_event has just seen it
            kind, name = entry[1]
            self._timers.discard(entry[1])
            if kind == "worker":
                changes += self._lose_worker(name, now)
            elif kind == "lease":
                change = self.complete(name, "infra_fail", "lease_expired", now)
                changes.append(change and dataclasses.replace(change, kill=name))
            elif kind == "deadline":
                changes.append(self._give_up(self._records[name], "deadline_passed", now))
            else:
                self._enqueue(self._records[name], now)
        return [change for change in changes if change is not None]

    def next_event(self, now: float) -> float | None:
        """When `expire` will next have something to do; not before `now`."""
        while entry := self._timers.first():
            when, key = entry
            kind, name = key
            due = when
            if kind == "lease":
                due = self._leases[name].expires
            elif kind == "worker":
                heard = self._placement.workers[name].heard
                due = heard + self._config.heartbeat_seconds
            if due <= when:
                return max(when, now)
            self._timers.set(key, due)  # heartbeats move it without touching the heap
        return None

    # Parts.

    def _worker(self, worker_id: str):
        worker = self._placement.workers.get(worker_id)
        if worker is None:
            raise UnknownWorker(
                f"Worker {worker_id!r} is none of the {len(self._placement.workers)} "
                "present; it must join again, empty."
            )
        return worker

    def _admit(self, item: Item) -> None:
        need = item.resources.units
        if not any(fits(need, units) for units in self._known.values()):
            known = [*self._known] or "none has joined"
            raise TooLarge(
                f"Item {item.item_id!r} needs {item.resources}, more than any worker has: "
                f"{known}. Ask for less, or declare the worker that "
                "will join as SchedulerConfig.largest."
            )
        config, queued = self._config, self._queued[item.domain]
        if (
            self._num_queued >= 2 * config.max_queued
            or queued >= 2 * config.max_queued_per_domain
        ):
            raise QueueFull(
                f"{self._num_queued} items are queued, {queued} of domain "
                f"{item.domain!r}: twice max_queued={config.max_queued} or "
                f"max_queued_per_domain={config.max_queued_per_domain}. Wait while "
                "is_saturated(domain)."
            )

    def _count(self, record: _Record, change: int) -> None:
        self._num_queued += change
        self._queued[record.item.domain] += change

    def _enqueue(self, record: _Record, now: float) -> None:
        record.state, record.queued_at = "queued", now
        item = record.item
        self._queues.push(item.domain, record.need, item.item_id, record.rank, now)

    def _dequeue(self, record: _Record, now: float) -> None:
        item = record.item
        self._queues.discard(item.domain, record.need, item.item_id, now)

    def _reserve(self, item_id: str, now: float) -> bool:
        """The item is passed over. Whether to choose again: it has waited enough, and a
        worker's room is held for it from now on, or turned out to be hopeless.
        """
        record = self._records[item_id]
        if now - record.queued_at < self._config.reserve_after_seconds:
            return False
        record.holder = self._placement.reserve(record.need, item_id)
        if record.holder is None:
            return record.need in self._placement.too_large
        self._dequeue(record, now)
        record.state, record.cost = "held", self._placement.cost(record.need)
        self._queues.charge(record.item.domain, now, held=record.cost)
        return True

    def _release_hold(self, item_id: str | None, now: float) -> None:
        """Its worker has closed: the item goes back to the queue."""
        if item_id is not None:
            record = self._records[item_id]
            self._queues.charge(record.item.domain, now, held=-record.cost)
            self._enqueue(record, now)

    def _grant(self, record: _Record, worker_id: str, now: float) -> Lease:
        item = record.item
        if record.state == "held":
            self._placement.unreserve(worker_id)
            self._queues.charge(item.domain, now, held=-record.cost)
        else:
            self._dequeue(record, now)
        self._count(record, -1)
        record.attempt += 1
        record.state, record.last_worker = "leased", worker_id
        record.cost = self._placement.cost(record.need)
        self._serial += 1
        lease_id = record.lease_id = f"{item.item_id}#{self._serial}"
        expires = now + self._config.lease_seconds
        self._leases[lease_id] = _Running(record, worker_id, expires)
        self._timers.set(("lease", lease_id), expires)
        self._placement.take(worker_id, record.need, lease_id)
        self._queues.charge(item.domain, now, running=record.cost)
        return Lease(
            lease_id=lease_id,
            item_id=item.item_id,
            worker_id=worker_id,
            attempt=record.attempt,
            expires=expires,
        )

    def _free(self, lease_id: str, now: float) -> None:
        running = self._leases.pop(lease_id)
        record = running.record
        self._timers.discard(("lease", lease_id))
        self._placement.give(running.worker_id, record.need, lease_id)
        self._queues.charge(record.item.domain, now, running=-record.cost)

    def _lose_worker(self, worker_id: str, now: float) -> list[Change]:
        worker = self._worker(worker_id)
        self._dead[worker_id] = worker.resources
        self._timers.discard(("worker", worker_id))
        self._release_hold(self._placement.close(worker_id), now)
        ended = [
            self.complete(lease_id, "infra_fail", "worker_died", now)
            for lease_id in list(worker.leases)
        ]
        self._placement.remove(worker_id)
        return [change for change in ended if change is not None]

    def _note_known(self) -> None:
        known = [worker.resources for worker in self._placement.workers.values()]
        known += self._dead.values()
        if self._config.largest is not None:
            known.append(self._config.largest)
        self._known = {resources: resources.units for resources in known}

    def _give_up(self, record: _Record, reason: str, now: float) -> Change:
        """Resolved now; a lease goes on taking its resources until it is over."""
        if record.state == "queued":
            self._dequeue(record, now)
        elif record.state == "held":
            assert record.holder is not None
            self._placement.unreserve(record.holder)
            self._queues.charge(record.item.domain, now, held=-record.cost)
        elif record.state == "leased":
            assert record.lease_id is not None
            self._leases[record.lease_id].doomed = True
        if record.state != "leased":
            self._count(record, -1)
        return self._resolve(record, "infra_fail", reason, now)

    def _resolve(self, record: _Record, outcome: str, reason: str, now: float) -> Change:
        item_id = record.item.item_id
        del self._records[item_id]
        self._timers.discard(("deadline", item_id))
        self._timers.discard(("ready", item_id))
        self._resolved[item_id] = None
        if len(self._resolved) > self._config.remembered:
            self._resolved.popitem(last=False)
        return self._change(record, RESOLVED, outcome, reason)

    def _change(self, record: _Record, kind: str, outcome: str, reason: str) -> Change:
        running = self._leases.get(record.lease_id or "")
        return Change(
            item_id=record.item.item_id,
            kind=kind,
            outcome=outcome,
            reason=reason,
            attempts=record.attempt,
            kill=record.lease_id if running is not None else None,
        )
