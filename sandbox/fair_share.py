"""Which item is next: queues by domain, served in proportion to weights.

A domain's account holds the cost of what it has used, cost being the dominant share of an
item (see `placement`) times seconds. The domain with the least

    key = (used + (running + held) * horizon_seconds) / weight

is next: what it has used until now, and will have used a horizon from now. The past makes
up for long items and for shares smaller than one item; the horizon divides an empty pool
by weight at once, before anything was used. A domain that wakes is taken to have used as
much for its weight as the domain served last, so that idling earns no credit; neither is
a domain punished for having used what the others left idle.
"""

import dataclasses
from collections.abc import Collection, Mapping

from sandbox.items import Need
from sandbox.lazy_heap import LazyHeap

# Keys grow between a domain's events as its items run; one this old is computed again
# before it decides. A domain costs so at most one update a second, however many decisions.
_STALE_SECONDS = 1.0

Rank = tuple[float, int]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Account:
    """A domain: what it used until `since`, what it uses now, and its items by need."""

    name: str
    weight: float
    since: float
    used: float = 0.0
    key: float = 0.0
    running: int = 0  # costs, integers so that they return to 0
    held: int = 0
    lanes: dict[Need, LazyHeap[str]] = dataclasses.field(default_factory=dict)
    active: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The next item; `passed`: an item before it in line, for which nothing has room.

    blocked: only the worker with the free room that was asked for can have room.
    """

    item_id: str
    need: Need
    blocked: bool
    passed: str | None


class FairShare:
    """The queued items of all domains. Costs come from the caller."""

    def __init__(self, *, weights: Mapping[str, float], horizon_seconds: float):
        self._weights = weights
        self._horizon = horizon_seconds
        self._accounts: dict[str, _Account] = {}
        # For each need, the domains that have such items, by (key, rank of the first).
        self._by_need: dict[Need, LazyHeap[str]] = {}
        # The needs themselves, by the first entry of each.
        self._open: LazyHeap[Need] = LazyHeap()
        self._blocked: LazyHeap[Need] = LazyHeap()
        self._virtual, self._virtual_at = 0.0, 0.0
        self._running, self._active_weight, self._num_active = 0, 0.0, 0

    def push(self, domain: str, need: Need, item_id: str, rank: Rank, now: float) -> None:
        account = self._account(domain, now)
        self._advance(now)
        if not account.lanes:
            self._settle(account, now)
            account.used = max(account.used, self._virtual * account.weight)
            self._rekey(account, now)
        lane = account.lanes.get(need)
        if lane is None:
            lane = account.lanes[need] = LazyHeap()
        lane.set(item_id, rank)
        self._set_active(account)
        self._place(account, need)

    def discard(self, domain: str, need: Need, item_id: str, now: float) -> None:
        """The item leaves the queue: served, held or given up."""
        account = self._accounts[domain]
        self._advance(now)
        lane = account.lanes[need]
        lane.discard(item_id)
        if not lane:
            del account.lanes[need]
        self._set_active(account)
        self._place(account, need)

    def block(self, need: Need) -> None:
        """No worker has room for it: it is served as room comes free, see `choose`."""
        self._open.discard(need)
        self._blocked.set(need, self._by_need[need].first())

    def charge(self, domain: str, now: float, *, running: int = 0, held: int = 0) -> None:
        """From now on the domain uses and holds so much more (or, negative, less)."""
        account = self._account(domain, now)
        self._advance(now)
        self._settle(account, now)
        account.running += running
        account.held += held
        self._running += running
        self._set_active(account)
        self._rekey(account, now)

    def choose(
        self, now: float, *, free: Need | None, hopeless: Collection[Need]
    ) -> Choice | None:
        """The item of least key, of those not blocked and those within `free`.

        It stays queued. hopeless: needs that `Choice.passed` leaves out.
        """
        while True:
            found, blocked = self._open.first(), False
            within = self._first_within(free) if free is not None else None
            if within is not None and (found is None or within < found):
                found, blocked = within, True
            if found is None:
                return None
            (_, domain), need = found
            account = self._accounts[domain]
            if account.running and now - account.since > _STALE_SECONDS:
                self._settle(account, now)
                self._rekey(account, now)
                continue
            self._virtual, self._virtual_at = account.used / account.weight, now
            passed = self._blocked.first()
            if passed and passed[1] in hopeless:
                others = (e for e in self._blocked.items() if e[0] not in hopeless)
                passed = min(((entry, need) for need, entry in others), default=None)
            before = passed is not None and passed < found
            return Choice(
                self._head(domain, need),
                need,
                blocked,
                self._head(passed[0][1], passed[1]) if passed and before else None,
            )

    def _first_within(self, free: Need) -> tuple | None:
        cpus, memory, disk, gpus = free
        best = None
        for need, entry in self._blocked.items():
            if (
                need[0] <= cpus
                and need[1] <= memory
                and need[2] <= disk
                and need[3] <= gpus
                and (best is None or entry < best[0])
            ):
                best = entry, need
        return best

    def _head(self, domain: str, need: Need) -> str:
        head = self._accounts[domain].lanes[need].first()
        assert head is not None  # a lane without items is not kept
        return head[1]

    def _account(self, domain: str, now: float) -> _Account:
        account = self._accounts.get(domain)
        if account is None:
            weight = self._weights.get(domain, 1.0)
            account = _Account(name=domain, weight=weight, since=now)
            self._accounts[domain] = account
        return account

    def _settle(self, account: _Account, now: float) -> None:
        account.used += account.running * (now - account.since)
        account.since = now

    def _rekey(self, account: _Account, now: float) -> None:
        committed = (account.running + account.held) * self._horizon
        account.key = (account.used + committed) / account.weight
        for need in account.lanes:
            self._place(account, need)

    def _place(self, account: _Account, need: Need) -> None:
        """The domain's place among those with items of this need, and the need's."""
        lane = account.lanes.get(need)
        domains = self._by_need.get(need)
        if domains is None:
            domains = self._by_need[need] = LazyHeap()
        if lane is None:
            domains.discard(account.name)
        else:
            head = lane.first()
            assert head is not None
            domains.set(account.name, (account.key, head[0]))
        first = domains.first()
        if first is None:
            del self._by_need[need]
            self._open.discard(need)
            self._blocked.discard(need)
        elif need in self._blocked:
            self._blocked.set(need, first)
        else:
            self._open.set(need, first)

    def _set_active(self, account: _Account) -> None:
        active = bool(account.lanes or account.running)
        if active != account.active:
            account.active = active
            self._num_active += 1 if active else -1
            self._active_weight += account.weight if active else -account.weight
            if not self._num_active:
                self._active_weight = 0.0  # and no rounding stays behind

    def _advance(self, now: float) -> None:
        """Virtual time, use over weight, goes at the average of the domains at work."""
        if self._num_active:
            elapsed = now - self._virtual_at
            self._virtual += self._running * elapsed / self._active_weight
        self._virtual_at = now
