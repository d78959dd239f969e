"""The forward pass against the float64 oracle, packed and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.data.packing import pack
from jaxpt.models.attention import attend
from jaxpt.models.config import ModelConfig, MoEConfig
from jaxpt.policy import packed_logprobs
from tests import oracle
from tests.conftest import DENSE, init, make_mesh, model_config, random_groups

CONFIGS = {
    "moe": model_config(),
    "moe_unrolled": model_config(unroll_layers=True),
    "moe_unnormalized": model_config(
        feed_forward=MoEConfig(
            num_experts=4,
            experts_per_token=3,
            intermediate_size=24,
            normalize_weights=False,
        )
    ),
    "dense_qk_norm": model_config(feed_forward=DENSE, qk_norm=True),
    "dense_tied": model_config(feed_forward=DENSE, tie_embeddings=True),
}


def packed(groups):
    return pack(groups, num_rows=8, row_length=24).batch


def run(config, mesh, batch, params=None):
    params = init(config, mesh) if params is None else params
    forward = functools.partial(packed_logprobs, config=config, mesh=mesh, logits_chunk=50)
    return params, jax.device_get(jax.jit(forward)(params, batch))


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_logprobs_match_the_oracle(name, one_device):
    config = CONFIGS[name]
    groups = random_groups(3, [2, 3, 1])
    batch = packed(groups)
    params, (outputs, _) = run(config, one_device, batch)
    logprobs, entropy = outputs.logprobs, outputs.entropy
    expected = {
        (*group.prompt, *completion.tokens.tolist()): oracle.logprobs(
            params, group.prompt, completion.tokens, config
        )
        for group in groups
        for completion in group.completions
    }
    checked = 0
    for row in range(batch.num_rows):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            inside = batch.segment_ids[row] == segment
            prompt = batch.tokens[row][inside & (batch.branch_ids[row] == 0)]
            for branch in range(1, batch.branch_ids[row][inside].max() + 1):
                places = inside & (batch.branch_ids[row] == branch)
                want = expected[(*prompt.tolist(), *batch.tokens[row][places].tolist())]
                np.testing.assert_allclose(logprobs[row][places], want, atol=2e-5)
                checked += 1
    assert checked == len(expected)
    assert (entropy[batch.completion_mask > 0] > 0).all()


@pytest.mark.parametrize(
    "axes", [{"data": 2, "expert": 2, "tensor": 2}, {"expert": 4}, {"tensor": 2}]
)
@pytest.mark.parametrize("name", ["moe", "moe_unrolled", "dense_qk_norm"])
def test_meshes_give_the_same(name, axes, one_device):
    config = CONFIGS[name]
    if "expert" in axes and name == "dense_qk_norm":
        axes = {"data": 4, "tensor": 2}
    batch = packed(random_groups(4, [3, 2]))
    _, (one, counts) = run(config, one_device, batch)
    _, (many, many_counts) = run(config, make_mesh(**axes), batch)
    mask = batch.completion_mask > 0
    np.testing.assert_allclose(one.logprobs[mask], many.logprobs[mask], atol=1e-5)
    if counts:
        np.testing.assert_array_equal(counts["expert_load"], many_counts["expert_load"])
        tokens = batch.completion_mask.astype(bool).sum()
        assert (counts["expert_load"].sum(axis=1) == 2 * tokens).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 is not a multiple of num_kv_heads=2"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"feed_forward": None}, "DenseConfig or MoEConfig"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        model_config(**change)


def test_a_mesh_that_does_not_divide_the_model_is_refused():
    config: ModelConfig = model_config(num_kv_heads=1)
    with pytest.raises(ValueError, match=r"kv_heads dimension is 1.*tensor=2"):
        init(config, make_mesh(tensor=2))


def test_attention_has_the_derivative_that_differentiation_finds():
    B, T, N, G, K = 2, 9, 2, 3, 4
    rng = np.random.default_rng(0)
    q, out_weights = rng.normal(size=(2, B, T, N, G, K)).astype(np.float32) * 2
    k, v = rng.normal(size=(2, B, T, N, K)).astype(np.float32) * 2
    mask = np.tril(rng.random((B, T, T)) < 0.7) | np.eye(T, dtype=bool)

    def plain(q, k, v):
        scores = jnp.einsum("BTNGK,BSNK->BTSNG", q, k) / K**0.5
        scores = jnp.where(mask[..., None, None], scores, jnp.finfo(jnp.float32).min)
        return jnp.einsum("BTSNG,BSNK->BTNGK", jax.nn.softmax(scores, axis=2), v)

    ours = jax.vjp(lambda *x: attend(*x, jnp.asarray(mask)), q, k, v)
    expected = jax.vjp(plain, q, k, v)
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-5, atol=1e-6)
    for gradient, other in zip(ours[1](out_weights), expected[1](out_weights)):
        np.testing.assert_allclose(gradient, other, rtol=1e-4, atol=1e-5)
