"""A pool in virtual time: a seed and domains in, how fairly and fully it was used out.

A discrete-event simulation around the real scheduler. Every domain is backlogged until
`seconds`; then nothing more is submitted, and it runs until everything has resolved. The
same settings give the same report to the last bit. What is simulated:

- Workers send heartbeats. Each dies with probability `death_probability` in any
  `death_period_seconds`, is found dead by its silence, and joins again, empty,
  `away_seconds` later. What ran on it is lost, and so is what is sent to it meanwhile.
- A lease is lost with probability `lost_probability`: its worker never lists it, and
  reports a good result when the lease has long expired, which must not count.
- An attempt fails as `infra_fail: sandbox_failed` with `failure_probability`.
"""

import collections
import dataclasses
import heapq
import math
import random
from collections.abc import Callable

from sandbox.items import RESOLVED, Change, Item, Lease, Resources, SchedulerConfig
from sandbox.scheduler import Scheduler

_GIB = 1 << 30
_LONGEST = 20.0  # mean durations: the wall-clock limit of an item


def lognormal(rng: random.Random) -> float:
    """Mean 1, and a standard deviation of 1.3."""
    return rng.lognormvariate(-0.5, 1.0)


def pareto(rng: random.Random) -> float:
    """Mean 1 and no finite variance: x**-1.8."""
    return rng.paretovariate(1.8) * 0.8 / 1.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class DomainSettings:
    """Items of one shape. duration: a draw of mean 1, times `mean_seconds`."""

    weight: float
    resources: Resources
    mean_seconds: float
    duration: Callable[[random.Random], float] = lognormal
    priorities: int = 1
    safe_to_repeat: bool = True


def _resources(cpus: float, memory: float, disk: float, gpus: int = 0) -> Resources:
    return Resources(
        cpus=cpus, memory_bytes=int(memory * _GIB), disk_bytes=int(disk * _GIB), gpus=gpus
    )


def _domain(weight, cpus, memory, disk, mean_seconds, gpus=0, **options) -> DomainSettings:
    return DomainSettings(
        weight=weight,
        resources=_resources(cpus, memory, disk, gpus),
        mean_seconds=mean_seconds,
        **options,
    )


DOMAINS = {
    "python": _domain(4, 0.25, 0.5, 1, 10, priorities=2),
    "shell": _domain(4, 0.5, 1, 2, 40, duration=pareto, safe_to_repeat=False),
    "documents": _domain(3, 0.5, 3, 2, 20),
    "builds": _domain(3, 2, 4, 20, 60, duration=pareto),
    "browser": _domain(2, 1, 2, 5, 30, priorities=3),
    "cad": _domain(2, 4, 8, 10, 45),
    "render": _domain(1, 2, 8, 10, 45, gpus=1),
    "meshes": _domain(1, 8, 16, 40, 90, duration=pareto),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Half of the workers have GPUs. Shares count from `warm_up_seconds`."""

    seed: int = 0
    num_workers: int = 100
    domains: dict[str, DomainSettings] = dataclasses.field(default_factory=lambda: DOMAINS)
    worker: Resources = _resources(64, 256, 1024)
    gpu_worker: Resources = _resources(64, 256, 1024, 8)
    seconds: float = 300.0
    warm_up_seconds: float = 60.0
    backlog_seconds: float = 20.0  # of each domain, at its fair rate
    death_probability: float = 0.02
    death_period_seconds: float = 30.0
    away_seconds: float = 30.0
    beat_seconds: float = 3.0
    lost_probability: float = 0.001
    failure_probability: float = 0.005
    ageing_seconds: float = 10.0

    def __post_init__(self):
        if self.num_workers < 2 or not 0 <= self.warm_up_seconds < self.seconds:
            raise ValueError(
                f"num_workers={self.num_workers} must be 2 or more, and warm_up_seconds="
                f"{self.warm_up_seconds} lie between 0 and seconds={self.seconds}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """shares: of the dominant-share seconds, over weight / sum of weights; 1 is exact.

    utilization: what ran, over the bound: the living workers' capacity, if domains get
      their weights and no room is ever too small for an item. With f(d) the part of the
      weights that d has and s(d, r) what its item needs of resource r over what there
      is, the dominant shares can add up to 1 / max_r sum_d f(d) s(d, r) / max_r s(d, r).
    waits: the longest from submission to the first lease, over what the backlog before
      an item takes at the domain's fair rate, plus what lower priority may cost.
    """

    shares: dict[str, float]
    utilization: float
    waits: dict[str, float]
    longest_wait_seconds: dict[str, float]
    in_flight: float
    submitted: int
    leases: int
    deaths: int
    refused: int
    requeued: dict[str, int]
    resolved: dict[str, int]

    @property
    def share_deviation(self) -> float:
        return max(abs(share - 1) for share in self.shares.values())


def simulate(
    settings: Settings, make_scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler
) -> Report:
    simulation = _Simulation(settings, make_scheduler)
    simulation.run()
    return simulation.report()


class _Fluid:
    """What domains would get if items could be divided at will."""

    def __init__(self, settings: Settings):
        half = settings.num_workers // 2
        workers = [settings.gpu_worker] * half
        workers += [settings.worker] * (settings.num_workers - half)
        self.workers = {f"worker-{i}": worker for i, worker in enumerate(workers)}
        totals = [sum(units) for units in zip(*(worker.units for worker in workers))]
        domains = settings.domains
        weight = sum(domain.weight for domain in domains.values())
        self.part = {name: domain.weight / weight for name, domain in domains.items()}
        loads = [0.0] * len(totals)
        self.dominant = {}
        for name, domain in domains.items():
            shares = [need / total for need, total in zip(domain.resources.units, totals)]
            self.dominant[name] = max(shares)
            for i, share in enumerate(shares):
                loads[i] += self.part[name] * share / max(shares)
        self.bound = 1 / max(loads)

    def rate(self, name: str, domain: DomainSettings) -> float:
        """Items a second."""
        return self.part[name] * self.bound / (self.dominant[name] * domain.mean_seconds)


class _Simulation:
    def __init__(self, settings: Settings, make_scheduler):
        self.settings, self.rng = settings, random.Random(settings.seed)
        self.fluid = _Fluid(settings)
        config = SchedulerConfig(
            weights={name: domain.weight for name, domain in settings.domains.items()},
            largest=settings.gpu_worker,
            ageing_seconds=settings.ageing_seconds,
        )
        self.scheduler: Scheduler = make_scheduler(config)
        self.lease_seconds = config.lease_seconds
        self.events: list[tuple] = []
        self.now, self.serial = 0.0, 0
        self.depth = {
            name: math.ceil(self.fluid.rate(name, domain) * settings.backlog_seconds) + 1
            for name, domain in settings.domains.items()
        }
        self.queued: collections.Counter = collections.Counter()
        self.unresolved: dict[str, tuple[str, float]] = {}  # item: domain, submitted
        self.running: dict[str, dict[str, tuple]] = {}  # living worker: lease: ...
        self.used: collections.Counter = collections.Counter()
        self.living_seconds = self.in_flight_seconds = 0.0
        self.num_running = 0
        self.longest: dict[str, float] = dict.fromkeys(settings.domains, 0.0)
        self.counts: collections.Counter = collections.Counter()
        self.requeued: collections.Counter = collections.Counter()
        self.resolved: collections.Counter = collections.Counter()

    def at(self, when: float, action: Callable, *arguments) -> None:
        self.serial += 1
        heapq.heappush(self.events, (when, self.serial, action, arguments))

    def run(self) -> None:
        for worker_id in self.fluid.workers:
            self.join(worker_id)
        self.refill()
        self.decide()
        while self.unresolved:
            wake_at = self.scheduler.next_event(self.now)
            if wake_at is not None and wake_at < self.events[0][0]:
                self.advance(wake_at)
            else:
                when, _, action, arguments = heapq.heappop(self.events)
                self.advance(when)
                action(*arguments)
            self.decide()
        assert self.scheduler.num_queued == 0
        assert sum(self.resolved.values()) == self.counts["submitted"]

    def decide(self) -> None:
        for change in self.scheduler.expire(self.now):
            self.note(change)
        self.refill()
        for lease in self.scheduler.next_leases(self.now):
            self.begin(lease)
        self.refill()

    def refill(self) -> None:
        if self.now >= self.settings.seconds:
            return
        for name, domain in self.settings.domains.items():
            while self.queued[name] < self.depth[name]:
                self.counts["submitted"] += 1
                item = Item(
                    item_id=f"{name}-{self.counts['submitted']}",
                    domain=name,
                    resources=domain.resources,
                    priority=self.rng.randrange(domain.priorities),
                    safe_to_repeat=domain.safe_to_repeat,
                )
                self.scheduler.submit(item, self.now)
                self.unresolved[item.item_id] = name, self.now
                self.queued[name] += 1

    def begin(self, lease: Lease) -> None:
        name, submitted = self.unresolved[lease.item_id]
        self.queued[name] -= 1
        self.counts["leases"] += 1
        if lease.attempt == 1:
            self.longest[name] = max(self.longest[name], self.now - submitted)
        if lease.worker_id not in self.running:
            return  # sent to the dead
        domain = self.settings.domains[name]
        duration = min(domain.duration(self.rng), _LONGEST) * domain.mean_seconds
        if self.rng.random() < self.settings.lost_probability:
            self.at(self.now + duration + 2 * self.lease_seconds, self.late, lease)
            return
        failed = self.rng.random() < self.settings.failure_probability
        self.running[lease.worker_id][lease.lease_id] = name, self.now
        self.num_running += 1
        self.at(self.now + duration, self.end, lease, failed)

    def end(self, lease: Lease, failed: bool) -> None:
        if lease.lease_id not in self.running.get(lease.worker_id, ()):
            return  # its worker died
        self.stop(lease.worker_id, lease.lease_id)
        result = ("infra_fail", "sandbox_failed") if failed else ("ok", "graded")
        change = self.scheduler.complete(lease.lease_id, *result, self.now)
        assert change is not None, lease
        self.note(change)

    def stop(self, worker_id: str, lease_id: str) -> None:
        name, began = self.running[worker_id].pop(lease_id)
        self.num_running -= 1
        start = max(began, self.settings.warm_up_seconds)
        end = min(self.now, self.settings.seconds)
        self.used[name] += max(end - start, 0.0) * self.fluid.dominant[name]

    def late(self, lease: Lease) -> None:
        change = self.scheduler.complete(lease.lease_id, "ok", "graded", self.now)
        assert change is None, lease
        self.counts["refused"] += 1

    def note(self, change: Change) -> None:
        name, _ = self.unresolved[change.item_id]
        if change.kind == RESOLVED:
            del self.unresolved[change.item_id]  # a second time raises
            self.resolved[f"{change.outcome}: {change.reason}"] += 1
        else:
            self.queued[name] += 1
            self.requeued[change.reason] += 1

    def join(self, worker_id: str) -> None:
        settings = self.settings
        self.running[worker_id] = {}
        for change in self.scheduler.join(
            worker_id, self.fluid.workers[worker_id], self.now
        ):
            self.note(change)
        self.at(self.now + settings.beat_seconds, self.beat, worker_id)
        if settings.death_probability:
            rate = -math.log1p(-settings.death_probability) / settings.death_period_seconds
            self.at(self.now + self.rng.expovariate(rate), self.die, worker_id)

    def beat(self, worker_id: str) -> None:
        if worker_id in self.running:
            self.scheduler.heartbeat(worker_id, self.running[worker_id], self.now)
            self.at(self.now + self.settings.beat_seconds, self.beat, worker_id)

    def die(self, worker_id: str) -> None:
        for lease_id in list(self.running[worker_id]):
            self.stop(worker_id, lease_id)
        del self.running[worker_id]
        self.counts["deaths"] += 1
        self.at(self.now + self.settings.away_seconds, self.join, worker_id)

    def advance(self, when: float) -> None:
        start = max(self.now, self.settings.warm_up_seconds)
        counted = max(min(when, self.settings.seconds) - start, 0.0)
        self.living_seconds += len(self.running) / self.settings.num_workers * counted
        self.in_flight_seconds += self.num_running * counted
        self.now = when

    def report(self) -> Report:
        settings, fluid = self.settings, self.fluid
        total = sum(self.used.values())
        waits = {}
        for name, domain in settings.domains.items():
            expected = self.depth[name] / fluid.rate(name, domain)
            expected += (domain.priorities - 1) * settings.ageing_seconds
            waits[name] = self.longest[name] / expected
        return Report(
            shares={name: self.used[name] / total / fluid.part[name] for name in waits},
            utilization=total / (fluid.bound * self.living_seconds),
            waits=waits,
            longest_wait_seconds=self.longest,
            in_flight=self.in_flight_seconds
            / (settings.seconds - settings.warm_up_seconds),
            submitted=self.counts["submitted"],
            leases=self.counts["leases"],
            deaths=self.counts["deaths"],
            refused=self.counts["refused"],
            requeued=dict(sorted(self.requeued.items())),
            resolved=dict(sorted(self.resolved.items())),
        )
