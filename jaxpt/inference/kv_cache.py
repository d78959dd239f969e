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
    keys [L, P, N, K, S] and values [L, P, N, S, K]: as the products of decoding want them.
    """

    mask: jax.Array
    layers: None = None

    def attend(self, q, k, v, layer):
        out = attend(q, k, v, self.mask)
        return out, (jnp.einsum("PSNK->PNKS", k), jnp.einsum("PSNK->PNSK", v))


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

    layers: the prompts' keys [L, P, N, K, S] and values [L, P, N, S, K], the completions'
    keys [L, P, N, G, K, C] and values [L, P, N, G, C, K]; or a list of such for each layer,
    without the L, where layers are unrolled. After the forward pass the layer states are
    the new token's (keys, values), each [L, P, N, G, K], for `append`.
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
        keys, values = _put(keys, values, new, self.step)
        q = q * q.shape[-1] ** -0.5
        S, C = prompt_keys.shape[-1], keys.shape[-1]
        seen = jnp.arange(C) <= self.step
        prompt_scores = jnp.einsum("PgNGK,PNKS->PNgGS", q, prompt_keys)
        scores = jnp.einsum("PgNGK,PNgKC->PNgGC", q, keys)
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

    def append(self, new: Any) -> "DecodeContext":
        """The context of the next step, with the new token's keys and values in it."""

        def put(layer, entries):
            prompt_keys, prompt_values, keys, values = layer
            keys, values = _put(keys, values, entries, self.step)
            return prompt_keys, prompt_values, keys, values

        if isinstance(self.layers, list):
            layers = [put(*pair) for pair in zip(self.layers, new)]
        else:
            layers = put(self.layers, new)
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
        *leading, K, _ = prompt_keys.shape
        keys = jnp.zeros((*leading, group_size, K, max_new_tokens), prompt_keys.dtype)
        return prompt_keys, prompt_values, keys, jnp.swapaxes(keys, -1, -2)

    unrolled = isinstance(prefilled, list)
    layers = [empty(*layer) for layer in prefilled] if unrolled else empty(*prefilled)
    length = jax.tree.leaves(prefilled)[0].shape[-1]
    return DecodeContext(
        layers=layers,
        prompt_mask=jnp.arange(length) < lengths[:, None],
        step=jnp.zeros((), jnp.int32),
    )
