"""Sampling groups of completions: prefill once per prompt, then one jitted decode loop."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from jaxpt import mesh as mesh_lib
from jaxpt.inference import kv_cache
from jaxpt.inference.sampling import sample
from jaxpt.models import layers, transformer
from jaxpt.models.config import ModelConfig
from jaxpt.models.params import Params

# Called in the decode loop with (newly_done PG, tokens PGC, lengths PG) whenever an episode
# may have ended; see rewards.callback_queue.
OnFinished = Callable[[jax.Array, jax.Array, jax.Array], None]


@struct.dataclass
class Samples:
    """G completions of each of P prompts, of at most C tokens.

    tokens: PGC int32, the end token included, padding after it.
    logprobs, processed_logprobs: PGC, of the plain and of the sampled distribution.
    lengths: PG tokens, the end token included.
    finished: PG, False where the limit came before the end token.
    """

    tokens: jax.Array
    logprobs: jax.Array
    processed_logprobs: jax.Array
    lengths: jax.Array
    finished: jax.Array


def pad_prompts(
    prompts: Sequence[Sequence[int]], *, num_prompts: int, length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [num_prompts, length] and lengths [num_prompts], as `generate` takes them."""
    longest = max(map(len, prompts), default=0)
    if len(prompts) > num_prompts or longest > length:
        raise ValueError(
            f"{len(prompts)} prompts of at most {longest} tokens do not fit "
            f"num_prompts={num_prompts} and length={length}."
        )
    tokens = np.full((num_prompts, length), pad_id, np.int32)
    lengths = np.zeros(num_prompts, np.int32)
    for p, prompt in enumerate(prompts):
        tokens[p, : len(prompt)] = prompt
        lengths[p] = len(prompt)
    return tokens, lengths


@functools.partial(
    jax.jit,
    static_argnames=(
        "config",
        "mesh",
        "top_k",
        "top_p",
        "group_size",
        "max_new_tokens",
        "eos_id",
        "pad_id",
        "on_finished",
    ),
)
def generate(
    params: Params,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    temperatures: jax.Array,
    key: jax.Array,
    *,
    config: ModelConfig,
    mesh: Mesh,
    group_size: int,
    max_new_tokens: int,
    eos_id: int,
    pad_id: int,
    top_k: int = 0,
    top_p: float = 1.0,
    limits: jax.Array | None = None,
    on_finished: OnFinished | None = None,
) -> Samples:
    """Samples `group_size` completions of each prompt.

    Each token of each completion has a random number of its own, made from `key` (consumed)
    and its place: the samples do not depend on the mesh.

    Args:
      prompts: [P, S] right-padded; prompt_lengths: [P], at least 1. A row of length 0 is
        padding: its completions are empty and finished from the start.
      temperatures: [P], 0 for greedy; top_k, top_p: see `sampling.SamplingConfig`.
      limits: [P], the most new tokens of each prompt's completions, at most
        `max_new_tokens`, which it is by default.
      on_finished: see `OnFinished`.
    """
    P, S = prompts.shape
    G, C = group_size, max_new_tokens
    if config.max_positions < S + C:
        raise ValueError(
            f"prompts of {S} tokens and {C} new ones make {S + C} positions, over the "
            f"model's max_positions={config.max_positions}; shorten one of them."
        )
    params = transformer.split_layers(params, config)
    rows = ("batch", None)
    real = prompt_lengths > 0
    most = jnp.full(P, C, jnp.int32) if limits is None else limits
    unembedding = layers.unembedding(params)

    with jax.named_scope("prefill"):
        positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (P, S))
        hidden, prefilled, _ = transformer.forward(
            params,
            prompts,
            positions,
            kv_cache.prefill_context(prompt_lengths, S),
            config=config,
            mesh=mesh,
        )
        last = jnp.maximum(prompt_lengths - 1, 0)[:, None, None]
        last_hidden = jnp.take_along_axis(hidden, last, axis=1)
        last_hidden = jnp.broadcast_to(last_hidden, (P, G, hidden.shape[-1]))

    uniform = jax.random.uniform(key, (P, G, C))

    def choose(hidden, step):
        logits = jnp.einsum("PGD,DV->PGV", hidden, unembedding)
        return sample(
            jax.lax.dynamic_index_in_dim(uniform, step, axis=2, keepdims=False),
            logits,
            jnp.broadcast_to(temperatures[:, None], (P, G)),
            top_k=top_k,
            top_p=top_p,
        )

    def put(buffer, value, step):
        return jax.lax.dynamic_update_index_in_dim(buffer, value, step, axis=2)

    def decode_step(carry):
        context, hidden, samples, done = carry
        step = context.step
        tokens, plain, processed = choose(hidden, step)
        tokens = jnp.where(done, pad_id, tokens)
        ended = ~done & (tokens == eos_id)
        samples = samples.replace(
            tokens=put(samples.tokens, tokens, step),
            logprobs=put(samples.logprobs, jnp.where(done, 0.0, plain), step),
            processed_logprobs=put(
                samples.processed_logprobs, jnp.where(done, 0.0, processed), step
            ),
            lengths=samples.lengths + ~done,
            finished=samples.finished | ended,
        )
        newly_done = ended | (~done & (step == most[:, None] - 1))
        done = done | newly_done
        if on_finished is not None:
            on_finished(newly_done, samples.tokens, samples.lengths)
        positions = prompt_lengths[:, None] + step
        hidden, new, _ = transformer.forward(
            params,
            tokens,
            jnp.broadcast_to(positions, (P, G)),
            context,
            config=config,
            mesh=mesh,
        )
        hidden = mesh_lib.constrain(hidden, mesh, ("batch", None, None))
        return context.append(new), hidden, samples, done

    def running(carry):
        context, _, _, done = carry
        return (context.step < C) & ~jnp.all(done)

    def full(value, dtype):
        return jnp.full((P, G, C), value, dtype)

    done = jnp.broadcast_to(~real[:, None], (P, G))
    samples = Samples(
        tokens=full(pad_id, jnp.int32),
        logprobs=full(0.0, jnp.float32),
        processed_logprobs=full(0.0, jnp.float32),
        lengths=jnp.zeros((P, G), jnp.int32),
        finished=done,
    )
    context = kv_cache.decode_context(prefilled, prompt_lengths, G, C)
    samples = jax.tree.map(
        lambda x: mesh_lib.constrain(x, mesh, (*rows, None)[: x.ndim]), samples
    )
    with jax.named_scope("decode"):
        _, _, samples, _ = jax.lax.while_loop(
            running, decode_step, (context, last_hidden, samples, done)
        )
    return samples
