"""Losses per token: a model's outputs and a batch in, [R, T] out.

The update sums them, each times the batch's `loss_weights`. Metrics are per token as well,
and averaged over the completion tokens.

A policy's loss is put together from functions that are passed: what the ratio to the old
policy is, what of it is maximised (with which clip), what corrects for the sampler's
distribution, and the price of leaving a reference.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpt.rl.kl import Penalty, k3
from jaxpt.types import Batch, Outputs

TokenLoss = tuple[jax.Array, dict[str, jax.Array]]
LossFn = Callable[[Outputs, Batch], TokenLoss]
# (logprobs, batch) -> the policy's ratio to the old one; [R, T].
RatioFn = Callable[[jax.Array, Batch], jax.Array]
# (ratio, logprobs, advantages) -> what is maximised, and where a clip is in force; [R, T].
ObjectiveFn = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
# (old logprobs, logprobs of the distribution drawn from) -> constant weights; [R, T].
ImportanceFn = Callable[[jax.Array, jax.Array], jax.Array]


def supervised(outputs: Outputs, batch: Batch) -> TokenLoss:
    """Cross-entropy with the tokens given."""
    del batch
    return -said(outputs.logprobs, "losses.supervised", "logprobs"), {}


def token_ratio(logprobs: jax.Array, batch: Batch) -> jax.Array:
    """Of each token's probability to what it was (arXiv:1707.06347)."""
    return jnp.exp(logprobs - batch.old_logprobs)


def sequence_ratio(logprobs: jax.Array, batch: Batch) -> jax.Array:
    """GSPO: of the sequence's probability, by its length's root (arXiv:2507.18071, eq. 7).

    The same for all of a sequence's tokens, each with the gradient of its own (eq. 14), so
    that tokens may have advantages of their own.
    """
    chosen = batch.completion_mask
    gap = jnp.where(chosen > 0, logprobs - batch.old_logprobs, 0.0)
    length = sequence_sums(chosen, batch.sequence_ids)
    mean = sequence_sums(gap, batch.sequence_ids) / jnp.maximum(length, 1.0)
    own = logprobs - jax.lax.stop_gradient(logprobs)
    return jnp.exp(jax.lax.stop_gradient(mean) + own)


def sequence_sums(x: jax.Array, sequence_ids: jax.Array) -> jax.Array:
    """The sum of x over each token's sequence, at every token of it; both [R, T]."""

    def of_row(x, ids):
        return jax.ops.segment_sum(x, ids, num_segments=x.shape[0] + 1)[ids]

    return jax.vmap(of_row)(x, sequence_ids)


def unclipped(
    ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """ratio x advantage; where the policy is still the old one, REINFORCE's gradient."""
    del logprobs
    return ratio * advantages, jnp.zeros(ratio.shape, bool)


def clipped(
    ratio: jax.Array,
    logprobs: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[jax.Array, jax.Array]:
    """PPO: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (arXiv:1707.06347).

    With clip_high above clip_low it is DAPO's clip-higher (arXiv:2503.14476).
    """
    del logprobs
    bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    return jnp.minimum(ratio * advantages, bounded), bounded < ratio * advantages


def dual_clipped(
    ratio: jax.Array,
    logprobs: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    bound: float = 3.0,
) -> tuple[jax.Array, jax.Array]:
    """PPO's, and for negative advantages not below bound x advantage (arXiv:1912.09729)."""
    once, is_clipped = clipped(
        ratio, logprobs, advantages, clip_low=clip_low, clip_high=clip_high
    )
    too_low = (advantages < 0) & (once < bound * advantages)
    return jnp.where(too_low, bound * advantages, once), is_clipped | too_low


def clipped_weight(
    ratio: jax.Array,
    logprobs: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> tuple[jax.Array, jax.Array]:
    """CISPO: the clipped ratio, as a constant, times advantage x logprob, so no token loses
    its gradient (MiniMax-M1, arXiv:2506.13585). clip_low=1 is no lower bound."""
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    objective = jax.lax.stop_gradient(weight) * advantages * logprobs
    return objective, weight != ratio


def truncated_importance(
    old_logprobs: jax.Array, drawn_logprobs: jax.Array, *, limit: float = 2.0
) -> jax.Array:
    """TIS: min(old policy / distribution drawn from, limit), a constant.

    Corrects for temperature, top-k and top-p, for a sampler of other weights or precision,
    and for age (https://fengyao.notion.site/off-policy-rl).
    """
    weight = jnp.exp(old_logprobs - drawn_logprobs)
    return jax.lax.stop_gradient(jnp.minimum(weight, limit))


def masked_importance(
    old_logprobs: jax.Array,
    drawn_logprobs: jax.Array,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> jax.Array:
    """IcePop: the ratio where it lies in [low, high], and elsewhere 0: tokens on which
    sampler and trainer disagree are not learnt from (Ring-1T, arXiv:2510.18855, eq. 2)."""
    weight = jnp.exp(old_logprobs - drawn_logprobs)
    kept = (weight >= low) & (weight <= high)
    return jax.lax.stop_gradient(jnp.where(kept, weight, 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """-objective(ratio, advantage) x importance + penalty - entropy_weight x entropy.

    importance: None for no correction.
    penalty: towards the reference policy; None for none.
    """

    ratio: RatioFn = token_ratio
    objective: ObjectiveFn = clipped
    importance: ImportanceFn | None = None
    penalty: Penalty | None = None
    entropy_weight: float = 0.0

    def __post_init__(self):
        if self.penalty is not None:
            self.penalty.check_as_loss()

    def __call__(self, outputs: Outputs, batch: Batch) -> TokenLoss:
        """Raises ValueError if there is a penalty and the batch has no reference."""
        logprobs = said(outputs.logprobs, "losses.PolicyLoss", "logprobs")
        entropy = said(outputs.entropy, "losses.PolicyLoss", "entropy")
        ratio = self.ratio(logprobs, batch)
        surrogate, is_clipped = self.objective(ratio, logprobs, batch.advantages)
        metrics = {
            "kl_old": k3(logprobs, batch.old_logprobs),
            "clip_fraction": is_clipped.astype(jnp.float32),
        }
        loss = -surrogate
        if self.importance is not None:
            weight = self.importance(batch.old_logprobs, batch.processed_logprobs)
            metrics["importance_weight"] = weight
            loss = loss * weight
        if self.penalty is not None:
            reference = said(
                batch.reference_logprobs, "kl.Penalty", "a reference policy's logprobs"
            )
            loss = loss + self.penalty.loss(logprobs, ratio, reference)
            metrics["kl_reference"] = k3(logprobs, reference)
        if self.entropy_weight:
            loss = loss - self.entropy_weight * entropy
        return loss, metrics


def value_loss(outputs: Outputs, batch: Batch, *, clip: float | None = 0.2) -> TokenLoss:
    """A critic's: half the squared distance to the returns.

    With `clip`, the larger of that and the distance once the value is kept so close to the
    old one (as PPO's reference code does; arXiv:2005.12729, appendix).
    """
    values = said(outputs.values, "losses.value_loss", "values")
    returns = said(batch.returns, "losses.value_loss", "returns")
    old = said(batch.old_values, "losses.value_loss", "a critic's old values")
    squared = jnp.square(values - returns)
    metrics = {"value_error": jnp.abs(values - returns)}
    if clip is not None:
        kept = old + jnp.clip(values - old, -clip, clip)
        further = jnp.square(kept - returns)
        metrics["value_clip_fraction"] = (further > squared).astype(jnp.float32)
        squared = jnp.maximum(squared, further)
    return squared / 2.0, metrics


def by_loss_id(*loss_fns: LossFn) -> LossFn:
    """Each token's loss by the function that its `loss_ids` names; one for many domains.

    Metrics that several functions have are each token's own function's.
    """
    if len(loss_fns) == 1:
        return loss_fns[0]

    def loss_fn(outputs: Outputs, batch: Batch) -> TokenLoss:
        total = jnp.zeros(batch.tokens.shape, jnp.float32)
        metrics: dict[str, jax.Array] = {}
        for i, function in enumerate(loss_fns):
            own = batch.loss_ids == i
            loss, said_of = function(outputs, batch)
            total = jnp.where(own, loss, total)
            for name, value in said_of.items():
                metrics[name] = jnp.where(own, value, metrics.get(name, 0.0))
        return total, metrics

    return loss_fn


def said(array: jax.Array | None, who: str, what: str) -> jax.Array:
    """The array; raises ValueError, naming who needs what, if there is none."""
    if array is None:
        raise ValueError(f"{who} needs {what}, and this batch or model has none.")
    return array
