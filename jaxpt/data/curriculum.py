"""Which task of a domain comes next: its level, its number, and whether it rests.

Pure functions over a state of plain JSON, which checkpoints hold as it is. Nothing but the
outcomes of episodes moves it: no clock, no randomness, so a run that resumes goes on alike.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# Of one domain: `level`; `drawn`, tasks so far; `passed` and `graded`, episodes at this
# level since it was reached; `tasks`, of a bounded set: number -> [visits without a signal,
# step from which it may be drawn again].
State = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Levels by pass rate, and rest for tasks that teach nothing.

    low, high: below and above these pass rates the level falls and rises by one, once
      `window` episodes at it were graded.
    num_tasks: of each level, drawn round after round; 0 for new tasks without end.
    retire_after: visits one after the other in which a task's group had no signal, all of
      its episodes having earned the same; then it is left out for `retry_after` steps,
      twice as long each further time. 0 for never. Only tasks of a bounded set come again.
    """

    low: float = 0.2
    high: float = 0.8
    window: int = 64
    num_tasks: int = 0
    retire_after: int = 0
    retry_after: int = 50

    def __post_init__(self):
        if not 0.0 <= self.low < self.high <= 1.0:
            raise ValueError(
                f"Curriculum.low={self.low} and high={self.high} must be pass rates, the "
                "lower one first."
            )
        if (
            min(self.window, self.retry_after) < 1
            or min(self.num_tasks, self.retire_after) < 0
        ):
            raise ValueError(
                f"Curriculum: window={self.window} and retry_after={self.retry_after} must "
                f"be 1 or more, num_tasks={self.num_tasks} and retire_after="
                f"{self.retire_after} 0 or more."
            )
        if self.retire_after and not self.num_tasks:
            raise ValueError(
                f"Curriculum.retire_after={self.retire_after} has no effect with "
                "num_tasks=0: no task ever comes again. Set num_tasks, or leave it 0."
            )


def fresh() -> State:
    return {"level": 0, "drawn": 0, "passed": 0, "graded": 0, "tasks": {}}


def next_task(
    curriculum: Curriculum, state: State, step: int
) -> tuple[tuple[int, int] | None, State]:
    """(level, number) of the next task, None if all of the level rest; the state after."""
    level, drawn = state["level"], state["drawn"]
    if not curriculum.num_tasks:
        return (level, drawn), state | {"drawn": drawn + 1}
    for ahead in range(curriculum.num_tasks):
        number = (drawn + ahead) % curriculum.num_tasks
        _, until = state["tasks"].get(_name(level, number), (0, 0))
        if until <= step:
            return (level, number), state | {"drawn": drawn + ahead + 1}
    return None, state


def record(
    curriculum: Curriculum,
    state: State,
    *,
    levels: int,
    level: int,
    number: int,
    passed: Sequence[bool],
    has_signal: bool,
    step: int,
) -> State:
    """The state after a task's group was graded.

    passed: of the group's episodes that could be graded; without any nothing is learnt.
    levels: the domain's. level, number: the task's.
    """
    if not passed:
        return state
    if curriculum.retire_after:
        name = _name(level, number)
        tasks = _visited(curriculum, state["tasks"], name, has_signal, step)
        state = state | {"tasks": tasks}
    if level != state["level"]:  # drawn before the level moved
        return state
    graded = state["graded"] + len(passed)
    right = state["passed"] + sum(passed)
    if graded < curriculum.window:
        return state | {"graded": graded, "passed": right}
    rate = right / graded
    move = (rate > curriculum.high) - (rate < curriculum.low)
    reached = min(max(level + move, 0), levels - 1)
    return state | {"level": reached, "graded": 0, "passed": 0}


def _visited(
    curriculum: Curriculum,
    tasks: Mapping[str, Sequence[int]],
    name: str,
    has_signal: bool,
    step: int,
) -> dict[str, Sequence[int]]:
    if has_signal:
        return {other: value for other, value in tasks.items() if other != name}
    silent = tasks.get(name, (0, 0))[0] + 1
    times, rest = divmod(silent, curriculum.retire_after)
    until = step + curriculum.retry_after * 2 ** (times - 1) if times and not rest else 0
    return {**tasks, name: [silent, until]}


def resting(state: State, step: int) -> int:
    """Tasks that are left out at this step."""
    return sum(until > step for _, until in state["tasks"].values())


def _name(level: int, number: int) -> str:
    return f"{level}/{number}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quarantine:
    """When a domain is left out because what surrounds it is broken.

    Of its last `window` episodes, a share of more than `failures` that the infrastructure
    or grader failed, or of more than `flakes` that took several attempts, leaves it out for
    `steps` steps; then it is tried again, and left out twice as long if that fails too.
    """

    failures: float = 0.5
    flakes: float = 1.0
    window: int = 32
    steps: int = 10

    def __post_init__(self):
        if not (0 < self.failures <= 1 and 0 < self.flakes <= 1):
            raise ValueError(
                f"Quarantine.failures={self.failures} and flakes={self.flakes} must be "
                "shares above 0."
            )
        if min(self.window, self.steps) < 1:
            raise ValueError(
                f"Quarantine.window={self.window} and steps={self.steps} must be 1 or more."
            )


def healthy() -> State:
    """`recent`: a letter for each of the last episodes, f(ailed), a(gain) or g(ood);
    `until`: the step from which it may be drawn; `times` it was left out in a row."""
    return {"recent": "", "until": 0, "times": 0}


def examine(
    quarantine: Quarantine, state: State, episodes: Sequence[tuple[bool, int]], step: int
) -> State:
    """The state after these episodes: (whether one failed, its attempts) of each."""
    letters = "".join(
        "f" if failed else "a" if attempts > 1 else "g" for failed, attempts in episodes
    )
    recent = (state["recent"] + letters)[-quarantine.window :]
    if len(recent) < quarantine.window:
        return state | {"recent": recent}
    failed = recent.count("f") / len(recent) > quarantine.failures
    flaky = recent.count("a") / len(recent) > quarantine.flakes
    if not failed and not flaky:
        return state | {"recent": recent, "times": 0}
    until = step + quarantine.steps * 2 ** state["times"]
    return {"recent": "", "until": until, "times": state["times"] + 1}
