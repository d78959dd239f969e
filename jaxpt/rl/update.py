"""The update: `update(state, batch) -> (state, metrics)`, pure, exact in every layout.

Gradients are sums over tokens, added up over micro-batches and divided once by the number
of completion tokens in the whole batch. So the result does not depend on how the rows were
packed, ordered, or cut into micro-batches (but for rounding).
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxpt.rl.losses import TokenLoss
from jaxpt.types import Batch

# (params, batch of some rows) -> logprobs [r, T], entropy [r, T], and a dict of counts
# that add up over rows, such as the experts' loads.
Policy = Callable[[Any, Batch], tuple[jax.Array, jax.Array, dict[str, jax.Array]]]
LossFn = Callable[[jax.Array, jax.Array, Batch], TokenLoss]


@struct.dataclass
class TrainState:
    """Everything that an update changes; step: int32 scalar, updates made."""

    params: Any
    opt_state: Any
    step: jax.Array


def state_shapes(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state as ShapeDtypeStructs with shardings; moments lie where their parameters do.

    params: nested dicts of arrays, or of their ShapeDtypeStructs with shardings.
    """

    def name(path: tuple[Any, ...]) -> tuple[Any, ...]:
        """A parameter's keys, which end the path of each of its moments as well."""
        inner = itertools.takewhile(
            lambda key: isinstance(key, jax.tree_util.DictKey), reversed(path)
        )
        return tuple(inner)

    of_params = {
        name(path): (leaf.shape, leaf.sharding)
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    (_, any_sharding), *_ = of_params.values()
    replicated = NamedSharding(any_sharding.mesh, PartitionSpec())

    def placed(path, leaf):
        shape, sharding = of_params.get(name(path), (None, None))
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=sharding if shape == leaf.shape else replicated,
        )

    def fresh(params):
        step = jnp.zeros((), jnp.int32)
        return TrainState(params=params, opt_state=optimizer.init(params), step=step)

    return jax.tree.map_with_path(placed, jax.eval_shape(fresh, params))


def init_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update."""
    shardings = jax.tree.map(lambda x: x.sharding, state_shapes(params, optimizer))
    return TrainState(
        params=params,
        opt_state=jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params),
        step=jax.device_put(jnp.zeros((), jnp.int32), shardings.step),
    )


def make_update(
    policy: Policy,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    micro_batch_rows: int,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The update with this policy, loss and optimizer; jit it with the state donated.

    Args:
      micro_batch_rows: rows in one forward and backward pass; it divides the rows of every
        batch. Passes after the first `batch.num_rows` rows are left out.

    The metrics are float32 scalars, except the policy's counts, which come as they are:
      loss, entropy, and the loss function's own: means over completion tokens.
      logprob_gap: the largest difference between the logprobs here and the sampler's.
      gradient_norm, before clipping; tokens, rows: counts.
    A batch with no completion token changes nothing and says so with tokens = 0.
    """

    def sums(params, batch):
        logprobs, entropy, counts = policy(params, batch)
        loss, metrics = loss_fn(logprobs, entropy, batch)
        mask = batch.completion_mask

        def total(x):
            return jnp.sum(jnp.where(mask > 0, x * mask, 0.0))

        gap = jnp.where(mask > 0, jnp.abs(logprobs - batch.old_logprobs), 0.0)
        metrics = {"loss": loss, "entropy": entropy, **metrics}
        metrics = jax.lax.stop_gradient({k: total(v) for k, v in metrics.items()})
        return total(loss), (metrics, counts, jax.lax.stop_gradient(jnp.max(gap)))

    sums_and_gradients = jax.value_and_grad(sums, has_aux=True)

    def update(state: TrainState, batch: Batch):
        rows = batch.tokens.shape[0]
        if rows % micro_batch_rows:
            raise ValueError(
                f"micro_batch_rows={micro_batch_rows} does not divide the batch's "
                f"{rows} rows; pack to a multiple of it."
            )

        def micro_batch(i):
            return jax.tree.map(
                lambda x: (
                    x
                    if x.ndim == 0
                    else jax.lax.dynamic_slice_in_dim(
                        x, i * micro_batch_rows, micro_batch_rows
                    )
                ),
                batch,
            )

        def accumulate(i, carry):
            gradients, metrics, counts, gap = carry
            (_, (new_metrics, new_counts, new_gap)), new_gradients = sums_and_gradients(
                state.params, micro_batch(i)
            )
            sums_so_far = gradients, metrics, counts
            new_sums = new_gradients, new_metrics, new_counts
            return (
                *jax.tree.map(jnp.add, sums_so_far, new_sums),
                jnp.maximum(gap, new_gap),
            )

        if rows == micro_batch_rows:
            # One pass over everything: nothing to add up, and no zeros to start from.
            (_, (metrics, counts, gap)), gradients = sums_and_gradients(state.params, batch)
        else:
            shapes = jax.eval_shape(lambda: sums(state.params, micro_batch(0))[1])
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            micro_batches = -(-batch.num_rows // micro_batch_rows)
            gradients, metrics, counts, gap = jax.lax.fori_loop(
                0,
                micro_batches,
                accumulate,
                (jax.tree.map(jnp.zeros_like, state.params), *zeros),
            )

        tokens = jnp.sum(batch.completion_mask)
        divisor = jnp.maximum(tokens, 1.0)
        gradients = jax.tree.map(lambda g: g / divisor.astype(g.dtype), gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        new_state = TrainState(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            step=state.step + 1,
        )
        new_state = jax.tree.map(
            lambda new, old: jnp.where(tokens > 0, new, old), new_state, state
        )
        metrics = {k: v / divisor for k, v in metrics.items()}
        return new_state, {
            **metrics,
            **counts,
            "logprob_gap": gap,
            "gradient_norm": optax.tree.norm(gradients),
            "tokens": tokens,
            "rows": batch.num_rows,
        }

    return update
