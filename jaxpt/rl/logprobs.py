"""Logprobs and entropies of given tokens, without logits for all of them at once."""

import jax
import jax.numpy as jnp


def token_logprobs(
    hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, *, chunk_size: int
) -> tuple[jax.Array, jax.Array]:
    """Logprob of each target and entropy of its distribution.

    Logits exist for `chunk_size` tokens at a time, in the backward pass too, so memory does
    not grow with tokens x vocabulary.

    Args:
      hidden: [M, D], the states that predict the targets; unembedding: [D, V].
      targets: [M] int32.

    Returns: two float32 arrays [M], in nats.
    """
    M, D = hidden.shape
    chunk_size = min(chunk_size, M)
    chunks = -(-M // chunk_size)
    padding = chunks * chunk_size - M
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(chunks, chunk_size, D)
    targets = jnp.pad(targets, (0, padding)).reshape(chunks, chunk_size)

    def chunk(hidden, targets):
        logits = jnp.einsum("MD,DV->MV", hidden, unembedding).astype(jnp.float32)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        logprobs = logits - normalizer[:, None]
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return chosen - normalizer, entropy

    if chunks == 1:
        logprobs, entropy = chunk(hidden[0], targets[0])
    else:
        logprobs, entropy = jax.lax.map(
            lambda xs: jax.checkpoint(chunk)(*xs), (hidden, targets)
        )
    return logprobs.reshape(-1)[:M], entropy.reshape(-1)[:M]
