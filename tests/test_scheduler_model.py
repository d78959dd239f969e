"""The scheduler beside a model: any order of events, and every rule still holds."""

import collections

from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.items import RESOLVED, SchedulerConfig
from sandbox.lazy_heap import LazyHeap
from sandbox.scheduler import Scheduler
from tests.scheduling import cpus, item, worker


class Model:
    """What the caller can know, kept beside the scheduler to check it."""

    capacity = worker(4, gpus=1)
    config = SchedulerConfig(
        largest=capacity,
        weights={"x": 2},
        heartbeat_seconds=10.0,
        lease_seconds=15.0,
        reserve_after_seconds=1.0,
    )

    def __init__(self):
        self.scheduler = Scheduler(self.config)
        self.now, self.serial = 0.0, 0
        self.items, self.open = {}, {}
        self.heard, self.leases, self.expires = {}, {}, {}
        self.old, self.delivered = [], collections.Counter()
        self.resolved = {}

    def note(self, *changes):
        for change in changes:
            if change is not None and change.kind == RESOLVED:
                assert change.item_id not in self.resolved
                self.resolved[change.item_id] = change
                del self.open[change.item_id]

    def forget(self, lease_ids):
        for lease_id in lease_ids:
            self.old.append(self.leases.pop(lease_id))
            del self.expires[lease_id]

    def lose(self, worker_id):
        del self.heard[worker_id]
        self.forget([i for i, x in self.leases.items() if x.worker_id == worker_id])

    def submit(self, number):
        self.serial += 1
        name = f"i{self.serial}"
        new = item(
            name,
            domain="xyz"[number % 3],
            resources=cpus((0.5, 1, 4)[number % 3], gpus=int(number % 7 == 0)),
            priority=number % 2,
            deadline=self.now + number if number % 5 == 0 else None,
            safe_to_repeat=number % 4 != 0,
        )
        assert self.scheduler.submit(new, self.now)
        self.items[name] = self.open[name] = new
        assert not self.scheduler.submit(new, self.now)

    def join(self, number):
        name = f"w{number % 4}"
        if name in self.heard:
            self.lose(name)
        self.note(*self.scheduler.join(name, self.capacity, self.now))
        self.heard[name] = self.now

    def beat(self, number):
        for i, name in enumerate(sorted(self.heard)):
            if number % 4 == i:
                continue
            mine = [k for k, x in self.leases.items() if x.worker_id == name]
            told = [lease_id for j, lease_id in enumerate(mine) if (number + j) % 5]
            stop = self.scheduler.heartbeat(name, [*told, "unknown"], self.now)
            assert "unknown" in stop
            for lease_id in told:
                assert (lease_id in stop) == (
                    self.leases[lease_id].item_id not in self.open
                )
                self.expires[lease_id] = self.now + self.config.lease_seconds
            self.heard[name] = self.now

    def complete(self, number):
        if not self.leases:
            return
        lease_id = sorted(self.leases)[number % len(self.leases)]
        lease = self.leases[lease_id]
        was_open = lease.item_id in self.open
        outcome, began = (
            ("ok", True),
            ("infra_fail", True),
            ("grader_fail", True),
            ("infra_fail", False),
        )[number % 4]
        change = self.scheduler.complete(lease_id, outcome, "why", self.now, began=began)
        assert (change is not None) == was_open
        if change is not None and not began:
            self.delivered[lease.item_id] -= 1
        self.note(change)
        self.forget([lease_id])

    def late(self, number):
        if self.old:
            lease = self.old[number % len(self.old)]
            assert self.scheduler.complete(lease.lease_id, "ok", "late", self.now) is None

    def cancel(self, number):
        if self.open:
            name = sorted(self.open)[number % len(self.open)]
            self.note(self.scheduler.cancel(name, self.now))
            assert name in self.resolved
            assert self.scheduler.cancel(name, self.now) is None

    def leave(self, number):
        if self.heard:
            name = sorted(self.heard)[number % len(self.heard)]
            if number % 3 == 0:
                self.scheduler.drain(name, self.now)
                return
            self.note(*self.scheduler.leave(name, self.now))
            self.lose(name)

    def wait(self, number):
        self.go(self.now + number / 4)

    def go(self, until):
        event = self.scheduler.next_event(self.now)
        assert event is None or event >= self.now
        if event is None or event > until:
            assert self.scheduler.expire(until) == []
            self.now = until
        else:
            self.now = event
            self.note(*self.scheduler.expire(self.now))
        for name in [n for n, t in self.heard.items() if t + 10.0 <= self.now]:
            self.lose(name)
        self.forget([i for i, t in self.expires.items() if t <= self.now])
        event = self.scheduler.next_event(self.now)
        assert event is None or event > self.now

    def place(self, _=0):
        self.note(*self.scheduler.expire(self.now))
        for lease in self.scheduler.next_leases(self.now):
            assert lease.item_id in self.open and lease.worker_id in self.heard
            assert lease.item_id not in {
                other.item_id
                for other in self.leases.values()
                if other.item_id in self.open
            }
            self.leases[lease.lease_id] = lease
            self.expires[lease.lease_id] = lease.expires
            self.delivered[lease.item_id] += 1
        self.check()

    def check(self):
        assert self.scheduler.num_leased == len(self.leases)
        used = collections.defaultdict(lambda: [0, 0, 0, 0])
        for lease in self.leases.values():
            for i, units in enumerate(self.items[lease.item_id].resources.units):
                used[lease.worker_id][i] += units
        for units in used.values():
            assert all(a <= b for a, b in zip(units, self.capacity.units, strict=True))
        running = {x.item_id for x in self.leases.values()} & set(self.open)
        assert self.scheduler.num_queued == len(self.open) - len(running)
        for name, count in self.delivered.items():
            if not self.items[name].safe_to_repeat:
                assert count <= 1, f"{name} may have run {count} times"
        assert set(self.open) | set(self.resolved) == set(self.items)


ACTIONS = ["submit"] * 5 + ["place"] * 4 + ["complete", "wait", "beat"] * 3
ACTIONS += ["join", "late", "cancel", "leave"]


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 60)), min_size=40, max_size=150
    )
)
def test_whatever_happens_every_item_resolves_once(actions):
    model = Model()
    model.join(0)
    for name, number in actions:
        getattr(model, name)(number)
    # In the end everything runs to its end.
    for round_number in range(10_000):
        if not model.open:
            break
        model.join(round_number)
        model.place()
        for _ in range(len(model.leases)):
            model.complete(0)
        model.wait(4)
    assert set(model.resolved) == set(model.items)
    model.check()
    assert model.scheduler.num_queued == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 9))))
def test_a_lazy_heap_is_a_dictionary_with_a_least_entry(changes):
    heap, expected = LazyHeap(), {}
    for key, priority in changes * 20:
        if priority is None:
            heap.discard(key)
            expected.pop(key, None)
        else:
            heap.set(key, priority)
            expected[key] = priority
        least = min(((p, k) for k, p in expected.items()), default=None)
        assert heap.first() == least
        assert len(heap) == len(expected)
