"""The scheduler in a simulated pool: fairness, waits, utilization, and cost per decision.

    python scripts/bench/scheduler.py --json figures.json

The simulation runs in virtual time; `sandbox.simulation` says what it simulates and what
the figures are relative to. The cost is the processor time of a decision, so that others on
the machine do not count: in a full pool an item ends and another is submitted, and
`next_leases` fills the room. A cycle is all three.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from sandbox.items import Item, Resources, SchedulerConfig
from sandbox.scheduler import Scheduler
from sandbox.simulation import DOMAINS, DomainSettings, Settings, simulate

MEAN_SECONDS = 30.0


def copies(number: int, *, shapes: int | None = None) -> dict[str, DomainSettings]:
    """Many domains of the simulation's shapes, or each of one of so many shapes."""
    kinds = list(DOMAINS.values())
    made = {f"domain-{i}": kinds[i % len(kinds)] for i in range(number)}
    if shapes is None:
        return made
    return {
        name: dataclasses.replace(
            domain,
            resources=Resources(
                cpus=0.25 + 0.005 * (i % shapes), memory_bytes=1 << 29, disk_bytes=1 << 30
            ),
        )
        for i, (name, domain) in enumerate(made.items())
    }


def decision_cost(
    domains: dict[str, DomainSettings], *, queued: int, workers: int, decisions: int
) -> dict[str, float]:
    """Microseconds per lease of `next_leases`, and per item of the whole cycle."""
    rng, names, now = random.Random(0), list(domains), 0.0
    # The most frequent are the smallest, so that about 10,000 items are in flight.
    sizes = [1 / domains[name].resources.cpus for name in names]
    settings = Settings(num_workers=workers)
    scheduler = Scheduler(
        SchedulerConfig(
            weights={name: domain.weight for name, domain in domains.items()},
            heartbeat_seconds=1e6,
            lease_seconds=1e6,
            max_queued=1_000_000,
            max_queued_per_domain=1_000_000,
        )
    )
    for i in range(workers):
        scheduler.join(f"worker-{i}", settings.gpu_worker, now)

    def items(number: int) -> list[Item]:
        return [
            Item(
                item_id=f"item-{next_id + i}",
                domain=name,
                resources=domains[name].resources,
                priority=rng.randrange(2),
            )
            for i, name in enumerate(rng.choices(names, sizes, k=number))
        ]

    next_id, running = 0, []
    while lacking := queued - scheduler.num_queued:
        for item in items(lacking):
            scheduler.submit(item, now)
        next_id += lacking
        running += [lease.lease_id for lease in scheduler.next_leases(now)]
    coming, cycles, choices = items(2 * decisions), [], []
    for item in coming:
        now += MEAN_SECONDS / len(running)
        index = rng.randrange(len(running))
        running[index], running[-1] = running[-1], running[index]
        ended = running.pop()
        start = time.thread_time()
        scheduler.complete(ended, "ok", "graded", now)
        scheduler.submit(item, now)
        before = time.thread_time()
        leases = scheduler.next_leases(now)
        end = time.thread_time()
        running += [lease.lease_id for lease in leases]
        cycles.append((end - start, len(leases)))
        choices.append(end - before)
    # The first half reaches the steady state.
    cycles, choices = cycles[decisions:], choices[decisions:]
    num_leases = sum(number for _, number in cycles)
    return {
        "queued": scheduler.num_queued,
        "in_flight": len(running),
        "next_leases_us_per_lease": 1e6 * sum(choices) / num_leases,
        "next_leases_us_p50": 1e6 * statistics.median(choices),
        "next_leases_us_p99": 1e6 * statistics.quantiles(choices, n=100)[98],
        "cycle_us": 1e6 * sum(seconds for seconds, _ in cycles) / num_leases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=300.0, help="virtual (300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decisions", type=int, default=10_000)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    start = time.perf_counter()
    report = simulate(
        Settings(num_workers=options.workers, seconds=options.seconds, seed=options.seed)
    )
    figures = dataclasses.asdict(report) | {
        "share_deviation": report.share_deviation,
        "longest_wait_to_bound": max(report.waits.values()),
        "simulation_us_per_lease": 1e6 * (time.perf_counter() - start) / report.leases,
    }
    for name, figure in figures.items():
        print(f"{name}: {figure}")
    cases = {f"queued_{n}": (DOMAINS, n) for n in (1_000, 10_000, 100_000)}
    cases["domains_64"] = copies(64), 10_000
    cases["domains_512"] = copies(512), 10_000
    cases["domains_512_shapes_128"] = copies(512, shapes=128), 10_000
    figures["decision_cost"] = {}
    for name, (domains, queued) in cases.items():
        cost = decision_cost(
            domains, queued=queued, workers=options.workers, decisions=options.decisions
        )
        figures["decision_cost"][name] = cost
        print(f"{name}:", ", ".join(f"{key} {value:.1f}" for key, value in cost.items()))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
