"""Pass rates on held-out tasks: prompts in, one completion each, the share that passes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxpt.domains.domain import HELDOUT
from jaxpt.inference.sampling import SamplingConfig
from jaxpt.rollout.episodes import Clock, RolloutConfig, Sampler
from jaxpt.types import Trajectory

GREEDY = SamplingConfig(temperature=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How many held-out tasks, drawn with a seed of their own, and how they are batched."""

    num_tasks: int
    batch_size: int
    seed: int = 0
    sampling: SamplingConfig = SamplingConfig()

    def __post_init__(self):
        for name in ("num_tasks", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")


@dataclasses.dataclass(frozen=True)
class PassRate:
    """Tasks passed of those that could be graded; `ungraded` are in neither count."""

    passed: int
    graded: int
    ungraded: int
    by_domain: dict[str, float]

    @property
    def rate(self) -> float:
        return self.passed / max(self.graded, 1)


def evaluate(
    sampler: Sampler,
    params: Any,
    key: jax.Array,
    config: EvaluationConfig,
    *,
    greedy: bool,
    max_prompt_length: int,
    max_new_tokens: int,
    name: str,
    clock: Clock,
    on_batch: Callable[[int], None] = lambda tasks_done: None,
) -> tuple[PassRate, list[list[Trajectory]]]:
    """pass@1 on held-out tasks, greedy or sampled; the key is consumed.

    name: makes the episodes' ids unique. Returns the rate and every trajectory.
    """
    rollout = RolloutConfig(
        num_prompts=config.batch_size,
        group_size=1,
        max_prompt_length=max_prompt_length,
        max_new_tokens=max_new_tokens,
        sampling=GREEDY if greedy else config.sampling,
    )
    groups: list[list[Trajectory]] = []
    for start in range(0, config.num_tasks, config.batch_size):
        prompts = [
            sampler.mixture.draw(
                sampler.base.tokenizer,
                split=HELDOUT,
                seed=config.seed,
                index=index,
                max_length=max_prompt_length,
            )
            for index in range(start, min(start + config.batch_size, config.num_tasks))
        ]
        groups += sampler.rollout(
            params,
            prompts,
            jax.random.fold_in(key, start),
            rollout,
            episode_id=f"{name}/{start}",
            clock=clock,
        )
        on_batch(len(groups))
    return pass_rate(sampler, groups), groups


def passed(sampler: Sampler, trajectory: Trajectory) -> bool | None:
    """Whether the component that decides is 1; None for an episode without a reward."""
    reward = trajectory.outcome.reward
    if reward is None:
        return None
    decisive = sampler.mixture.domain(trajectory.prompt.domain).pass_component
    return reward.components.get(decisive, 0.0) >= 1.0


def pass_rate(sampler: Sampler, groups: list[list[Trajectory]]) -> PassRate:
    results: dict[str, list[bool]] = {}
    ungraded = 0
    for group in groups:
        for trajectory in group:
            result = passed(sampler, trajectory)
            if result is None:
                ungraded += 1
            else:
                results.setdefault(trajectory.prompt.domain, []).append(result)
    everything = [result for domain in results.values() for result in domain]
    return PassRate(
        passed=sum(everything),
        graded=len(everything),
        ungraded=ungraded,
        by_domain={name: sum(r) / len(r) for name, r in sorted(results.items())},
    )
