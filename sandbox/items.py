"""What the scheduler speaks of: items that need resources, leases, what became of them."""

import dataclasses
import math
import types
import zlib
from collections.abc import Mapping

from sandbox.protocol import OUTCOMES

Need = tuple[int, int, int, int]  # thousandths of a CPU, bytes of memory, of disk, GPUs

RESOLVED, REQUEUED = "resolved", "requeued"


class TooLarge(ValueError):
    """An item that no worker could ever hold; the message gives the numbers."""


class QueueFull(RuntimeError):
    """The sampler went on although `is_saturated` told it to wait."""


class UnknownWorker(LookupError):
    """A worker that never joined, has left or counts as dead: it must join again."""


def check_number(name: str, value: float, *, least: float, above: bool = False) -> None:
    """Raises ValueError unless `value` is finite and at least (or above) `least`."""
    if not math.isfinite(value) or value < least or (above and value == least):
        raise ValueError(
            f"{name}={value!r} must be finite and {'above' if above else 'at least'} "
            f"{least}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What an item needs or a worker has; `cpus` in steps of a thousandth."""

    cpus: float
    memory_bytes: int
    disk_bytes: int
    gpus: int = 0

    def __post_init__(self):
        check_number("Resources.cpus", self.cpus, least=0, above=True)
        if abs(self.cpus * 1000 - round(self.cpus * 1000)) > 1e-6:
            raise ValueError(
                f"Resources.cpus={self.cpus} must be a multiple of 0.001; "
                f"take {math.ceil(self.cpus * 1000) / 1000}."
            )
        for name in ("memory_bytes", "disk_bytes", "gpus"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(
                    f"Resources.{name}={value!r} must be an integer, 0 or more."
                )

    @property
    def units(self) -> Need:
        """As integers, so that taking and giving back is exact."""
        return (round(self.cpus * 1000), self.memory_bytes, self.disk_bytes, self.gpus)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A job or a session to place on a worker. `item_id` is the idempotency key.

    priority: one more is worth `ageing_seconds` of waiting, within the item's domain.
    deadline: the time by which it must have ended.
    safe_to_repeat: may run again when an attempt that may have begun was lost.
    """

    item_id: str
    domain: str
    resources: Resources
    priority: int = 0
    deadline: float | None = None
    safe_to_repeat: bool = False

    def __post_init__(self):
        if not self.item_id or not self.domain:
            raise ValueError(
                f"Item.item_id={self.item_id!r} and domain={self.domain!r} must not be "
                "empty."
            )
        check_number("Item.priority", self.priority, least=-1000)
        if self.deadline is not None and not math.isfinite(self.deadline):
            raise ValueError(f"Item.deadline={self.deadline} must be finite, or None.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
    """An attempt at an item by a worker, good until `expires` unless renewed."""

    lease_id: str
    item_id: str
    worker_id: str
    attempt: int
    expires: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """What became of an item: `resolved`, once, or `requeued` for another attempt.

    kill: the lease that its worker must stop; its resources stay taken until the worker
    completes it or lists it no more.
    """

    item_id: str
    kind: str
    outcome: str
    reason: str
    attempts: int
    kill: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retry:
    """Up to `max_attempts`, `base_seconds * factor**n` but at most `cap_seconds` apart."""

    max_attempts: int = 3
    base_seconds: float = 1.0
    factor: float = 2.0
    cap_seconds: float = 60.0

    def __post_init__(self):
        check_number("Retry.max_attempts", self.max_attempts, least=1)
        check_number("Retry.base_seconds", self.base_seconds, least=0)
        check_number("Retry.factor", self.factor, least=1)
        check_number("Retry.cap_seconds", self.cap_seconds, least=self.base_seconds)

    def delay(self, item_id: str, attempt: int) -> float:
        """Seconds after attempt 1, 2, ...: from half the step to all of it, by the id."""
        # A large power of a float raises.
        grown = self.factor ** min(attempt - 1, 64)
        jitter = zlib.crc32(f"{item_id}/{attempt}".encode()) / (1 << 32)
        return min(self.base_seconds * grown, self.cap_seconds) * (0.5 + 0.5 * jitter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Which errors are tried again: by reason, else by outcome, else not at all."""

    rules: Mapping[str, Retry] = dataclasses.field(
        default_factory=lambda: {
            "infra_fail": Retry(),
            "worker_died": Retry(base_seconds=0.1),
            "lease_expired": Retry(base_seconds=0.1),
            "grader_fail": Retry(max_attempts=2),
        }
    )

    def __post_init__(self):
        if scored := sorted({"ok", "truncated", "policy_fail"} & set(self.rules)):
            raise ValueError(
                f"RetryPolicy.rules has {scored}: what counts for the agent is never "
                "tried again; remove them."
            )
        object.__setattr__(self, "rules", types.MappingProxyType(dict(self.rules)))

    def rule(self, outcome: str, reason: str) -> Retry | None:
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome={outcome!r} must be one of {OUTCOMES}.")
        if outcome not in ("infra_fail", "grader_fail"):
            return None
        return self.rules.get(reason) or self.rules.get(outcome)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """weights: of domains, 1 for those not named.

    largest: a worker that may yet join; items up to its size wait for it.
    heartbeat_seconds: a worker not heard of for so long is dead.
    lease_seconds: a lease not listed in its worker's heartbeats for so long is lost.
    max_queued, max_queued_per_domain: from here on `is_saturated`; twice as much is
      refused, so that what was under way when the signal rose still gets in.
    max_held_share: of all room, that may wait for large items (but one always may).
    horizon_seconds: see `fair_share`; about the duration of an item.
    remembered: ids of resolved items that are still known as such.
    """

    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    largest: Resources | None = None
    retries: RetryPolicy = RetryPolicy()
    heartbeat_seconds: float = 10.0
    lease_seconds: float = 30.0
    max_queued: int = 100_000
    max_queued_per_domain: int = 20_000
    ageing_seconds: float = 60.0
    reserve_after_seconds: float = 2.0
    max_held_share: float = 0.1
    horizon_seconds: float = 30.0
    remembered: int = 65_536

    def __post_init__(self):
        for domain, weight in self.weights.items():
            check_number(
                f"SchedulerConfig.weights[{domain!r}]", weight, least=0, above=True
            )
        for name in ("heartbeat_seconds", "lease_seconds", "horizon_seconds"):
            check_number(
                f"SchedulerConfig.{name}", getattr(self, name), least=0, above=True
            )
        for name in ("ageing_seconds", "reserve_after_seconds", "max_held_share"):
            check_number(f"SchedulerConfig.{name}", getattr(self, name), least=0)
        for name in ("max_queued", "max_queued_per_domain", "remembered"):
            check_number(f"SchedulerConfig.{name}", getattr(self, name), least=1)
        object.__setattr__(self, "weights", types.MappingProxyType(dict(self.weights)))
