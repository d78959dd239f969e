"""A run's lifetime: what it holds, when it is saved, and how it goes on after a stop.

Everything that changes as a run goes on is the learner's state (a pytree) and the progress
(JSON), which make a checkpoint together. A run killed at any moment goes on from the last
one as if nothing had happened, since every draw and every key is made from a step's number.
"""

import dataclasses
import signal
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxpt.base import Base
from jaxpt.checkpoint import Checkpoints
from jaxpt.data.mixture import fresh_draws
from jaxpt.learner import LearnerState
from jaxpt.metrics import RunLog
from jaxpt.rollout.episodes import Sampler, timed

SUPERVISED, REINFORCEMENT, DONE = "supervised", "reinforcement", "done"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """A checkpoint every `every` steps of a stage, of which the newest `keep` stay."""

    every: int
    keep: int = 2

    def __post_init__(self):
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")


class StopSignal:
    """SIGTERM asks for a checkpoint and an orderly end, after the step at hand."""

    def __init__(self):
        self.requested = False

    def __enter__(self) -> "StopSignal":
        self._previous = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(self, *exc_info) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _request(self, *_) -> None:
        self.requested = True

    def leave_if_requested(self) -> None:
        if self.requested:
            raise SystemExit(128 + signal.SIGTERM)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """What a stage's checkpoints hold.

    start: parameters -> the state before its first step; shapes: that as ShapeDtypeStructs
    with shardings.
    """

    start: Callable[[Any], LearnerState]
    shapes: Callable[[], LearnerState]


@dataclasses.dataclass
class Run:
    """A run as it goes on: what is fixed, and the state and progress that change.

    progress: `stage`, `step` (of the stage), `number` (of all stages, as in the logs),
    `draws` (see `mixture.Draws`), the logs' lengths, and the figures that the summary
    reports.
    """

    seed: int
    sampler: Sampler
    log: RunLog
    checkpoints: Checkpoints
    checkpoint: CheckpointConfig
    stop: StopSignal
    state: LearnerState
    progress: dict[str, Any]

    def key(self, purpose: str, step: int) -> jax.Array:
        """A key for one use: its purpose and the step's number name it."""
        purposes = ("sample", "evaluate")
        key = jax.random.fold_in(jax.random.key(self.seed), purposes.index(purpose))
        return jax.random.fold_in(key, step)

    @property
    def base(self) -> Base:
        return self.sampler.base

    @property
    def clock(self) -> dict[str, float]:
        return self.progress["seconds"]

    def enter(self, name: str, stage: Stage) -> None:
        """Begins a stage, with the parameters as they are, and saves."""
        self.state = stage.start(self.state.params)
        self.progress |= {"stage": name, "step": 0}
        self.save()

    def save(self) -> None:
        with timed(self.clock, "checkpoint"):
            self.progress["log"] = self.log.positions()
            self.checkpoints.save(self.progress["number"], self.state, self.progress)

    def finish(self) -> None:
        """Saves for good: from here the run only reports."""
        self.progress["stage"] = DONE
        self.progress["number"] += 1  # its last step may have saved under its own
        self.save()

    def end_step(self, *, last: bool) -> None:
        """After a step: counts it, saves when it is time, leaves when asked to.

        last: the stage ends here, so its end will save.
        """
        self.progress["step"] += 1
        self.progress["number"] += 1
        due = self.progress["step"] % self.checkpoint.every == 0
        if self.stop.requested or (due and not last):
            self.save()
        self.stop.leave_if_requested()


def start_or_resume(
    base: Base,
    seed: int,
    stages: Mapping[str, Stage],
    checkpoints: Checkpoints,
    log: RunLog,
) -> tuple[LearnerState, dict[str, Any]]:
    """The newest checkpoint's state and progress, or fresh ones; cuts the logs to match.

    stages: a fresh run starts with the first.
    """
    restored = checkpoints.restore(lambda progress: stages[progress["stage"]].shapes())
    if restored is None:
        log.rewind(dict.fromkeys(log.positions(), 0), next_step=0)
        name, stage = next(iter(stages.items()))
        return stage.start(base.params(seed)), _fresh_progress(name)
    state, progress = restored
    log.rewind(progress["log"], next_step=progress["number"])
    print(f"Resuming at step {progress['step']} of the {progress['stage']} stage.")
    return state, progress


def _fresh_progress(stage: str) -> dict[str, Any]:
    return {
        "stage": stage,
        "step": 0,
        "number": 0,
        "draws": fresh_draws(),
        "log": {},
        "seconds": {},
        "outcomes": {},
        "programs_executed": 0,
        "max_logprob_gap": 0.0,
        "heldout": {},
    }
