"""Tokens to their experts and back, over the `expert` and `tensor` axes of the mesh.

Dropless and exact. Every shard keeps the tokens of its `data` shard, computes them for the
experts it holds, and the results are summed over the axes. Within a shard the (token,
expert) pairs are sorted by expert and cut into blocks of one expert each, so the products
cost little more than the ideal, unlike `jax.lax.ragged_dot`, which on a CPU computes every
expert for every token.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpt import mesh as mesh_lib


def expert_ffn(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    params: dict,
    mesh: Mesh,
) -> jax.Array:
    """The weighted sum of the chosen experts' SwiGLU outputs.

    x: [N, D] tokens, experts: [N, k] ids, weights: [N, k]; params: gate_proj and up_proj
    [E, D, F], down_proj [E, F, D]. Returns [N, D].
    """
    projections = (params["gate_proj"], params["up_proj"], params["down_proj"])
    if mesh.size == 1:
        return _local_ffn(x, experts, weights, *projections, first_expert=0)

    batch, expert, tensor = mesh_lib.DATA, mesh_lib.EXPERT, mesh_lib.TENSOR

    def shard(x, experts, weights, gate_proj, up_proj, down_proj):
        first_expert = jax.lax.axis_index(expert) * gate_proj.shape[0]
        partial = _local_ffn(
            x,
            experts,
            weights,
            gate_proj,
            up_proj,
            down_proj,
            first_expert=first_expert,
        )
        return jax.lax.psum(partial, (expert, tensor))

    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(
            P(batch, None),
            P(batch, None),
            P(batch, None),
            P(expert, None, tensor),
            P(expert, None, tensor),
            P(expert, tensor, None),
        ),
        out_specs=P(batch, None),
    )(x, experts, weights, *projections)


def _block_size(num_pairs: int, num_experts: int) -> int:
    """Rows in a block: a power of two; padding is at most one block for each expert."""
    per_expert = max(num_pairs // num_experts, 1)
    return int(min(128, max(8, 2 ** ((per_expert // 2).bit_length() - 1))))


@jax.jit
def _local_ffn(
    x, experts, weights, gate_proj, up_proj, down_proj, *, first_expert
) -> jax.Array:
    """`expert_ffn` for the experts [first_expert, first_expert + E) that are here."""
    N, D = x.shape
    E = gate_proj.shape[0]
    k = experts.shape[1]
    block = _block_size(N * k, E)
    num_blocks = -(-N * k // block) + E

    # Slot of each (token, choice) pair: pairs of one expert fill its blocks in order.
    local = experts.reshape(-1) - first_expert
    local = jnp.where((local >= 0) & (local < E), local, E)
    one_hot = (local[:, None] == jnp.arange(E)).astype(jnp.int32)
    rank = jnp.cumsum(one_hot, axis=0) - one_hot
    blocks_per_expert = -(-jnp.sum(one_hot, axis=0) // block)
    last_block = jnp.cumsum(blocks_per_expert)
    first_slot = (last_block - blocks_per_expert) * block
    slot = jnp.sum(one_hot * (first_slot + rank), axis=1)
    slot = jnp.where(local < E, slot, num_blocks * block)  # not here: out of bounds

    pair_of_slot = jnp.full(num_blocks * block, N * k, jnp.int32)
    pair_of_slot = pair_of_slot.at[slot].set(
        jnp.arange(N * k, dtype=jnp.int32), mode="drop", unique_indices=True
    )
    rows = x.at[pair_of_slot // k].get(mode="fill", fill_value=0)
    rows = rows.reshape(num_blocks, block, D)

    # The expert of each block, as a selection matrix: its product with the weights is
    # exact, and so is the transpose that sums the blocks' gradients in a fixed order.
    expert_of_block = jnp.sum(jnp.arange(num_blocks)[:, None] >= last_block, axis=1)
    select = (expert_of_block[:, None] == jnp.arange(E)).astype(x.dtype)
    gate = jnp.einsum("nbd,ndf->nbf", rows, jnp.einsum("ne,edf->ndf", select, gate_proj))
    up = jnp.einsum("nbd,ndf->nbf", rows, jnp.einsum("ne,edf->ndf", select, up_proj))
    hidden = jax.nn.silu(gate) * up
    out = jnp.einsum("nbf,nfd->nbd", hidden, jnp.einsum("ne,efd->nfd", select, down_proj))
    out = out.reshape(num_blocks * block, D)
    chosen = out.at[slot].get(mode="fill", fill_value=0).reshape(N, k, D)
    return jnp.einsum("nk,nkd->nd", weights, chosen)
