"""What a domain is: tasks by number, their worked solutions, and jobs that grade them.

A domain is a frozen dataclass with the members of `Domain`; nothing registers it, a
configuration names it. Its grader runs in a sandbox, so it crosses as source text.
"""

import dataclasses
import hashlib
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from sandbox.protocol import Job

TRAIN, HELDOUT = SPLITS = ("train", "heldout")
HELDOUT_SHARE = 1 / 8  # of what a domain tells apart: behaviours, questions

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One task of a domain.

    task_id: "<domain>/<split>/<seed>/<index>", and "@<level>" if the domain has several.
    messages: the prompt in chat form, [{"role": "user", "content": ...}].
    payload: JSON for the domain alone: hidden tests, the expected answer.
    """

    task_id: str
    messages: tuple[Mapping[str, str], ...]
    payload: Mapping[str, Any]


class Domain(Protocol):
    """A family of tasks."""

    @property
    def name(self) -> str:
        """What logs and task ids call it; one word."""
        ...

    @property
    def weights(self) -> Mapping[str, float]:
        """What each component of the verdict weighs in the total reward."""
        ...

    @property
    def pass_component(self) -> str:
        """The component that is 1 exactly when the task is solved."""
        ...

    @property
    def levels(self) -> int:
        """How many levels of difficulty its tasks have; 1 without a curriculum."""
        ...

    def task(self, split: str, seed: int, index: int, level: int = 0) -> Task:
        """The task with this number; the same in every process, for any index >= 0.

        level: from 0, the easiest, to below `levels`; other tasks on each.
        """
        ...

    def solution(self, task: Task) -> str:
        """The worked solution, as the model should write it."""
        ...

    def job(self, task: Task, completion: str, job_id: str) -> Job:
        """What a sandbox must do to grade a completion, which may be any string."""
        ...


def task_id(
    name: str, split: str, seed: int, index: int, level: int = 0, levels: int = 1
) -> str:
    """The id of a task, once its parts are checked; `levels` are the domain's."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r} must be one of {SPLITS}.")
    if index < 0:
        raise ValueError(f"index={index} must be 0 or more.")
    if not 0 <= level < levels:
        raise ValueError(f"level={level} must be below the {levels} of {name!r}, from 0.")
    return f"{name}/{split}/{seed}/{index}" + (f"@{level}" if levels > 1 else "")


def check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ValueError(
            f"name={name!r} must be one word of letters, digits and '_.-': it is a part "
            "of task ids."
        )


def check_weights(weights: Mapping[str, float], components: Sequence[str]) -> None:
    unknown = sorted(set(weights) - set(components))
    if unknown:
        raise ValueError(
            f"weights name {unknown}; the components are {sorted(components)}."
        )
    broken = {name: weight for name, weight in weights.items() if not math.isfinite(weight)}
    if broken:
        raise ValueError(f"weights {broken} must be finite.")


def digest(text: str) -> int:
    """A number of 64 bits from a text; unlike hash(), the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_held_out(text: str) -> bool:
    """Whether what `text` identifies belongs to the held-out split, and to no other."""
    return digest(text) < HELDOUT_SHARE * 2**64


def pick(rng: random.Random, choices: Sequence[T]) -> T:
    """One of the choices. Python promises the same random() for ever, not choice()."""
    return choices[int(rng.random() * len(choices))]
