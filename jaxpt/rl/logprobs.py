"""Logprobs and entropies of given tokens, without logits for all of them at once."""

import jax
import jax.numpy as jnp


def token_logprobs(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    wanted: jax.Array,
    *,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Logprob of each wanted target and entropy of its distribution; 0 for the others.

    Logits exist for about `chunk_size` tokens at a time, in the backward pass too, so
    memory does not grow with tokens x vocabulary. The wanted tokens of a row come first in
    its chunks, and a chunk without any costs nothing: prompts and padding have no logits.

    Args:
      hidden: [R, T, D], the states that predict the targets; unembedding: [D, V].
      targets: [R, T] int32; wanted: [R, T] bool.

    Returns: two float32 arrays [R, T], in nats.
    """
    R, T = targets.shape
    columns = min(max(chunk_size // R, 1), T)
    chunks = -(-T // columns)
    if chunks == 1:
        return _chunk(hidden, unembedding, targets, wanted)

    order = jnp.argsort(~wanted, axis=1, stable=True)
    hidden = jnp.take_along_axis(hidden, order[..., None], axis=1)

    def split(x):
        """[R, T, ...] -> [chunks, R, columns, ...]; the rows stay where they lie."""
        padding = [(0, 0), (0, chunks * columns - T), *[(0, 0)] * (x.ndim - 2)]
        x = jnp.pad(x, padding).reshape(R, chunks, columns, *x.shape[2:])
        return jnp.swapaxes(x, 0, 1)

    def of_chunk(chunk):
        hidden, targets, wanted = chunk
        nothing = jnp.zeros((R, columns), jnp.float32)
        return jax.lax.cond(
            jnp.any(wanted),
            lambda: jax.checkpoint(_chunk)(hidden, unembedding, targets, wanted),
            lambda: (nothing, nothing),
        )

    in_order = [jnp.take_along_axis(x, order, axis=1) for x in (targets, wanted)]
    results = jax.lax.map(of_chunk, (split(hidden), *map(split, in_order)))
    back = jnp.argsort(order, axis=1)
    logprobs, entropy = (
        jnp.take_along_axis(jnp.swapaxes(x, 0, 1).reshape(R, -1), back, axis=1)
        for x in results
    )
    return logprobs, entropy


def _chunk(hidden, unembedding, targets, wanted):
    """hidden: RtD, targets and wanted: Rt -> logprobs and entropies, Rt."""
    logits = jnp.einsum("RtD,DV->RtV", hidden, unembedding).astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    logprobs = logits - normalizer[..., None]
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return jnp.where(wanted, chosen - normalizer, 0.0), jnp.where(wanted, entropy, 0.0)
