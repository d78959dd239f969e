"""Rotary position embedding (arXiv:2104.09864), in Hugging Face's half-turned layout."""

import jax
import jax.numpy as jnp


def cos_sin(
    positions: jax.Array, head_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the angles; positions: BT -> two arrays [B, T, head_dim/2].

    Angles are float32: exact to 2^24 positions.
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions[..., None].astype(jnp.float32) * theta**-exponents
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns each head's pairs (i, i + head_dim/2); x: BTHK, cos and sin: [B, T, K/2]."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
