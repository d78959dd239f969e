"""Small workers and items for the tests of the scheduler."""

from sandbox.items import Item, Resources, SchedulerConfig
from sandbox.scheduler import Scheduler

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
