"""Tries an algorithm on made-up episodes: what is missing, and what would have no effect.

Nothing here knows the functions that exist. An option has an effect if a change of it, or
of what it brings, changes a loss or an advantage.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpt.rl.advantages import Episodes, Ragged, flat
from jaxpt.rl.algorithm import Algorithm
from jaxpt.types import Batch, Outputs

_LENGTH = 4


def check(
    algorithms: Sequence[Algorithm],
    *,
    group_size: int,
    reference: bool,
    critic: bool,
    teacher: bool,
    drawn_is_old: bool = False,
) -> None:
    """reference, critic, teacher: whether the run is going to have one.

    algorithms: all that it uses. group_size: of the smallest groups.
    drawn_is_old: whether the distribution drawn from is the policy that ratios are taken
    against, so that nothing needs correction.

    Raises:
      ValueError: an advantage that is 0 whatever the rewards are, something that is needed
        and missing, or something that no algorithm uses.
    """
    present = {"reference": reference, "critic": critic, "teacher": teacher}
    used: set[str] = set()
    for algorithm in algorithms:
        used |= _used(algorithm, group_size, present, drawn_is_old)
    names = " and ".join(dict.fromkeys(_name(a.advantage) for a in algorithms))
    loss_names = " and ".join(dict.fromkeys(_name(a.loss) for a in algorithms))
    if critic and "critic" not in used:
        raise ValueError(
            f"The critic has no effect under {names}, which does not use its values. "
            "Leave it out, or take advantages.generalized."
        )
    if teacher and "teacher" not in used:
        raise ValueError(
            f"The teacher has no effect under {names}, which does not use its logprobs. "
            "Leave it out, or take advantages.distillation."
        )
    if reference and "reference" not in used:
        raise ValueError(
            f"The reference policy has no effect: the loss {loss_names} has no penalty, "
            "and there is none in the reward. Leave it out, or set one."
        )


def _used(
    algorithm: Algorithm, group_size: int, present: dict[str, bool], drawn_is_old: bool
) -> set[str]:
    """Which of what is present the algorithm uses; see `check` for the errors."""
    rng = np.random.default_rng(0)
    number = 2 * group_size
    logprobs, values, teachers, references = (
        [-rng.random(_LENGTH) for _ in range(number)] for _ in range(4)
    )
    episodes = Episodes(
        rewards=rng.random(number),
        groups=np.repeat(np.arange(2), group_size),
        masks=[np.ones(_LENGTH, bool)] * number,
        logprobs=logprobs,
        token_rewards=[np.zeros(_LENGTH)] * number,
        turns=[np.zeros(_LENGTH, int)] * number,
        values=values if present["critic"] else None,
        teacher_logprobs=teachers if present["teacher"] else None,
    )
    batch = _batch(rng)
    if present["reference"]:
        batch = dataclasses.replace(batch, reference_logprobs=batch.processed_logprobs)

    def credit(**changes: Any) -> np.ndarray:
        tried = dataclasses.replace(episodes, **changes)
        return flat(algorithm.credit(tried, references if present["reference"] else None))

    def loss(batch: Batch) -> np.ndarray:
        said = -jnp.abs(batch.sampler_logprobs + 0.1)
        return np.asarray(algorithm.loss(Outputs(said, said, said), batch)[0])

    def changed(**changes: Any) -> Batch:
        return dataclasses.replace(batch, **changes)

    advantage = _name(algorithm.advantage)
    found, losses = credit(), loss(batch)
    if np.array_equal(losses, loss(changed(advantages=2 * batch.advantages))):
        if np.any(found):
            raise ValueError(
                f"{advantage} has no effect: the loss {_name(algorithm.loss)} does not use "
                "advantages. Take advantages.none."
            )
    elif not np.any(found):
        raise ValueError(
            f"{advantage} gives every token the advantage 0 in groups of group_size="
            f"{group_size}. Raise group_size, or take another advantage."
        )
    if drawn_is_old:
        same = batch.old_logprobs
        corrected = loss(changed(processed_logprobs=same + 2.0))
        if not np.array_equal(loss(changed(processed_logprobs=same)), corrected):
            raise ValueError(
                "The loss's correction for importance has no effect: the sampler draws "
                "from the plain distribution (temperature 1, no top-k, no top-p), which is "
                "the old policy. Leave it out, or set recompute_old_logprobs=True."
            )
    used = set()
    if present["critic"] and not np.array_equal(found, credit(values=_doubled(values))):
        used.add("critic")
    if present["teacher"] and not np.array_equal(
        found, credit(teacher_logprobs=_doubled(teachers))
    ):
        used.add("teacher")
    if present["reference"]:
        moved = loss(changed(reference_logprobs=batch.processed_logprobs * 2))
        if algorithm.reward_penalty is not None or not np.array_equal(losses, moved):
            used.add("reference")
    return used


def _batch(rng: np.random.Generator) -> Batch:
    """Two completions of one prompt of one token, in one row."""
    ids = np.array([[0] + [1] * _LENGTH + [2] * _LENGTH])
    floats = [-rng.random(ids.shape).astype(np.float32) for _ in range(6)]
    sampler, processed, old, advantages, values, returns = map(jnp.asarray, floats)
    mask = jnp.asarray(ids > 0, jnp.float32)
    zeros = jnp.zeros(ids.shape, jnp.int32)
    return Batch(
        tokens=zeros,
        positions=zeros,
        segment_ids=zeros + 1,
        branch_ids=jnp.asarray(ids),
        sequence_ids=jnp.asarray(ids),
        parents=zeros,
        completion_mask=mask,
        loss_ids=zeros,
        loss_weights=mask,
        sampler_logprobs=sampler,
        processed_logprobs=processed,
        old_logprobs=old,
        advantages=advantages,
        num_rows=jnp.int32(1),
        old_values=values,
        returns=returns,
    )


def _doubled(ragged: Sequence[np.ndarray]) -> Ragged:
    return [2 * values for values in ragged]


def _name(function: Callable[..., Any]) -> str:
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)
