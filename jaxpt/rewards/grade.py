"""From a sandbox's result to an episode's outcome: typed, and never a bare 0."""

import dataclasses
from collections.abc import Mapping

from jaxpt.types import (
    GRADER_FAIL,
    INFRA_FAIL,
    OK,
    POLICY_FAIL,
    TRUNCATED,
    Outcome,
    Reward,
)
from sandbox.protocol import Result


def total_reward(components: Mapping[str, float], weights: Mapping[str, float]) -> Reward:
    """Weighs the components; one with no weight counts 0 but is kept to be seen.

    Raises:
      ValueError: a weight names a component that the grader did not give.
    """
    missing = sorted(set(weights) - set(components))
    if missing:
        raise ValueError(
            f"weights name {missing}, but the grader gives {sorted(components)}."
        )
    total = sum(weight * components[name] for name, weight in weights.items())
    return Reward(components=dict(components), total=float(total))


def outcome(result: Result, *, weights: Mapping[str, float], finished: bool) -> Outcome:
    """The outcome of an episode, from its sandbox's result.

    An episode whose program did not run to a valid artifact (`policy_fail`) has every
    component 0. One cut off by the token limit is graded as it stands, as `truncated`.
    """
    known = {
        "reason": result.reason,
        "attempts": result.attempts,
        "seconds": dict(result.seconds),
        "usage": dataclasses.asdict(result.usage) if "execute" in result.seconds else {},
    }
    if result.outcome in (INFRA_FAIL, GRADER_FAIL):
        why = result.stderr.text().strip() or result.reason
        return Outcome(kind=result.outcome, why=why, reward=None, **known)
    if result.outcome == POLICY_FAIL:
        reward = Reward(components=dict.fromkeys(weights, 0.0), total=0.0)
        why = result.stderr.text().strip().rpartition("\n")[2] or result.reason
        kind = POLICY_FAIL
    else:
        verdict = result.verdict
        if verdict is None:
            raise ValueError(f"{result.job_id}: outcome ok without a verdict.")
        reward = total_reward(verdict["components"], weights)
        why, kind = str(verdict["why"]), OK
    return Outcome(kind=kind if finished else TRUNCATED, why=why, reward=reward, **known)
