"""Logprobs, the update in every layout, and the optimizers."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpt.policy import packed_logprobs
from jaxpt.rl import losses, optimizer
from jaxpt.rl.logprobs import token_logprobs
from jaxpt.rl.update import init_state, make_update
from tests.conftest import init, make_mesh, model_config, packed_batch, random_groups


def test_token_logprobs_in_chunks_and_their_gradient():
    rng = np.random.default_rng(0)
    R, T = 3, 13
    hidden, head = rng.normal(size=(R, T, 5)), rng.normal(size=(5, 7))
    targets = rng.integers(0, 7, (R, T))
    wanted = rng.random((R, T)) < 0.4
    logits = hidden @ head
    values = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(values, targets[..., None], -1)[..., 0]
    entropies = -(np.exp(values) * values).sum(-1)
    hidden, head = hidden.astype(np.float32), head.astype(np.float32)

    def total(hidden, head, chunk):
        results = token_logprobs(hidden, head, targets, wanted, chunk_size=chunk)
        return jnp.sum(results[0]) + 0.3 * jnp.sum(results[1]), results

    gradients = []
    for chunk in (1, 4, 12, 39, 100):
        gradient, (logprobs, entropy) = jax.grad(total, argnums=(0, 1), has_aux=True)(
            hidden, head, chunk
        )
        np.testing.assert_allclose(logprobs, np.where(wanted, chosen, 0), atol=1e-5)
        np.testing.assert_allclose(entropy, np.where(wanted, entropies, 0), atol=1e-5)
        gradients.append(gradient)
    assert not np.any(gradients[0][0][~wanted])
    for gradient in gradients[:-1]:
        for a, b in zip(gradient, gradients[-1]):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_chunks_without_a_wanted_token_are_not_computed():
    # A hidden state that is not a number shows where logits were made.
    hidden = np.full((2, 12, 4), np.nan, np.float32)
    hidden[:, 5:8] = 1.0
    wanted = np.zeros((2, 12), bool)
    wanted[:, 5:8] = True
    head, targets = np.ones((4, 3), np.float32), np.zeros((2, 12), np.int32)

    def total(hidden, head):
        results = token_logprobs(hidden, head, targets, wanted, chunk_size=6)
        return sum(jnp.sum(x) for x in results)

    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(hidden, head)
    assert np.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def one_update(mesh, groups, *, micro_batch, row_length=24, rows=16, loss_fn=None):
    config = model_config()
    descent = optax.sgd(1.0)  # the step is the gradient, so nothing hides in moments
    state = init_state(init(config, mesh), descent)
    batch = packed_batch(groups, num_rows=rows, row_length=row_length)
    policy = functools.partial(packed_logprobs, config=config, mesh=mesh)
    loss_fn = loss_fn or losses.PolicyLoss(
        importance=losses.truncated_importance, entropy_weight=0.01
    )
    update = make_update(policy, loss_fn, descent, micro_batch_rows=micro_batch)
    before = jax.device_get(state.params)
    state, metrics = jax.jit(update)(state, batch)
    step = jax.tree.map(lambda a, b: a - b, before, jax.device_get(state.params))
    return np.concatenate([x.ravel() for x in jax.tree.leaves(step)]), metrics


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


LAYOUTS = {
    "micro_batch_1": {"micro_batch": 1},
    "micro_batch_4": {"micro_batch": 4},
    "all_rows_at_once": {"micro_batch": 16},
    "long_rows": {"micro_batch": 4, "row_length": 40},
    "mesh_2x2x2": {"micro_batch": 4, "axes": {"data": 2, "expert": 2, "tensor": 2}},
    "mesh_data_4": {"micro_batch": 8, "axes": {"data": 4}},
}


@pytest.fixture(scope="module")
def groups_and_reference():
    groups = random_groups(11, [4, 1, 3, 4])
    reference, metrics = one_update(make_mesh(), groups, micro_batch=2)
    return groups, reference, metrics


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_update_does_not_depend_on_the_layout(name, groups_and_reference):
    groups, reference, metrics = groups_and_reference
    layout = dict(LAYOUTS[name])
    mesh = make_mesh(**layout.pop("axes", {}))
    step, new_metrics = one_update(mesh, groups, **layout)
    assert relative(step, reference) <= 1e-5
    for key in ("loss", "entropy", "gradient_norm", "tokens"):
        assert float(new_metrics[key]) == pytest.approx(float(metrics[key]), rel=1e-5)


def test_the_update_does_not_depend_on_the_order(groups_and_reference):
    groups, reference, _ = groups_and_reference
    step, _ = one_update(make_mesh(), groups[::-1], micro_batch=4)
    assert relative(step, reference) <= 1e-5


def test_the_update_notices_a_small_change(groups_and_reference):
    # The comparisons above can fail: one percent more advantage is far over their bound.
    groups, reference, _ = groups_and_reference
    changed = copy.deepcopy(groups)
    for group in changed:
        for completion in group.completions:
            completion.logprobs[:] += 0.01
    step, _ = one_update(make_mesh(), changed, micro_batch=2)
    assert relative(step, reference) > 1e-4


def test_a_batch_without_tokens_changes_nothing():
    groups = random_groups(0, [2])
    for completion in groups[0].completions:
        completion.mask[:] = 0
    step, metrics = one_update(make_mesh(), groups, micro_batch=4)
    assert not step.any() and float(metrics["tokens"]) == 0


def test_micro_batches_must_divide_the_rows():
    with pytest.raises(ValueError, match=r"micro_batch_rows=3 does not divide .* 16"):
        one_update(make_mesh(), random_groups(0, [1]), micro_batch=3)


def test_the_schedule_warms_up_and_decays():
    with pytest.raises(ValueError, match="decay_steps=5"):
        optimizer.adamw(learning_rate=1.0, warmup_steps=5, decay_steps=5)
    transform = optimizer.adamw(learning_rate=1.0, warmup_steps=2, decay_steps=10)
    state = transform.init({"w": jnp.ones(1)})
    sizes = []
    for _ in range(11):
        updates, state = transform.update({"w": jnp.ones(1)}, state, {"w": jnp.ones(1)})
        sizes.append(float(-updates["w"][0]))
    assert sizes[0] == 0.0 and max(sizes) == pytest.approx(1.0, abs=0.02)
    assert sizes[10] == pytest.approx(0.1, abs=0.02)


def test_muon_orthogonalizes_every_projection_and_no_other_parameter():
    mesh = make_mesh(data=2, expert=2, tensor=2)
    params = init(model_config(), mesh)
    muon = optimizer.muon(learning_rate=1.0, max_gradient_norm=1e9)
    state = init_state(params, muon)
    moments = jax.tree.leaves(state.opt_state)
    assert sum(x.size for x in moments if x.ndim) < 2 * sum(
        x.size for x in jax.tree.leaves(params)
    )
    normal = np.random.default_rng(0).standard_normal
    gradients = jax.tree.map(lambda x: jnp.asarray(normal(x.shape), x.dtype), params)
    updates, _ = jax.jit(muon.update)(gradients, state.opt_state, params)
    for name, update in jax.device_get(updates["layers"]).items():
        if name in ("q_proj", "k_proj", "v_proj"):
            matrices = update.reshape(*update.shape[:2], -1)
        elif name == "o_proj":
            matrices = update.reshape(update.shape[0], -1, update.shape[-1])
        elif name.endswith("_proj"):
            matrices = update
        else:  # Adam's first step has the size of the rate whatever the gradient is
            np.testing.assert_allclose(np.abs(update), np.abs(update).max(), rtol=1e-3)
            continue
        # Scaled to an RMS of about 0.2, all singular values of a matrix are alike.
        values = np.linalg.svd(matrices, compute_uv=False)
        scale = 0.2 * np.sqrt(max(matrices.shape[-2:]))
        assert np.percentile(values / scale, 10) > 0.5 and values.max() / scale < 1.4, name
