"""The key-value cache of a group of completions that share their prompt.

The prompt's keys and values are computed once and kept once, however many completions are
sampled from it. Both records are contexts of the forward function (`models.attention`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxpt.models.attention import NEGATIVE, attend


@struct.dataclass
class PrefillContext:
    """Causal attention over right-padded prompts; hands out their keys and values.

    mask: PSS for prompts of at most S tokens. After the forward pass the layer states are
    (keys, values), each [L, P, N, S, K]: a head's keys lie together, as its products want.
    """

    mask: jax.Array
    layers: None = None

    def attend(self, q, k, v, layer):
        out = attend(q, k, v, self.mask)
        return out, (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))


def prefill_context(lengths: jax.Array, length: int) -> PrefillContext:
    """lengths: [P] tokens of each prompt, padded to `length`."""
    positions = jnp.arange(length)
    real = positions[None, :] < lengths[:, None]
    causal = positions[:, None] >= positions[None, :]
    return PrefillContext(mask=causal[None] & real[:, None, :])


@struct.dataclass
class DecodeContext:
    """One step of decoding P x G completions.

    The forward function sees the tokens as [P, G]: the completions of a prompt stand where
    a sequence's positions would, and share the prompt's keys.

    layers: (prompt keys, prompt values [L, P, N, S, K], keys, values [L, P, N, G, C, K]).
    After the forward pass the layer states are the new token's (keys, values), each
    [L, P, N, G, K], for `append`.
    prompt_mask: PS, True on the prompt's tokens; step: tokens decoded before this one.
    """

    layers: Any
    prompt_mask: jax.Array
    step: jax.Array

    def attend(self, q, k, v, layer):
        # Here g counts completions and G the query heads of a kv head: q is PgNGK.
        prompt_keys, prompt_values, keys, values = layer
        new = (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
        # The new token's entry goes where `append` will put it.
        keys, values = (
            jax.lax.dynamic_update_index_in_dim(cache, entry, self.step, axis=3)
            for cache, entry in zip((keys, values), new)
        )
        q = q * q.shape[-1] ** -0.5
        S, C = prompt_keys.shape[2], keys.shape[3]
        seen = jnp.arange(C) <= self.step
        prompt_scores = jnp.einsum("PgNGK,PNSK->PNgGS", q, prompt_keys)
        scores = jnp.einsum("PgNGK,PNgCK->PNgGC", q, keys)
        weights = jax.nn.softmax(
            jnp.concatenate(
                [
                    jnp.where(
                        self.prompt_mask[:, None, None, None], prompt_scores, NEGATIVE
                    ),
                    jnp.where(seen, scores, NEGATIVE),
                ],
                axis=-1,
            )
        )
        out = jnp.einsum("PNgGS,PNSK->PgNGK", weights[..., :S], prompt_values)
        out += jnp.einsum("PNgGC,PNgCK->PgNGK", weights[..., S:], values)
        return out, new

    def append(self, new: tuple[jax.Array, jax.Array]) -> "DecodeContext":
        """The context of the next step, with the new token's keys and values in it."""
        prompt_keys, prompt_values, keys, values = self.layers
        keys, values = (
            jax.lax.dynamic_update_index_in_dim(cache, entry, self.step, axis=4)
            for cache, entry in zip((keys, values), new)
        )
        return self.replace(
            layers=(prompt_keys, prompt_values, keys, values), step=self.step + 1
        )


def decode_context(
    prefilled: tuple[jax.Array, jax.Array],
    lengths: jax.Array,
    group_size: int,
    max_new_tokens: int,
) -> DecodeContext:
    """An empty cache for `group_size` completions of each prefilled prompt."""
    prompt_keys, prompt_values = prefilled
    L, P, N, S, K = prompt_keys.shape
    empty = jnp.zeros((L, P, N, group_size, max_new_tokens, K), prompt_keys.dtype)
    return DecodeContext(
        layers=(prompt_keys, prompt_values, empty, empty),
        prompt_mask=jnp.arange(S) < lengths[:, None],
        step=jnp.zeros((), jnp.int32),
    )
