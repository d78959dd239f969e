"""The policy as the learner sees it: packed rows in, logprobs and entropies out."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpt.models import layers, moe, transformer
from jaxpt.models.attention import PackedContext, tree_mask
from jaxpt.models.config import ModelConfig, MoEConfig
from jaxpt.rl.logprobs import token_logprobs
from jaxpt.types import Batch


def packed_logprobs(
    params: Any,
    batch: Batch,
    *,
    config: ModelConfig,
    mesh: Mesh,
    logits_chunk: int = 4096,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Logprob and entropy of every token of a completion; two arrays [R, T].

    They are 0 elsewhere: nothing is learnt from prompts, so nothing is spent on them.

    Counts: `expert_load` [L, E], the completion tokens that each expert got (MoE only).
    logits_chunk: tokens whose logits exist at the same time.
    """
    context = PackedContext(mask=tree_mask(batch.segment_ids, batch.branch_ids))
    hidden, _, routes = transformer.forward(
        params, batch.tokens, batch.positions, context, config=config, mesh=mesh
    )
    predicting = jnp.take_along_axis(hidden, batch.parents[..., None], axis=1)
    logprobs, entropy = token_logprobs(
        predicting,
        layers.unembedding(params),
        batch.tokens,
        batch.branch_ids > 0,
        chunk_size=logits_chunk,
    )
    counts = {}
    if isinstance(config.feed_forward, MoEConfig) and routes is not None:
        counts["expert_load"] = moe.expert_load(
            routes, batch.completion_mask > 0, config.feed_forward.num_experts
        )
    return logprobs, entropy, counts
