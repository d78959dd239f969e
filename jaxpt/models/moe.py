"""The mixture-of-experts block: a router, the chosen experts, their weighted sum."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpt.models.config import MoEConfig
from jaxpt.parallel import expert_dispatch


def route(
    x: jax.Array, router: jax.Array, config: MoEConfig
) -> tuple[jax.Array, jax.Array]:
    """Chosen experts and their weights, both [..., k]; x: [..., D], router: [D, E].

    The router computes in float32. Ties go to the lower expert number.
    """
    logits = jnp.einsum("...D,DE->...E", x.astype(jnp.float32), router.astype(jnp.float32))
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits), config.experts_per_token)
    if config.normalize_weights:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts, weights


def moe_block(
    x: jax.Array, params: dict, config: MoEConfig, mesh: Mesh
) -> tuple[jax.Array, jax.Array]:
    """x: BTD (normed) -> BTD, and the experts chosen, [B, T, k] int32."""
    B, T, D = x.shape
    experts, weights = route(x, params["router"], config)
    k = config.experts_per_token
    out = expert_dispatch.expert_ffn(
        x.reshape(B * T, D),
        experts.reshape(B * T, k),
        weights.reshape(B * T, k).astype(x.dtype),
        params,
        mesh,
    )
    return out.reshape(B, T, D), experts


def expert_load(routes: jax.Array, mask: jax.Array, num_experts: int) -> jax.Array:
    """Tokens that each expert of each layer got: routes [L, B, T, k], mask BT -> [L, E].

    Sums of counts, so those of several micro-batches add up.
    """
    one_hot = routes[..., None] == jnp.arange(num_experts)
    return jnp.sum(one_hot * mask[None, :, :, None, None], axis=(1, 2, 3))


def load_imbalance(load: jax.Array) -> jax.Array:
    """The busiest expert's load over the mean; load: [L, E] -> [L]; 1 is even."""
    return jnp.max(load, axis=-1) / jnp.maximum(jnp.mean(load, axis=-1), 1e-9)
