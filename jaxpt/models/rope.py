"""Rotary position embedding (arXiv:2104.09864), in Hugging Face's half-turned layout."""

import jax
import jax.numpy as jnp


def cos_sin(
    positions: jax.Array, head_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """Factors of a turn; positions: BT -> two arrays [B, T, head_dim], see `rotate`.

    Angles are float32: exact to 2^24 positions. Whole heads' factors are joined here, which
    also keeps XLA from making sines anew in every rotation on a CPU.
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions[..., None].astype(jnp.float32) * theta**-exponents
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns each head's pairs (i, i + head_dim/2); x: BTHK, cos and sin: BTK.

    The halves change places as the middle of two copies, which a CPU reads with vector
    instructions; joined from two pieces, the result takes it twice as long.
    """
    half = x.shape[-1] // 2
    twice = jnp.concatenate([x, x], axis=-1)
    swapped = jax.lax.slice_in_dim(twice, half, 3 * half, axis=-1)
    return x * cos[:, :, None] + swapped * sin[:, :, None]
