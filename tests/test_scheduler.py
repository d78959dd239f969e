"""The scheduler: an item resolves once, whatever becomes of leases, workers and time."""

import pytest

from sandbox.items import (
    REQUEUED,
    RESOLVED,
    QueueFull,
    Retry,
    RetryPolicy,
    SchedulerConfig,
    TooLarge,
    UnknownWorker,
)
from sandbox.scheduler import Scheduler
from sandbox.simulation import Settings
from tests.scheduling import cpus, done, item, leased, make, submit, worker

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


def test_a_lease_of_another_worker_is_not_renewed():
    scheduler = make(1, 1, heartbeat_seconds=100.0)
    submit(scheduler, "a")
    lease = leased(scheduler)["a"]
    (other,) = {"w0", "w1"} - {lease.worker_id}
    assert scheduler.heartbeat(other, [lease.lease_id], 20.0) == [lease.lease_id]
    assert [change.reason for change in scheduler.expire(30.0)] == ["lease_expired"]


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
