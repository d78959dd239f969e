"""Losses of pairs: a better and a worse completion of one prompt.

Pairs share a row, the better one first (`Group.together = 2`), so the completions of a row
with the numbers 2k - 1 and 2k are a pair. A pair's loss lies on its tokens: with
`aggregation.sequence_sum` weights the sum is the mean over pairs.
"""

import jax
import jax.numpy as jnp

from jaxpt.rl.losses import TokenLoss, said, sequence_sums
from jaxpt.types import Batch, Outputs


def direct(outputs: Outputs, batch: Batch, *, beta: float = 0.1) -> TokenLoss:
    """DPO: -log sigmoid(beta x the margin) (arXiv:2305.18290, eq. 7).

    The margin is by how much more the better one's logprob exceeds the reference's than the
    worse one's does; sums over the tokens that are learnt from.
    """
    logprobs = said(outputs.logprobs, "preference.direct", "logprobs")
    reference = said(
        batch.reference_logprobs, "preference.direct", "a reference policy's logprobs"
    )
    chosen = batch.completion_mask
    margin = beta * _margin(jnp.where(chosen > 0, logprobs - reference, 0.0), batch)
    return _on_tokens(margin, batch), _metrics(margin)


def bradley_terry(outputs: Outputs, batch: Batch) -> TokenLoss:
    """A reward model's: -log sigmoid(score of the better - score of the worse), where the
    score is the value at the last token (Bradley and Terry 1952; arXiv:2203.02155, eq. 1).
    """
    values = said(outputs.values, "preference.bradley_terry", "values")
    ids = batch.sequence_ids
    following = jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))
    last = (ids > 0) & (ids != following)
    margin = _margin(jnp.where(last, values, 0.0), batch)
    return _on_tokens(margin, batch), _metrics(margin)


def _margin(x: jax.Array, batch: Batch) -> jax.Array:
    """The better one's sum of x minus the worse one's, at every token of both; [R, T]."""
    ids = batch.sequence_ids
    is_better = ids % 2 == 1
    signed = jnp.where(ids > 0, jnp.where(is_better, x, -x), 0.0)
    return sequence_sums(signed, (ids + 1) // 2)


def _on_tokens(margin: jax.Array, batch: Batch) -> jax.Array:
    """The pair's loss spread evenly: each sequence of the pair carries all of it once."""
    length = sequence_sums(batch.completion_mask, batch.sequence_ids)
    return -jax.nn.log_sigmoid(margin) / jnp.maximum(length, 1.0)


def _metrics(margin: jax.Array) -> dict[str, jax.Array]:
    return {"margin": margin, "pair_accuracy": (margin > 0).astype(jnp.float32)}
