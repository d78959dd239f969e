"""Models as the learner sees them: packed rows in, what they say of each token out."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpt.models import layers, moe, transformer
from jaxpt.models.attention import PackedContext, tree_mask
from jaxpt.models.config import ModelConfig, MoEConfig
from jaxpt.rl.logprobs import token_logprobs
from jaxpt.types import Batch, Outputs

Counts = dict[str, jax.Array]


def packed_logprobs(
    params: Any,
    batch: Batch,
    *,
    config: ModelConfig,
    mesh: Mesh,
    logits_chunk: int = 4096,
) -> tuple[Outputs, Counts]:
    """Logprob and entropy of every token of a completion, and counts.

    They are 0 elsewhere: nothing is learnt from prompts, so nothing is spent on them.

    Counts: `expert_load` [L, E], the completion tokens that each expert got (MoE only).
    logits_chunk: tokens whose logits exist at the same time.
    """
    hidden, counts = _hidden(params, batch, config, mesh)
    logprobs, entropy = token_logprobs(
        _predicting(hidden, batch),
        layers.unembedding(params),
        batch.tokens,
        batch.branch_ids > 0,
        chunk_size=logits_chunk,
    )
    return Outputs(logprobs=logprobs, entropy=entropy), counts


def packed_values(
    params: Any, batch: Batch, *, config: ModelConfig, mesh: Mesh
) -> tuple[Outputs, Counts]:
    """A critic's value of what stood before each token of a completion."""
    hidden, counts = _hidden(params, batch, config, mesh)
    return _valued(_predicting(hidden, batch), params, batch), counts


def _hidden(
    params: Any, batch: Batch, config: ModelConfig, mesh: Mesh
) -> tuple[jax.Array, Counts]:
    context = PackedContext(mask=tree_mask(batch.segment_ids, batch.branch_ids))
    hidden, _, routes = transformer.forward(
        params, batch.tokens, batch.positions, context, config=config, mesh=mesh
    )
    counts = {}
    if isinstance(config.feed_forward, MoEConfig) and routes is not None:
        counts["expert_load"] = moe.expert_load(
            routes, batch.completion_mask > 0, config.feed_forward.num_experts
        )
    return hidden, counts


def _predicting(hidden: jax.Array, batch: Batch) -> jax.Array:
    """At each token the state that it was predicted from; [R, T, D]."""
    return jnp.take_along_axis(hidden, batch.parents[..., None], axis=1)


def _valued(hidden: jax.Array, params: Any, batch: Batch) -> Outputs:
    values = jnp.einsum("RTD,D->RT", hidden, params["value_head"]).astype(jnp.float32)
    return Outputs(values=jnp.where(batch.branch_ids > 0, values, 0.0))
