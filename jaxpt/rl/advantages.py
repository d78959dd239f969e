"""Advantages from rewards: [groups, group_size] in, the same shape out.

`valid` is True on the episodes whose reward counts. The others (failures of the
infrastructure) take part in no statistic and get advantage 0, and so does an episode that
is alone in its group: with nothing to compare it to, there is no signal.
"""

import jax
import jax.numpy as jnp


def _mean(x: jax.Array, valid: jax.Array) -> jax.Array:
    count = jnp.maximum(jnp.sum(valid, axis=1, keepdims=True), 1)
    return jnp.sum(jnp.where(valid, x, 0.0), axis=1, keepdims=True) / count


def _comparable(valid: jax.Array) -> jax.Array:
    return valid & (jnp.sum(valid, axis=1, keepdims=True) > 1)


def group_relative(
    rewards: jax.Array, valid: jax.Array, *, epsilon: float = 1e-6
) -> jax.Array:
    """GRPO: reward minus the group's mean, over its standard deviation (arXiv:2402.03300).

    The standard deviation is the population's (division by n). Groups whose rewards are
    all equal get zeros.
    """
    centered = rewards - _mean(rewards, valid)
    deviation = jnp.sqrt(_mean(jnp.square(centered), valid))
    advantages = centered / (deviation + epsilon)
    return jnp.where(_comparable(valid) & (deviation > epsilon), advantages, 0.0)


def group_centered(rewards: jax.Array, valid: jax.Array) -> jax.Array:
    """Dr. GRPO: reward minus the group's mean (arXiv:2503.20783)."""
    return jnp.where(_comparable(valid), rewards - _mean(rewards, valid), 0.0)


def leave_one_out(rewards: jax.Array, valid: jax.Array) -> jax.Array:
    """RLOO: reward minus the mean of the group's other episodes (arXiv:2402.14740)."""
    count = jnp.sum(valid, axis=1, keepdims=True)
    scale = count / jnp.maximum(count - 1, 1)
    centered = (rewards - _mean(rewards, valid)) * scale
    return jnp.where(_comparable(valid), centered, 0.0)
