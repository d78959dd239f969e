"""Which worker takes an item: capacities, what is free, and reservations for the large.

Best fit: of the workers that have room, the one with the fewest free GPUs, then the
fewest free CPUs, so that whole workers stay free for large items and GPUs for those who
need them. Workers are kept in that order. A need that nothing has room for need not be
searched for again until the room of a worker has `grown`.
"""

import bisect
import dataclasses

from sandbox.items import Need, Resources

_LOOK_AT = 16  # workers, for a reservation


def fits(need: Need, free: Need) -> bool:
    return (
        need[0] <= free[0]
        and need[1] <= free[1]
        and need[2] <= free[2]
        and need[3] <= free[3]
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class Worker:
    """What it has, what is free, its leases (a dict as an ordered set)."""

    resources: Resources
    capacity: Need
    free: Need
    heard: float
    leases: dict[str, None] = dataclasses.field(default_factory=dict)
    listed: tuple[int, int, str] | None = None  # its entry in the order
    reserved_for: tuple[Need, str] | None = None
    held: int = 0  # the cost for which it is reserved


class Placement:
    """The living workers by id, and where a need has room.

    grown: workers with more room than when the caller last removed them here.
    too_large: needs that no worker could hold of those that are not reserved.
    """

    def __init__(self, *, max_held_share: float):
        self.workers: dict[str, Worker] = {}
        self.grown: dict[str, None] = {}
        self.too_large: set[Need] = set()
        self._max_held_share = max_held_share
        self._held = self._turn = 0
        self._order: list[tuple[int, int, str]] = []
        self._totals = [0, 0, 0, 0]
        self._ready: list[str] = []
        self._costs: dict[Need, int] = {}

    def join(self, worker_id: str, resources: Resources, now: float) -> None:
        capacity = resources.units
        worker = Worker(resources=resources, capacity=capacity, free=capacity, heard=now)
        self.workers[worker_id] = worker
        self._totals = [a + b for a, b in zip(self._totals, worker.capacity)]
        self._costs.clear()
        self.too_large.clear()
        self._list(worker_id, worker)

    def remove(self, worker_id: str) -> None:
        worker = self.workers[worker_id]
        self.close(worker_id)
        del self.workers[worker_id]
        self._totals = [a - b for a, b in zip(self._totals, worker.capacity)]
        self._costs.clear()

    def close(self, worker_id: str) -> str | None:
        """Nothing more is placed there; the item for which it was reserved, if any."""
        worker = self.workers[worker_id]
        self._unlist(worker)
        self.grown.pop(worker_id, None)
        if worker.reserved_for is None:
            return None
        _, item_id = worker.reserved_for
        worker.reserved_for = None
        self._held -= worker.held
        return item_id

    def cost(self, need: Need) -> int:
        """The dominant share of the living workers' total, in millionths of a CPU.

        In CPUs and not as a fraction, so that a pool that grows leaves it as it is.
        """
        cost = self._costs.get(need)
        if cost is None:
            cpus = self._totals[0] * 1000
            cost = self._costs[need] = max(
                units * cpus // total if total else 0
                for units, total in zip(need, self._totals)
            )
        return cost

    def find(self, need: Need, *, avoid: str | None) -> str | None:
        """The best fit, on another worker than `avoid` if there is one."""
        fallback = None
        start = bisect.bisect_left(self._order, (need[3], need[0], ""))
        for index in range(start, len(self._order)):
            worker_id = self._order[index][2]
            if fits(need, self.workers[worker_id].free):
                if worker_id != avoid:
                    return worker_id
                fallback = worker_id
        return fallback

    def another(self, worker_id: str, need: Need) -> str:
        """Of those that have grown, another that has room; else the same."""
        for other in self.grown:
            if other != worker_id and fits(need, self.workers[other].free):
                return other
        return worker_id

    def take(self, worker_id: str, need: Need, lease_id: str) -> None:
        worker = self.workers[worker_id]
        worker.leases[lease_id] = None
        worker.free = tuple(a - b for a, b in zip(worker.free, need))  # type: ignore
        assert min(worker.free) >= 0, (worker_id, worker.free, need)
        if worker.listed:
            self._list(worker_id, worker, grown=False)

    def give(self, worker_id: str, need: Need, lease_id: str) -> None:
        worker = self.workers[worker_id]
        del worker.leases[lease_id]
        worker.free = tuple(a + b for a, b in zip(worker.free, need))  # type: ignore
        if worker.listed:
            self._list(worker_id, worker)
        elif worker.reserved_for and fits(worker.reserved_for[0], worker.free):
            self._ready.append(worker_id)

    def reserve(self, need: Need, item_id: str) -> str | None:
        """A worker of which from now on all room that frees is for this item only.

        The one that lacks least, of the next few in turn. None if enough room is held
        already, or no worker that is not reserved is so large.
        """
        most = self._max_held_share * self._totals[0] * 1000
        cost = self.cost(need)
        if need in self.too_large or (self._held and self._held + cost > most):
            return None
        best, seen, start = None, 0, self._turn
        for i in range(len(self._order)):
            worker_id = self._order[(start + i) % len(self._order)][2]
            worker = self.workers[worker_id]
            if fits(need, worker.capacity):
                lacks = max(
                    (units - free) / capacity if capacity else 0.0
                    for units, free, capacity in zip(need, worker.free, worker.capacity)
                )
                if best is None or lacks < best[0]:
                    best = lacks, worker_id
                seen += 1
                self._turn = start + i + 1
                if seen == _LOOK_AT:
                    break
        if best is None:
            self.too_large.add(need)
            return None
        worker = self.workers[best[1]]
        self._unlist(worker)
        self.grown.pop(best[1], None)
        worker.reserved_for, worker.held = (need, item_id), cost
        self._held += cost
        if best[0] <= 0:
            self._ready.append(best[1])
        return best[1]

    def unreserve(self, worker_id: str) -> None:
        """The worker is for everybody again."""
        self.close(worker_id)
        self.too_large.clear()
        self._list(worker_id, self.workers[worker_id])

    def take_ready(self) -> tuple[str, str] | None:
        """(worker, item) of a reservation that has come to fit, each told of once."""
        while self._ready:
            worker_id = self._ready.pop()
            worker = self.workers.get(worker_id)
            if worker and worker.reserved_for and fits(worker.reserved_for[0], worker.free):
                return worker_id, worker.reserved_for[1]
        return None

    def _list(self, worker_id: str, worker: Worker, *, grown: bool = True) -> None:
        self._unlist(worker)
        worker.listed = (worker.free[3], worker.free[0], worker_id)
        bisect.insort(self._order, worker.listed)
        if grown:
            self.grown[worker_id] = None

    def _unlist(self, worker: Worker) -> None:
        if worker.listed:
            del self._order[bisect.bisect_left(self._order, worker.listed)]
            worker.listed = None
