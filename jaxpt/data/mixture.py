"""Which task comes next: prompts from many domains, each with its share and its own course.

Warm starts and evaluations ask by number, `Mixture.draw`. Reinforcement draws along courses
whose levels, rests and quarantines follow from what came of earlier episodes: `Draws`, a
state of plain JSON that checkpoints hold.
"""

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpt.data import curriculum as curriculum_lib
from jaxpt.data.curriculum import Curriculum, Quarantine
from jaxpt.data.tokenizer import Tokenizer
from jaxpt.domains.domain import TRAIN, Domain, Task
from jaxpt.rl.algorithm import Algorithm
from jaxpt.types import Prompt

_TRIES = 100  # of tasks, until one's prompt is short enough
_FAR = 1_000_003  # from a task's number to the one that is tried in its place


class NothingToDraw(RuntimeError):
    """Every domain is in quarantine, or has no task that does not rest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """A domain, and how it is learnt in a mixture.

    ratio: its share of the groups, relative to the others'.
    group_size, max_new_tokens: episodes of a group, tokens of each; 0 for the run's own.
      The size is a multiple of the run's, the tokens at most its.
    algorithm: None for the run's.
    """

    domain: Domain
    ratio: float = 1.0
    group_size: int = 0
    max_new_tokens: int = 0
    algorithm: Algorithm | None = None
    curriculum: Curriculum = Curriculum()
    quarantine: Quarantine = Quarantine()

    def __post_init__(self):
        if not 0 < self.ratio < math.inf:
            raise ValueError(f"Course.ratio={self.ratio} must be positive.")
        if self.group_size < 0 or self.max_new_tokens < 0:
            raise ValueError(
                f"Course: group_size={self.group_size} and max_new_tokens="
                f"{self.max_new_tokens} must be 0, for the run's, or more."
            )

    @property
    def name(self) -> str:
        return self.domain.name


def courses(domains: Iterable[Domain], **settings: Any) -> tuple[Course, ...]:
    """Each of these domains with the same settings; see `Course`."""
    return tuple(Course(domain=domain, **settings) for domain in domains)


def joined(parts: Iterable[Iterable[Domain | Course]]) -> tuple[Domain | Course, ...]:
    """All of them, one part after the other."""
    return tuple(itertools.chain.from_iterable(parts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Domains, alone or as courses; alone a domain has a course's defaults."""

    domains: tuple[Domain | Course, ...]

    def __post_init__(self):
        if not self.domains:
            raise ValueError("Mixture.domains is empty: name at least one domain.")
        names = [domain.name for domain in self.domains]
        if len(set(names)) != len(names):
            raise ValueError(f"Mixture.domains {names} must have different names.")

    @functools.cached_property
    def courses(self) -> Mapping[str, Course]:
        """All of them, by their domain's name."""
        return {
            d.name: d if isinstance(d, Course) else Course(domain=d) for d in self.domains
        }

    def domain(self, name: str) -> Domain:
        return self.courses[name].domain

    def task(self, *, split: str, seed: int, index: int) -> tuple[Domain, Task]:
        """The task number `index` of a split, of any level, and its domain."""
        chooser = random.Random(f"mixture/{split}/{seed}/{index}")
        every = tuple(self.courses.values())
        (course,) = chooser.choices(every, [course.ratio for course in every])
        level = chooser.randrange(course.domain.levels)
        return course.domain, course.domain.task(split, seed, index, level)

    def draw(
        self,
        tokenizer: Tokenizer,
        *,
        split: str,
        seed: int,
        index: int,
        max_length: int,
    ) -> Prompt:
        """The prompt number `index` of a split; the same for the same arguments.

        One that is longer than `max_length` tokens is passed over for another one.

        Raises:
          ValueError: so were a hundred.
        """
        for attempt in range(_TRIES):
            domain, task = self.task(split=split, seed=seed, index=index + attempt * _FAR)
            prompt = _prompt(domain.name, task, tokenizer)
            if len(prompt.tokens) <= max_length:
                return prompt
        raise _too_long(prompt, max_length)


@dataclasses.dataclass
class Draws:
    """Where a run is in its mixture.

    state: plain JSON: `drawn`, groups so far; `too_long`, tasks passed over; for each
    domain its `curriculum` and `health`.
    first_task: the number of the first task of each domain.
    """

    mixture: Mixture
    state: dict[str, Any]
    seed: int
    first_task: int = 0

    def next(self, tokenizer: Tokenizer, *, step: int, max_length: int) -> Prompt:
        """The next group's prompt.

        One that is longer than `max_length` tokens is passed over, and counted.

        Raises:
          NothingToDraw: see there; the message says what failed.
          ValueError: a hundred tasks of one domain were too long.
        """
        chooser = random.Random(f"courses/{self.seed}/{self.state['drawn']}")
        self.state["drawn"] += 1
        active = [
            course
            for course in self.mixture.courses.values()
            if self._of(course.name)["health"]["until"] <= step
        ]
        while active:
            (course,) = chooser.choices(active, [course.ratio for course in active])
            prompt = self._next_of(course, tokenizer, step, max_length)
            if prompt is not None:
                return prompt
            active.remove(course)
        quarantined = [
            name
            for name, of in self.state["domains"].items()
            if of["health"]["until"] > step
        ]
        raise NothingToDraw(
            f"No domain has a task to draw at step {step}: in quarantine are "
            f"{quarantined or 'none'}, and all tasks of the others rest. Look at the "
            "outcomes in trajectories.jsonl, mend what fails, and start the same command "
            "again."
        )

    def _next_of(
        self, course: Course, tokenizer: Tokenizer, step: int, max_length: int
    ) -> Prompt | None:
        of = self._of(course.name)
        for _ in range(_TRIES):
            found, of["curriculum"] = curriculum_lib.next_task(
                course.curriculum, of["curriculum"], step
            )
            if found is None:
                return None
            level, number = found
            task = course.domain.task(TRAIN, self.seed, self.first_task + number, level)
            prompt = _prompt(course.name, task, tokenizer, level, number)
            if len(prompt.tokens) <= max_length:
                return prompt
            self.state["too_long"] += 1
        raise _too_long(prompt, max_length)

    def record(
        self,
        prompt: Prompt,
        *,
        passed: Sequence[bool],
        totals: Sequence[float],
        episodes: Sequence[tuple[bool, int]],
        step: int,
    ) -> None:
        """Takes note of what came of a group.

        passed, totals: of the episodes that carry a reward; episodes: of all, whether one
        was failed by the infrastructure or grader, and its attempts.
        """
        course, of = self.mixture.courses[prompt.domain], self._of(prompt.domain)
        of["curriculum"] = curriculum_lib.record(
            course.curriculum,
            of["curriculum"],
            levels=course.domain.levels,
            level=prompt.level,
            number=prompt.number,
            passed=passed,
            has_signal=max(totals, default=0.0) - min(totals, default=0.0) > 1e-9,
            step=step,
        )
        of["health"] = curriculum_lib.examine(
            course.quarantine, of["health"], episodes, step
        )

    def figures(self, step: int) -> dict[str, float]:
        """Of each domain its level, resting tasks, and whether it is in quarantine."""
        found: dict[str, float] = {}
        for name, of in sorted(self.state["domains"].items()):
            found[f"domain/{name}/level"] = of["curriculum"]["level"]
            found[f"domain/{name}/resting"] = curriculum_lib.resting(of["curriculum"], step)
            found[f"domain/{name}/quarantined"] = float(of["health"]["until"] > step)
        return found

    def _of(self, name: str) -> dict[str, Any]:
        fresh = {"curriculum": curriculum_lib.fresh(), "health": curriculum_lib.healthy()}
        return self.state["domains"].setdefault(name, fresh)


def fresh_draws() -> dict[str, Any]:
    return {"drawn": 0, "too_long": 0, "domains": {}}


def _prompt(
    name: str, task: Task, tokenizer: Tokenizer, level: int = 0, number: int = 0
) -> Prompt:
    return Prompt(
        prompt_id=task.task_id,
        domain=name,
        tokens=tuple(tokenizer.encode_chat(task.messages)),
        task=task,
        level=level,
        number=number,
    )


def _too_long(prompt: Prompt, max_length: int) -> ValueError:
    return ValueError(
        f"{_TRIES} prompts of {prompt.domain!r} in a row were over max_prompt_length="
        f"{max_length} tokens, the last one, {prompt.prompt_id}, with "
        f"{len(prompt.tokens)}; raise it, or make the domain's tasks shorter."
    )
