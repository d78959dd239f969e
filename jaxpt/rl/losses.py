"""Losses per token: logprobs and a batch in, [R, T] out.

The update sums them over the completion tokens and divides by the number of these in the
whole batch. Metrics are per token as well, and averaged in the same way.
"""

import jax
import jax.numpy as jnp

from jaxpt.types import Batch

TokenLoss = tuple[jax.Array, dict[str, jax.Array]]


def supervised(logprobs: jax.Array, entropy: jax.Array, batch: Batch) -> TokenLoss:
    """Cross-entropy with the tokens given."""
    del entropy, batch
    return -logprobs, {}


def kl_k3(logprobs: jax.Array, other_logprobs: jax.Array) -> jax.Array:
    """Schulman's k3 estimate of KL(policy || other) for tokens drawn from the policy.

    exp(d) - 1 - d with d = other - policy: never negative, zero where they agree
    (http://joschu.net/blog/kl-approx.html).
    """
    difference = other_logprobs - logprobs
    return jnp.exp(difference) - 1.0 - difference


def truncated_importance(
    logprobs: jax.Array, processed_logprobs: jax.Array, limit: float
) -> jax.Array:
    """min(pi / mu, limit) where mu is the distribution that the sampler really drew from.

    Corrects for temperature, top-k and top-p and for any other gap between sampler and
    trainer, as a constant (no gradient) (TIS; https://fengyao.notion.site/off-policy-rl).
    """
    weight = jnp.exp(jax.lax.stop_gradient(logprobs) - processed_logprobs)
    return jnp.minimum(weight, limit)


def clipped(
    logprobs: jax.Array,
    entropy: jax.Array,
    batch: Batch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    importance_limit: float = 2.0,
    kl_weight: float = 0.0,
    entropy_weight: float = 0.0,
) -> TokenLoss:
    """The clipped policy loss of PPO and GRPO, token by token, with clip-higher (DAPO).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) * w, where r is the ratio of the new
    to the old policy, A the advantage, and w the truncated importance weight of the old
    policy against the distribution drawn from (arXiv:1707.06347, 2402.03300, 2503.14476).
    With `kl_weight`, k3 towards the policy that sampled is added; with `entropy_weight`,
    the entropy is subtracted.
    """
    ratio = jnp.exp(logprobs - batch.old_logprobs)
    bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    surrogate = jnp.minimum(ratio * batch.advantages, bounded * batch.advantages)
    weight = truncated_importance(
        batch.old_logprobs, batch.processed_logprobs, importance_limit
    )
    kl = kl_k3(logprobs, batch.old_logprobs)
    loss = -surrogate * weight + kl_weight * kl - entropy_weight * entropy
    metrics = {
        "clip_fraction": (surrogate < ratio * batch.advantages).astype(jnp.float32),
        "importance_weight": weight,
        "kl_old": kl,
    }
    return loss, metrics
