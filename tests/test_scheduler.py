"""The scheduler: items resolve once, workers are never overfull, domains get shares."""

import collections
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.items import (
    REQUEUED,
    RESOLVED,
    Item,
    QueueFull,
    Resources,
    Retry,
    RetryPolicy,
    SchedulerConfig,
    TooLarge,
    UnknownWorker,
)
from sandbox.lazy_heap import LazyHeap
from sandbox.scheduler import Scheduler
from sandbox.simulation import Settings, simulate

ONE = Resources(cpus=1, memory_bytes=1, disk_bytes=0)


def cpus(number, *, memory_bytes=0, gpus=0):
    return Resources(cpus=number, memory_bytes=memory_bytes, disk_bytes=0, gpus=gpus)


def worker(number, *, gpus=0):
    return Resources(cpus=number, memory_bytes=1000, disk_bytes=1000, gpus=gpus)


def make(*capacities, **options):
    scheduler = Scheduler(SchedulerConfig(**options))
    for i, capacity in enumerate(capacities):
        scheduler.join(f"w{i}", worker(capacity), 0.0)
    return scheduler


def item(item_id, *, domain="d", resources=ONE, **options):
    return Item(item_id=item_id, domain=domain, resources=resources, **options)


def submit(scheduler, *item_ids, now=0.0, **options):
    for item_id in item_ids:
        assert scheduler.submit(item(item_id, **options), now)


def leased(scheduler, now=0.0):
    """{item: lease} of what is handed out now."""
    return {lease.item_id: lease for lease in scheduler.next_leases(now)}


def done(scheduler, lease, now, outcome="ok", reason="graded", **options):
    return scheduler.complete(lease.lease_id, outcome, reason, now, **options)


# Once.


def test_an_item_is_leased_and_resolves_once():
    scheduler = make(1)
    submit(scheduler, "a")
    assert not scheduler.submit(item("a"), 0.0)
    (lease,) = scheduler.next_leases(0.0)
    assert (lease.item_id, lease.worker_id, lease.attempt, lease.expires) == (
        "a",
        "w0",
        1,
        30.0,
    )
    assert scheduler.next_leases(0.0) == []
    assert not scheduler.submit(item("a"), 0.5)
    change = done(scheduler, lease, 1.0)
    assert (change.kind, change.outcome, change.reason) == (RESOLVED, "ok", "graded")
    assert done(scheduler, lease, 1.0) is None
    assert not scheduler.submit(item("a"), 2.0)
    assert (scheduler.num_queued, scheduler.num_leased) == (0, 0)


def test_resolved_ids_are_forgotten_in_the_end():
    scheduler = make(1, remembered=1)
    for name in "ab":
        submit(scheduler, name)
        done(scheduler, leased(scheduler)[name], 0.0)
    assert not scheduler.submit(item("b"), 0.0)
    assert scheduler.submit(item("a"), 0.0)


def test_a_lost_lease_is_tried_again_only_if_that_is_safe():
    scheduler = make(2)
    submit(scheduler, "safe", safe_to_repeat=True)
    submit(scheduler, "unsafe")
    leases = leased(scheduler)
    scheduler.heartbeat("w0", [], 9.0)
    scheduler.heartbeat("w0", [], 18.0)
    scheduler.heartbeat("w0", [], 27.0)
    assert scheduler.expire(29.9) == []
    changes = {change.item_id: change for change in scheduler.expire(30.0)}
    assert {name: change.kind for name, change in changes.items()} == {
        "safe": REQUEUED,
        "unsafe": RESOLVED,
    }
    for name, change in changes.items():
        assert (change.outcome, change.reason) == ("infra_fail", "lease_expired")
        assert change.kill == leases[name].lease_id
    # The results of the old leases come late.
    assert done(scheduler, leases["safe"], 31.0) is None
    assert done(scheduler, leases["unsafe"], 31.0) is None
    # The worker still has them, and must stop them.
    old = [lease.lease_id for lease in leases.values()]
    assert scheduler.heartbeat("w0", old, 31.0) == old
    scheduler.expire(31.0)
    again = leased(scheduler, 31.0)
    assert [(name, lease.attempt) for name, lease in again.items()] == [("safe", 2)]


def test_what_was_never_delivered_is_tried_again():
    scheduler = make(1)
    submit(scheduler, "a")
    lease = leased(scheduler)["a"]
    change = done(scheduler, lease, 0.0, "infra_fail", "not_sent", began=False)
    assert change.kind == REQUEUED


def test_heartbeats_renew_the_leases_they_list():
    scheduler = make(2, heartbeat_seconds=100.0)
    submit(scheduler, "a", "b")
    leases = leased(scheduler)
    assert scheduler.heartbeat("w0", [leases["a"].lease_id], 20.0) == []
    assert [change.item_id for change in scheduler.expire(49.0)] == ["b"]
    assert scheduler.next_event(49.0) == 50.0
    assert [change.item_id for change in scheduler.expire(50.0)] == ["a"]


# Workers.


def test_a_silent_worker_is_dead():
    scheduler = make(1)
    submit(scheduler, "a", safe_to_repeat=True)
    lease = leased(scheduler)["a"]
    scheduler.heartbeat("w0", [lease.lease_id], 5.0)
    assert scheduler.next_event(5.0) == 15.0
    (change,) = scheduler.expire(15.0)
    assert (change.kind, change.reason) == (REQUEUED, "worker_died")
    with pytest.raises(UnknownWorker, match="'w0' is none of the 0 present"):
        scheduler.heartbeat("w0", [lease.lease_id], 16.0)
    assert scheduler.expire(16.0) == [] == scheduler.next_leases(16.0)
    assert done(scheduler, lease, 16.0) is None
    scheduler.join("w0", worker(1), 17.0)
    assert leased(scheduler, 17.0)["a"].attempt == 2


def test_a_worker_that_joins_again_has_lost_everything():
    scheduler = make(1)
    submit(scheduler, "a")
    leased(scheduler)
    (change,) = scheduler.join("w0", worker(1), 1.0)
    assert (change.kind, change.reason) == (RESOLVED, "worker_died")
    submit(scheduler, "b", now=1.0)
    assert list(leased(scheduler, 1.0)) == ["b"]


def test_a_draining_worker_finishes_and_leaves():
    scheduler = make(2, 2)
    submit(scheduler, "a")
    lease = leased(scheduler)["a"]
    scheduler.drain(lease.worker_id, 0.0)
    submit(scheduler, "b", "c", "e")
    others = leased(scheduler)
    assert len(others) == 2
    assert lease.worker_id not in {other.worker_id for other in others.values()}
    assert done(scheduler, lease, 1.0).kind == RESOLVED
    assert scheduler.next_leases(1.0) == []
    assert scheduler.leave(lease.worker_id, 1.0) == []


def test_best_fit_keeps_whole_workers_and_gpus_free():
    scheduler = Scheduler()
    scheduler.join("gpu", worker(4, gpus=1), 0.0)
    scheduler.join("plain", worker(8), 0.0)
    submit(scheduler, "a", resources=cpus(1))
    submit(scheduler, "g", resources=cpus(1, gpus=1))
    submit(scheduler, "large", resources=cpus(7))
    placed = {name: lease.worker_id for name, lease in leased(scheduler).items()}
    assert placed == {"a": "plain", "g": "gpu", "large": "plain"}


@pytest.mark.parametrize("field", ["cpus", "memory_bytes", "disk_bytes", "gpus"])
def test_every_resource_bounds(field):
    scheduler = Scheduler()
    whole = Resources(cpus=10, memory_bytes=10, disk_bytes=10, gpus=10)
    scheduler.join("w", whole, 0.0)
    need = Resources(cpus=1, memory_bytes=1, disk_bytes=1, gpus=1)
    need = dataclasses.replace(need, **{field: 4})
    submit(scheduler, "a", "b", "c", resources=need)
    assert list(leased(scheduler)) == ["a", "b"]


def test_fractions_of_a_cpu_add_up():
    scheduler = make(1)
    for i in range(100):
        submit(scheduler, *[f"{i}-{j}" for j in range(10)], resources=cpus(0.1))
        leases = leased(scheduler)
        assert len(leases) == 10
        for lease in leases.values():
            done(scheduler, lease, 0.0)


def test_a_large_item_gets_the_room_that_comes_free():
    scheduler = make(4, reserve_after_seconds=2.0)
    submit(scheduler, "s0", "s1", "s2", "s3")
    running = list(leased(scheduler).values())
    submit(scheduler, "large", resources=cpus(4), now=1.0)
    submit(scheduler, *[f"t{i}" for i in range(9)], now=1.0)
    now, order = 1.0, []
    while "large" not in order:
        now += 0.75
        done(scheduler, running.pop(0), now)
        for name, lease in leased(scheduler, now).items():
            order.append(name)
            running.append(lease)
    # Passed over at 1.75 and 2.5; from 3.25 on the worker empties for it.
    assert order == ["t0", "t1", "large"]
    assert now == 1.0 + 6 * 0.75


@pytest.mark.parametrize("ending", ["cancel", "deadline", "drain", "death"])
def test_a_reservation_ends_with_its_item_or_worker(ending):
    scheduler = make(2, 2, reserve_after_seconds=0.0)
    submit(scheduler, "a", "b", "c", "e")
    first = leased(scheduler)
    submit(scheduler, "large", resources=cpus(2), deadline=5.0)
    submit(scheduler, "s0", "s1", "s2", "s3")
    lease = first["a"]
    done(scheduler, lease, 1.0)
    assert leased(scheduler, 1.0) == {}  # the worker waits for "large"
    assert scheduler.num_queued == 5
    if ending == "cancel":
        assert scheduler.cancel("large", 1.0).reason == "cancelled"
        assert list(leased(scheduler, 1.0)) == ["s0"]
    elif ending == "deadline":
        assert [change.reason for change in scheduler.expire(5.0)] == ["deadline_passed"]
        assert list(leased(scheduler, 5.0)) == ["s0"]
    elif ending == "drain":
        scheduler.drain(lease.worker_id, 1.0)
        assert scheduler.num_queued == 5
        done(scheduler, first["c"], 2.0)
        done(scheduler, first["e"], 2.0)
        assert list(leased(scheduler, 2.0)) == ["large"]
    else:
        scheduler.leave(lease.worker_id, 1.0)
        scheduler.join("new", worker(2), 2.0)
        assert list(leased(scheduler, 2.0)) == ["large"]


def test_an_item_that_no_present_worker_can_hold_stops_no_other():
    scheduler = make(2, largest=worker(8, gpus=1), reserve_after_seconds=0.0)
    submit(scheduler, "a", "b")
    first = leased(scheduler)
    submit(scheduler, "gpu", resources=cpus(1, gpus=1))
    submit(scheduler, "large", resources=cpus(2))
    submit(scheduler, "s")
    done(scheduler, first["a"], 1.0)
    assert leased(scheduler, 1.0) == {}
    done(scheduler, first["b"], 2.0)
    assert list(leased(scheduler, 2.0)) == ["large"]
    scheduler.join("g", worker(1, gpus=1), 3.0)
    assert list(leased(scheduler, 3.0)) == ["gpu"]


# Admission.


def test_what_no_worker_can_hold_is_refused_at_once():
    scheduler = make(2)
    with pytest.raises(TooLarge, match=r"(?s)'a' needs.*cpus=3.*cpus=2.*largest"):
        scheduler.submit(item("a", resources=cpus(3)), 0.0)
    with pytest.raises(TooLarge, match="none has joined"):
        Scheduler().submit(item("a"), 0.0)
    assert make(2, largest=worker(4)).submit(item("a", resources=cpus(3)), 0.0)
    scheduler.expire(10.0)  # dead, and expected back
    assert scheduler.submit(item("b", resources=cpus(2)), 10.0)
    scheduler.join("w0", worker(2), 11.0)
    scheduler.leave("w0", 11.0)  # for good
    with pytest.raises(TooLarge):
        scheduler.submit(item("c"), 11.0)


def test_the_queue_is_bounded_as_a_whole_and_by_domain():
    scheduler = make(1, max_queued=3, max_queued_per_domain=2)
    submit(scheduler, "a0", domain="a")
    assert not scheduler.is_saturated("a")
    submit(scheduler, "a1", domain="a")
    assert scheduler.is_saturated("a") and not scheduler.is_saturated("b")
    submit(scheduler, "b0", domain="b")
    assert scheduler.is_saturated() and scheduler.is_saturated("b")
    submit(scheduler, "a2", "a3", domain="a")
    with pytest.raises(QueueFull, match=r"5 items.*4 of domain 'a'.*max_queued=3"):
        scheduler.submit(item("a4", domain="a"), 0.0)
    submit(scheduler, "b1", domain="b")
    with pytest.raises(QueueFull):
        scheduler.submit(item("b2", domain="b"), 0.0)
    for _ in range(4):
        (lease,) = scheduler.next_leases(0.0)
        done(scheduler, lease, 0.0)
    assert not scheduler.is_saturated("a")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: cpus(0), r"cpus=0 must be finite and above 0"),
        (lambda: cpus(float("nan")), "cpus=nan"),
        (lambda: cpus(0.0005), r"cpus=0.0005 must be a multiple of 0.001; take 0.001"),
        (lambda: cpus(1, memory_bytes=-5), "memory_bytes=-5 must be an integer, 0 or more"),
        (lambda: cpus(1, gpus=0.5), "gpus=0.5 must be an integer"),
        (lambda: item(""), "item_id='' and domain='d' must not be empty"),
        (lambda: item("a", deadline=float("inf")), "deadline=inf must be finite"),
        (lambda: item("a", priority=float("inf")), "priority=inf"),
        (lambda: Retry(max_attempts=0), "max_attempts=0 must be finite and at least 1"),
        (lambda: Retry(cap_seconds=0.5), "cap_seconds=0.5 must be finite and at least 1.0"),
        (lambda: RetryPolicy(rules={"ok": Retry()}), r"rules has \['ok'\]"),
        (lambda: SchedulerConfig(weights={"a": 0}), r"weights\['a'\]=0 .* above 0"),
        (lambda: SchedulerConfig(lease_seconds=0), "lease_seconds=0 .* above 0"),
        (lambda: SchedulerConfig(max_queued=0), "max_queued=0 .* at least 1"),
        (lambda: Settings(num_workers=1), "num_workers=1 must be 2 or more"),
    ],
)
def test_bad_input_is_refused_with_its_numbers(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_an_outcome_must_be_known():
    scheduler = make(1)
    submit(scheduler, "a")
    with pytest.raises(ValueError, match="outcome='good' must be one of"):
        done(scheduler, leased(scheduler)["a"], 0.0, "good")
    assert scheduler.num_leased == 1


# Retries.


def test_failures_are_tried_again_by_class_with_growing_delays():
    rule = Retry(max_attempts=4, base_seconds=2.0, factor=3.0, cap_seconds=10.0)
    scheduler = make(1, heartbeat_seconds=1e6, retries=RetryPolicy(rules={"flaky": rule}))
    submit(scheduler, "a", safe_to_repeat=True)
    now, delays = 0.0, []
    for _ in range(3):
        lease = leased(scheduler, now)["a"]
        change = done(scheduler, lease, now, "infra_fail", "flaky")
        assert change.kind == REQUEUED
        assert leased(scheduler, now) == {}
        ready_at = scheduler.next_event(now)
        delays.append(ready_at - now)
        assert scheduler.expire(ready_at) == []
        now = ready_at
    for delay, step in zip(delays, [2.0, 6.0, 10.0], strict=True):
        assert step / 2 <= delay <= step
    assert delays == [rule.delay("a", attempt) for attempt in (1, 2, 3)]
    assert delays[0] != rule.delay("b", 1)
    change = done(scheduler, leased(scheduler, now)["a"], now, "infra_fail", "flaky")
    assert (change.kind, change.attempts) == (RESOLVED, 4)


@pytest.mark.parametrize("outcome", ["ok", "truncated", "policy_fail"])
def test_what_counts_for_the_agent_is_never_tried_again(outcome):
    scheduler = make(1)
    submit(scheduler, "a", safe_to_repeat=True)
    change = done(scheduler, leased(scheduler)["a"], 0.0, outcome, "worker_died")
    assert change.kind == RESOLVED


def test_a_retry_prefers_another_worker_but_takes_the_same():
    rules = {"infra_fail": Retry(base_seconds=0, cap_seconds=0)}
    scheduler = make(1, 1, retries=RetryPolicy(rules=rules))
    submit(scheduler, "a", safe_to_repeat=True)
    workers = []
    for _ in range(2):
        lease = leased(scheduler)["a"]
        workers.append(lease.worker_id)
        done(scheduler, lease, 0.0, "infra_fail", "sandbox_failed")
        scheduler.expire(0.0)
    assert set(workers) == {"w0", "w1"}
    scheduler.leave(workers[0], 0.0)
    assert leased(scheduler)["a"].worker_id == workers[1]


def test_a_retry_prefers_another_worker_of_those_that_came_free():
    rules = {"infra_fail": Retry(base_seconds=0, cap_seconds=0)}
    scheduler = make(1, 1, retries=RetryPolicy(rules=rules))
    submit(scheduler, "a", "b", safe_to_repeat=True)
    first = leased(scheduler)
    submit(scheduler, "c")
    assert leased(scheduler) == {}
    done(scheduler, first["a"], 0.0, "infra_fail", "sandbox_failed")
    scheduler.expire(0.0)
    done(scheduler, first["b"], 0.0)
    second = leased(scheduler)
    assert list(second) == ["a", "c"]
    assert second["a"].worker_id == first["b"].worker_id


# Deadlines and cancellation.


def test_a_deadline_ends_queued_waiting_and_running_items():
    scheduler = make(1, heartbeat_seconds=100.0)
    submit(scheduler, "running", deadline=5.0)
    lease = leased(scheduler)["running"]
    submit(scheduler, "queued", deadline=3.0)
    assert scheduler.next_event(0.0) == 3.0
    (change,) = scheduler.expire(4.0)
    assert (change.item_id, change.kill) == ("queued", None)
    assert (change.outcome, change.reason) == ("infra_fail", "deadline_passed")
    (change,) = scheduler.expire(5.0)
    assert (change.kind, change.kill) == (RESOLVED, lease.lease_id)
    # Its resources stay taken until the worker has stopped it.
    submit(scheduler, "next", now=5.0)
    assert leased(scheduler, 5.0) == {}
    assert scheduler.heartbeat("w0", [lease.lease_id], 6.0) == [lease.lease_id]
    assert done(scheduler, lease, 7.0) is None
    assert list(leased(scheduler, 7.0)) == ["next"]


def test_a_deadline_ends_an_item_that_waits_for_another_attempt():
    scheduler = make(1)
    submit(scheduler, "a", deadline=0.25, safe_to_repeat=True)
    done(scheduler, leased(scheduler)["a"], 0.0, "infra_fail", "sandbox_failed")
    (change,) = scheduler.expire(0.25)
    assert (change.reason, change.attempts) == ("deadline_passed", 1)
    assert scheduler.expire(9.0) == []
    assert scheduler.num_queued == 0


def test_cancellation_resolves_once_and_kills():
    scheduler = make(1)
    submit(scheduler, "a", "b")
    lease = leased(scheduler)["a"]
    change = scheduler.cancel("b", 1.0)
    assert (change.kind, change.reason, change.kill) == (RESOLVED, "cancelled", None)
    assert scheduler.cancel("a", 1.0).kill == lease.lease_id
    assert scheduler.cancel("a", 1.0) is None
    assert scheduler.cancel("unknown", 1.0) is None
    # The worker says nothing more of it: its room is free when the lease expires.
    submit(scheduler, "c", now=1.0)
    for now in (9.0, 18.0, 27.0):
        scheduler.heartbeat("w0", [], now)
    assert scheduler.expire(29.0) == [] and leased(scheduler, 29.0) == {}
    assert scheduler.expire(30.0) == []
    assert list(leased(scheduler, 30.0)) == ["c"]


# Order.


def test_priorities_order_a_domain_and_waiting_makes_up_for_them():
    scheduler = make(1, ageing_seconds=10.0, heartbeat_seconds=1e6)
    submit(scheduler, "old", now=0.0)
    submit(scheduler, "urgent", now=9.0, priority=1)
    submit(scheduler, "late", now=11.0, priority=1)
    submit(scheduler, "later", now=11.0, priority=1)
    order = []
    for _ in range(4):
        ((name, lease),) = leased(scheduler, 11.0).items()
        order.append(name)
        done(scheduler, lease, 11.0)
    assert order == ["urgent", "old", "late", "later"]


def test_an_empty_pool_is_divided_by_weight():
    scheduler = make(12, weights={"a": 1, "b": 2, "c": 3})
    for domain in "abc":
        submit(scheduler, *[f"{domain}{i}" for i in range(20)], domain=domain)
    counts = collections.Counter(name[0] for name in leased(scheduler))
    assert counts == {"a": 2, "b": 4, "c": 6}


def test_the_dominant_share_counts():
    """Half the memory weighs as much as half the CPUs."""
    scheduler = make(8)
    submit(scheduler, *[f"c{i}" for i in range(9)], domain="c", resources=cpus(1))
    heavy = cpus(0.001, memory_bytes=250)
    submit(scheduler, *[f"m{i}" for i in range(9)], domain="m", resources=heavy)
    first = list(leased(scheduler))[:6]
    # An "m" takes a quarter of the memory, a "c" an eighth of the CPUs.
    assert collections.Counter(name[0] for name in first) == {"c": 4, "m": 2}


def run_slots(scheduler, seconds, durations, slots):
    """Domains always backlogged, one-CPU items; the time used by each."""
    now, serial, running = 0.0, 0, []
    used = collections.Counter()
    while now < seconds:
        for domain in durations:
            while not scheduler.is_saturated(domain):
                serial += 1
                submit(scheduler, f"{domain}-{serial}", domain=domain, now=now)
        for lease in scheduler.next_leases(now):
            domain = lease.item_id.split("-")[0]
            running.append((now + durations[domain], lease.lease_id, domain, now))
        assert len(running) == slots
        running.sort()
        now, lease_id, domain, began = running.pop(0)
        used[domain] += now - began
        scheduler.complete(lease_id, "ok", "graded", now)
    return used


def test_long_items_earn_no_more_than_their_weight():
    """One slot for three domains: shares are made up for over time."""
    weights = {"a": 1, "b": 2, "c": 3}
    never = {"heartbeat_seconds": 1e9, "lease_seconds": 1e9}
    scheduler = make(1, weights=weights, max_queued_per_domain=2, **never)
    used = run_slots(scheduler, 3000.0, {"a": 10.0, "b": 1.0, "c": 0.3}, 1)
    total = sum(used.values())
    for domain, weight in weights.items():
        assert used[domain] / total == pytest.approx(weight / 6, rel=0.05)


@pytest.mark.parametrize("num_domains", [3, 40])
def test_slots_are_shared_by_weight(num_domains):
    weights = {f"d{i}": 1 + i % 4 for i in range(num_domains)}
    never = {"heartbeat_seconds": 1e9, "lease_seconds": 1e9}
    scheduler = make(8, 8, weights=weights, max_queued_per_domain=16, **never)
    durations = {f"d{i}": 0.5 + (i * 7 % 11) for i in range(num_domains)}
    used = run_slots(scheduler, 6000.0, durations, 16)
    part = sum(used.values()) / sum(weights.values())
    for domain, weight in weights.items():
        assert used[domain] == pytest.approx(part * weight, rel=0.05)


def test_idling_earns_no_credit_and_use_of_idle_room_no_punishment():
    never = {"heartbeat_seconds": 1e9, "lease_seconds": 1e9}
    scheduler = make(4, **never)
    submit(scheduler, *[f"busy{i}" for i in range(99)], domain="busy")
    running = list(leased(scheduler).values())
    for now in range(1, 20):
        for lease in running:
            done(scheduler, lease, float(now))
        running = list(leased(scheduler, float(now)).values())
    submit(scheduler, *[f"idle{i}" for i in range(99)], domain="idle", now=19.5)
    for now in range(20, 23):
        for lease in running:
            done(scheduler, lease, float(now))
        leases = leased(scheduler, float(now))
        running = list(leases.values())
        counts = collections.Counter(name[:4] for name in leases)
        assert counts == {"busy": 2, "idle": 2}


# Anything.


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


# Together.


def test_a_simulated_pool_is_fair_full_and_starves_nobody():
    options = Settings(
        seed=1,
        num_workers=16,
        seconds=300.0,
        warm_up_seconds=60.0,
        death_probability=0.02,
    )
    report = simulate(options)  # asserts that every item resolves once
    assert report.share_deviation < 0.05, report
    assert report.utilization >= 0.9, report
    assert max(report.waits.values()) < 3, report
    assert report.deaths and report.refused and report.requeued["worker_died"], report
    assert sum(report.resolved.values()) == report.submitted


def test_the_same_seed_gives_the_same_report():
    options = Settings(num_workers=2, seconds=20.0, warm_up_seconds=1.0)
    assert simulate(options) == simulate(options)
    assert simulate(options) != simulate(dataclasses.replace(options, seed=1))
