"""A step's rounds of sampling: which prompts stand where, what came of them, in figures."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxpt.data.mixture import Draws, Mixture
from jaxpt.evaluate import passed
from jaxpt.rollout.episodes import Clock, RolloutConfig, Sampler, timed
from jaxpt.run import REINFORCEMENT, Run
from jaxpt.types import Prompt, Trajectory


def sample(
    run: Run,
    draws: Draws,
    rollout: RolloutConfig,
    *,
    max_rounds: int,
    enough: Callable[[list[list[Trajectory]]], bool],
    clock: Clock,
    on_phase: Callable[[str], None],
) -> list[list[Trajectory]]:
    """The groups of one round, or of as many as it takes to have enough to learn from."""
    step = run.progress["step"]
    groups: list[list[Trajectory]] = []
    for number in range(max_rounds):
        on_phase("sample")
        with timed(clock, "draw"):
            slots = _slots(run, rollout, draws)
        parts = run.sampler.rollout(
            run.state.params,
            [prompt for prompt, _ in slots],
            run.key("sample", step * max_rounds + number),
            rollout,
            limits=[limit for _, limit in slots],
            episode_id=f"{REINFORCEMENT}/{step}/{number}",
            clock=clock,
            on_sampled=functools.partial(on_phase, "reward"),
        )
        whole: dict[int, list[Trajectory]] = {}
        for (prompt, _), part in zip(slots, parts, strict=True):
            whole.setdefault(id(prompt), []).extend(part)
        groups += whole.values()
        if enough(groups):
            break
    for group in groups:
        _record(run.sampler, draws, group, step)
    return groups


def _slots(run: Run, rollout: RolloutConfig, draws: Draws) -> list[tuple[Prompt, int]]:
    """What stands in each place for a group of the run's size: a prompt, its token limit.

    A larger group takes several places; the last one those that are left.
    """
    slots: list[tuple[Prompt, int]] = []
    while len(slots) < rollout.num_prompts:
        prompt = draws.next(
            run.base.tokenizer,
            step=run.progress["step"],
            max_length=rollout.max_prompt_length,
        )
        course = draws.mixture.courses[prompt.domain]
        places = (course.group_size or rollout.group_size) // rollout.group_size
        limit = course.max_new_tokens or rollout.max_new_tokens
        slots += [(prompt, limit)] * min(places, rollout.num_prompts - len(slots))
    return slots


def _record(sampler: Sampler, draws: Draws, group: list[Trajectory], step: int) -> None:
    results = [passed(sampler, trajectory) for trajectory in group]
    draws.record(
        group[0].prompt,
        passed=[result for result in results if result is not None],
        totals=[t.outcome.reward.total for t in group if t.outcome.reward],
        episodes=[(not t.outcome.reward, t.outcome.attempts) for t in group],
        step=step,
    )


def check_courses(mixture: Mixture, rollout: RolloutConfig) -> None:
    """Refuses group sizes and token limits that the run's shapes can't hold."""
    for course in mixture.courses.values():
        if course.group_size % rollout.group_size:
            raise ValueError(
                f"{course.name}: group_size={course.group_size} is no multiple of the "
                f"run's group_size={rollout.group_size}, in which all are sampled."
            )
        if course.max_new_tokens > rollout.max_new_tokens:
            raise ValueError(
                f"{course.name}: max_new_tokens={course.max_new_tokens} is over the run's "
                f"{rollout.max_new_tokens}; raise that one."
            )


def figures(sampler: Sampler, groups: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
    """Of one step's episodes; means are over those that carry a reward, if any does."""
    trajectories = [trajectory for group in groups for trajectory in group]
    rewards = [t.outcome.reward.total for t in trajectories if t.outcome.reward]
    results = [passed(sampler, t) for t in trajectories]
    results = [result for result in results if result is not None]
    kinds = collections.Counter(t.outcome.kind for t in trajectories)
    return {
        **({"reward": float(np.mean(rewards))} if rewards else {}),
        **({"pass_rate": float(np.mean(results))} if results else {}),
        "completion_tokens": float(np.mean([len(t.tokens) for t in trajectories])),
        **{f"outcome_{kind}": count for kind, count in sorted(kinds.items())},
    }


def figures_by_domain(sampler: Sampler, groups: list[list[Trajectory]]) -> dict[str, Any]:
    """The same for each domain that was sampled, as `domain/<name>/<figure>`."""
    found: dict[str, Any] = {}
    for name in sorted({group[0].prompt.domain for group in groups}):
        own = [group for group in groups if group[0].prompt.domain == name]
        for figure, value in figures(sampler, own).items():
            found[f"domain/{name}/{figure}"] = value
    return found
