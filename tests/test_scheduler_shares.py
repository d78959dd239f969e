"""The scheduler: which item gets which room, and how domains share a pool."""

import collections
import dataclasses

import pytest

from sandbox.items import Resources
from sandbox.scheduler import Scheduler
from sandbox.simulation import Settings, simulate
from tests.scheduling import cpus, done, leased, make, submit, worker

# Room.


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


def test_an_item_in_line_takes_the_larger_of_two_rooms_that_come_free_at_once():
    scheduler = make(2, 4, reserve_after_seconds=0.0)
    submit(scheduler, "a", "b", resources=cpus(1))
    submit(scheduler, "whole", resources=cpus(4))
    first = leased(scheduler)
    submit(scheduler, "large", resources=cpus(4))
    submit(scheduler, "s0", "s1")
    assert leased(scheduler) == {}
    done(scheduler, first["a"], 1.0)
    done(scheduler, first["whole"], 1.0)
    placed = leased(scheduler, 1.0)
    assert set(placed) == {"large", "s0"}
    assert placed["large"].worker_id == first["whole"].worker_id


def test_a_worker_that_was_reserved_can_be_reserved_for_another():
    scheduler = make(4, 1, reserve_after_seconds=0.0, max_held_share=2.0)
    submit(scheduler, *[f"a{i}" for i in range(5)])
    large, small = {}, {}
    for name, lease in leased(scheduler).items():
        (large if lease.worker_id == "w0" else small)[name] = lease
    assert (len(large), len(small)) == (4, 1)
    submit(scheduler, "first", resources=cpus(4))
    submit(scheduler, "second", resources=cpus(3))
    submit(scheduler, "s0", "s1", "s2")
    done(scheduler, small.popitem()[1], 1.0)
    assert list(leased(scheduler, 1.0)) == ["s0"]  # "first" has w0, "second" must wait
    scheduler.cancel("first", 1.0)
    done(scheduler, large.popitem()[1], 1.0)
    assert leased(scheduler, 1.0) == {}
    for lease in large.values():
        done(scheduler, lease, 2.0)
    assert list(leased(scheduler, 2.0)) == ["second", "s1"]


# Order and shares.


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


def test_room_goes_to_the_first_in_line_of_several_needs():
    scheduler = make(4)
    submit(scheduler, "whole", resources=cpus(4))
    lease = leased(scheduler)["whole"]
    submit(scheduler, "small", resources=cpus(1))
    assert leased(scheduler) == {}
    submit(scheduler, "urgent", resources=cpus(2), priority=1)
    assert leased(scheduler) == {}
    done(scheduler, lease, 1.0)
    assert list(leased(scheduler, 1.0)) == ["urgent", "small"]


def test_what_runs_counts_before_it_ends():
    """A session that runs on and on: its domain has used as much as the other's jobs."""
    scheduler = make(2, heartbeat_seconds=1e9, lease_seconds=1e9)
    submit(scheduler, "long0", "long1", domain="long")
    submit(scheduler, *[f"short{i}" for i in range(99)], domain="short")
    leases = leased(scheduler)
    assert set(leases) == {"long0", "short0"}
    lease = leases["short0"]
    for now in range(1, 90):
        done(scheduler, lease, float(now))
        ((name, lease),) = leased(scheduler, float(now)).items()
        assert name == f"short{now}"


# A simulated pool.


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
