"""The key-value cache of a group of completions that share their prompt.

The prompt's keys and values are computed once and kept once, however many completions are
sampled from it. Both records are contexts of the forward function (`models.attention`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxpt.models.attention import NEGATIVE, attend


@struct.dataclass
class PrefillContext:
    """Causal attention over right-padded prompts; hands out their keys and values.

    mask: PSS for prompts of at most S tokens. After the forward pass the layer states are
    (keys, values), each [L, P, N, S, K]: as the products of decoding want them.
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

    layers: the prompts' keys and values, each [L, P, N, S, K], and the completions', keys
    [L, P, G, N, K, C] and values [L, P, G, N, C, K]: so neither is turned for its product.
    Or a list of such for each layer, without the L, where layers are unrolled.
    After the forward pass the layer states are what `append` needs: the new
    token's (keys, values), each [L, P, G, N, K], or, where layers are unrolled, the
    completions' caches with them in. So each way the caches are written in place, where a
    scan's results would be copies.
    prompt_mask: PS, True on the prompt's tokens; step: tokens decoded before this one.
    """

    layers: Any
    prompt_mask: jax.Array
    step: jax.Array

    def attend(self, q, k, v, layer):
        # Here g counts completions and G the query heads of a kv head: q is PgNGK.
        prompt_keys, prompt_values, keys, values = layer
        keys, values = _put(keys, values, (k, v), self.step)
        q = q * q.shape[-1] ** -0.5
        S, C = prompt_keys.shape[-2], keys.shape[-1]
        prompt_scores = jnp.einsum("PgNGK,PNSK->PgNGS", q, prompt_keys)
        scores = jnp.einsum("PgNGK,PgNKC->PgNGC", q, keys)
        prompt_mask = self.prompt_mask[:, None, None, None]
        seen = jnp.arange(C) <= self.step
        scores = jnp.concatenate(
            [
                jnp.where(prompt_mask, prompt_scores, NEGATIVE),
                jnp.where(seen, scores, NEGATIVE),
            ],
            axis=-1,
        )
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        out = jnp.einsum("PgNGS,PNSK->PgNGK", weights[..., :S], prompt_values)
        out += jnp.einsum("PgNGC,PgNCK->PgNGK", weights[..., S:], values)
        out /= jnp.sum(weights, axis=-1, keepdims=True)
        return out, (keys, values) if isinstance(self.layers, list) else (k, v)

    def append(self, new: Any) -> "DecodeContext":
        """The context of the next step, from the forward pass's layer states."""
        if isinstance(self.layers, list):
            layers = [(*layer[:2], *caches) for layer, caches in zip(self.layers, new)]
        else:
            prompt_keys, prompt_values, keys, values = self.layers
            keys, values = _put(keys, values, new, self.step)
            layers = (prompt_keys, prompt_values, keys, values)
        return dataclasses.replace(self, layers=layers, step=self.step + 1)


def _put(keys: jax.Array, values: jax.Array, new: Any, step: jax.Array):
    """The caches with the new token's keys and values at place `step`."""
    put = jax.lax.dynamic_update_index_in_dim
    return put(keys, new[0], step, axis=-1), put(values, new[1], step, axis=-2)


def decode_context(
    prefilled: Any, lengths: jax.Array, group_size: int, max_new_tokens: int
) -> DecodeContext:
    """An empty cache for `group_size` completions of each prefilled prompt.

    prefilled: the layer states that a forward pass with a PrefillContext returned.
    """

    def empty(prompt_keys, prompt_values):
        *leading, N, _, K = prompt_keys.shape
        shape = (*leading, group_size, N, max_new_tokens, K)
        values = jnp.zeros(shape, prompt_values.dtype)
        return prompt_keys, prompt_values, jnp.swapaxes(values, -1, -2), values

    unrolled = isinstance(prefilled, list)
    layers = [empty(*layer) for layer in prefilled] if unrolled else empty(*prefilled)
    length = jax.tree.leaves(prefilled)[0].shape[-2]
    return DecodeContext(
        layers=layers,
        prompt_mask=jnp.arange(length) < lengths[:, None],
        step=jnp.zeros((), jnp.int32),
    )
