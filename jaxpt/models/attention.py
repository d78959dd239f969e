"""Grouped-query attention: projections, and what the queries may look at.

What is attended to is a value, the *context*, passed to the forward function: training
attends within packed rows, sampling to a cache. A context has

    layers                              its state per layer, a pytree with a leading [L]
    attend(q, k, v, layer) -> (out, layer)

with q: [B, T, N, G, K] (N key-value heads, G query heads for each), k and v: [B, T, N, K],
out as q. The returned layer states are stacked and handed back by the forward function.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxpt.models import rope
from jaxpt.models.config import ModelConfig
from jaxpt.models.layers import project, rms_norm

NEGATIVE = jnp.finfo(jnp.float32).min


class Context(Protocol):
    @property
    def layers(self) -> Any: ...

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, layer: Any
    ) -> tuple[jax.Array, Any]: ...


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention; q: BTNGK, k and v: BSNK, mask: BTS (True = visible) -> BTNGK.

    A query that sees nothing gets the mean of all values, without a derivative that means
    anything: only padding may be one.
    """
    q = jnp.einsum("BTNGK->BNGTK", q * q.shape[-1] ** -0.5)
    out = _attend(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), mask)
    return jnp.einsum("BNGTK->BTNGK", out)


@jax.custom_vjp
def _attend(q, k, v, mask):
    """Heads first: q, scaled, BNGTK, k and v: BNSK, mask: BTS -> BNGTK.

    The scores, which are the large array here, are written and read as few times as can be.
    The softmax's division comes after the sum over values, and the derivative, which has
    the algebra of FlashAttention's (arXiv:2205.14135, appendix B.4), keeps one array of
    their size and turns none.
    """
    return _attend_forward(q, k, v, mask)[0]


def _attend_forward(q, k, v, mask):
    scores = jnp.einsum("BNGTK,BNSK->BNGTS", q, k)
    scores = jnp.where(mask[:, None, None], scores, NEGATIVE)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("BNGTS,BNSK->BNGTK", weights, v) / total
    return out, (q, k, v, weights, total, out)


def _attend_backward(saved, gradient):
    q, k, v, weights, total, out = saved
    gradient = gradient / total
    into_weights = jnp.einsum("BNGTK,BNSK->BNGTS", gradient, v)
    mean = jnp.sum(gradient * out, axis=-1, keepdims=True)
    into_scores = weights * (into_weights - mean)
    return (
        jnp.einsum("BNGTS,BNSK->BNGTK", into_scores, k),
        jnp.swapaxes(jnp.einsum("BNGTK,BNGTS->BNKS", q, into_scores), -1, -2),
        jnp.swapaxes(jnp.einsum("BNGTK,BNGTS->BNKS", gradient, weights), -1, -2),
        None,
    )


_attend.defvjp(_attend_forward, _attend_backward)


def tree_mask(segment_ids: jax.Array, branch_ids: jax.Array) -> jax.Array:
    """Who sees whom in packed rows; both BT -> BTS.

    A row holds segments (0 is padding), and a segment one shared prompt (branch 0) with
    the completions sampled from it (branches 1, 2, ...). A token sees the earlier tokens
    of its own segment that belong to the prompt or to its own branch, so several
    completions share one copy of their prompt and do not see each other.
    """
    length = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
    branch = branch_ids[:, None, :]
    visible_branch = (branch == 0) | (branch == branch_ids[:, :, None])
    return causal[None] & same_segment & visible_branch


@struct.dataclass
class PackedContext:
    """Attention within packed rows, for training; mask: BTS, see `tree_mask`."""

    mask: jax.Array
    layers: None = None

    def attend(self, q, k, v, layer):
        return attend(q, k, v, self.mask), layer


def attention_block(
    x: jax.Array,
    params: dict,
    angles: tuple[jax.Array, jax.Array],
    context: Context,
    layer: Any,
    config: ModelConfig,
) -> tuple[jax.Array, Any]:
    """x: BTD (normed) -> BTD, and the context's new layer state."""
    q = project(x, params["q_proj"])
    k = project(x, params["k_proj"])
    v = project(x, params["v_proj"])
    if config.qk_norm:
        q = rms_norm(q, params["q_norm"], config.norm_epsilon)
        k = rms_norm(k, params["k_norm"], config.norm_epsilon)
    q, k = rope.rotate(q, *angles), rope.rotate(k, *angles)
    B, T, H, K = q.shape
    grouped = q.reshape(B, T, config.num_kv_heads, config.queries_per_kv_head, K)
    out, layer = context.attend(grouped, k, v, layer)
    out = out.reshape(B, T, H, K)
    return jnp.einsum("BTHK,HKD->BTD", out, params["o_proj"]), layer
