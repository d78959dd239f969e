"""The small layers: RMSNorm, embedding, unembedding and the dense SwiGLU block."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467).

    x: [..., D], scale: [D]; computed in float32, returned in the type of x.
    """
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(variance + epsilon)).astype(x.dtype) * scale


def embed(params: dict, tokens: jax.Array) -> jax.Array:
    """tokens: BT -> BTD."""
    return params["embed_tokens"][tokens]


def unembedding(params: dict) -> jax.Array:
    """The matrix from hidden states to logits, [D, V]; the embedding's when tied."""
    if "lm_head" in params:
        return params["lm_head"]
    return params["embed_tokens"].T


@jax.custom_vjp
def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x: BTD times weight: [D, ...] -> [B, T, ...].

    The derivative by the weight is a product over tokens, for which one factor has to be
    turned: here x, the cheap one. JAX's own rule turns the gradient, and on a CPU computes
    what the gradient is made of in the turned order: three times as long.
    """
    return jnp.tensordot(x, weight, axes=1)


def _project_forward(x, weight):
    return project(x, weight), (x, weight)


def _project_backward(saved, gradient):
    x, weight = saved
    outputs = tuple(range(1, weight.ndim))
    of_gradient = tuple(range(2, gradient.ndim))
    into_x = jax.lax.dot_general(gradient, weight, ((of_gradient, outputs), ((), ())))
    return into_x, jax.lax.dot_general(x, gradient, (((0, 1), (0, 1)), ((), ())))


project.defvjp(_project_forward, _project_backward)


def swiglu(
    x: jax.Array, gate_proj: jax.Array, up_proj: jax.Array, down_proj: jax.Array
) -> jax.Array:
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202); x: BTD, projections DF, DF, FD."""
    gate = project(x, gate_proj)
    up = project(x, up_proj)
    # The derivative makes it anew, which costs less than to keep its parts.
    hidden = jax.checkpoint(lambda gate, up: jax.nn.silu(gate) * up)(gate, up)
    return jnp.einsum("BTF,FD->BTD", hidden, down_proj)
