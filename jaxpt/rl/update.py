"""The update: `update(state, batch) -> (state, metrics)`, pure, exact in every layout.

Gradients are sums over tokens, each with the weight that the batch gives it (see
`rl.aggregation`), added up over micro-batches. So the result does not depend on how the
rows were packed, ordered, or cut into micro-batches (but for rounding).
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxpt.rl.losses import LossFn
from jaxpt.types import Batch, Outputs

# (params, batch of some rows) -> what the model says of it, and a dict of counts that add
# up over rows, such as the experts' loads.
Model = Callable[[Any, Batch], tuple[Outputs, dict[str, jax.Array]]]


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
    model: Model,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    micro_batch_rows: int,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The update of this model by a loss and an optimizer; jit it with the state donated.

    Args:
      micro_batch_rows: rows in one forward and backward pass; it divides the rows of every
        batch. Passes after the first `batch.num_rows` rows are left out.

    The metrics are float32 scalars, except the model's counts, which come as they are:
      loss: the whole batch's, as weighted.
      entropy, and the loss function's own: means over completion tokens.
      logprob_gap: the largest difference between the logprobs here and the sampler's.
      gradient_norm, before clipping; tokens, rows: counts.
    A batch whose tokens all weigh nothing changes nothing.
    """

    def sums(params, batch):
        outputs, counts = model(params, batch)
        losses, metrics = loss_fn(outputs, batch)
        learnt = batch.completion_mask > 0

        def total(x, weights):
            return jnp.sum(jnp.where(learnt, x * weights, 0.0))

        loss = total(losses, batch.loss_weights)
        gap = jnp.zeros(())
        if outputs.logprobs is not None:
            gap = jnp.abs(outputs.logprobs - batch.sampler_logprobs)
        if outputs.entropy is not None:
            metrics = {"entropy": outputs.entropy, **metrics}
        sums_of = {k: total(v, batch.completion_mask) for k, v in metrics.items()}
        largest = jnp.max(jnp.where(learnt, gap, 0.0))
        kept = {"loss": loss}, sums_of, counts, largest
        return loss, jax.lax.stop_gradient(kept)

    sums_and_gradients = jax.value_and_grad(sums, has_aux=True)

    def update(state: TrainState, batch: Batch):
        _check_rows(batch, micro_batch_rows)

        def micro_batch(i):
            return _rows(batch, i, micro_batch_rows)

        def accumulate(i, carry):
            *sums_so_far, gap = carry
            (_, (*new_sums, new_gap)), gradients = sums_and_gradients(
                state.params, micro_batch(i)
            )
            sums_so_far = jax.tree.map(jnp.add, sums_so_far, [gradients, *new_sums])
            return (*sums_so_far, jnp.maximum(gap, new_gap))

        if batch.tokens.shape[0] == micro_batch_rows:
            # One pass over everything: nothing to add up, and no zeros to start from.
            (_, kept), gradients = sums_and_gradients(state.params, batch)
        else:
            shapes = jax.eval_shape(lambda: sums(state.params, micro_batch(0))[1])
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            micro_batches = -(-batch.num_rows // micro_batch_rows)
            gradients, *kept = jax.lax.fori_loop(
                0,
                micro_batches,
                accumulate,
                (jax.tree.map(jnp.zeros_like, state.params), *zeros),
            )

        whole, metrics, counts, gap = kept
        tokens = jnp.sum(batch.completion_mask)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        new_state = TrainState(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            step=state.step + 1,
        )
        new_state = jax.tree.map(
            lambda new, old: jnp.where(jnp.any(batch.loss_weights > 0), new, old),
            new_state,
            state,
        )
        return new_state, {
            **whole,
            **{name: x / jnp.maximum(tokens, 1.0) for name, x in metrics.items()},
            **counts,
            "logprob_gap": gap,
            "gradient_norm": optax.tree.norm(gradients),
            "tokens": tokens,
            "rows": batch.num_rows,
        }

    return update


def make_score(model: Model, *, micro_batch_rows: int) -> Callable[[Any, Batch], Outputs]:
    """What a model says of a batch, without learning; `micro_batch_rows` at a time.

    Rows after the first `batch.num_rows` are left out, and get zeros.
    """

    def score(params: Any, batch: Batch) -> Outputs:
        def of(i):
            return model(params, _rows(batch, i, micro_batch_rows))[0]

        def put(i, outputs):
            return jax.tree.map(
                lambda all, new: jax.lax.dynamic_update_slice_in_dim(
                    all, new, i * micro_batch_rows, axis=0
                ),
                outputs,
                of(i),
            )

        _check_rows(batch, micro_batch_rows)
        empty = jax.tree.map(
            lambda x: jnp.zeros(batch.tokens.shape, x.dtype), jax.eval_shape(of, 0)
        )
        return jax.lax.fori_loop(0, -(-batch.num_rows // micro_batch_rows), put, empty)

    return score


def _check_rows(batch: Batch, micro_batch_rows: int) -> None:
    rows = batch.tokens.shape[0]
    if rows % micro_batch_rows:
        raise ValueError(
            f"micro_batch_rows={micro_batch_rows} does not divide the batch's "
            f"{rows} rows; pack to a multiple of it."
        )


def _rows(batch: Batch, i: jax.Array | int, count: int) -> Batch:
    """Rows i x count and the next count - 1; what has no rows stays."""
    return jax.tree.map(
        lambda x: x if x.ndim == 0 else jax.lax.dynamic_slice_in_dim(x, i * count, count),
        batch,
    )
