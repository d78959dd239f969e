"""Dispatch to experts: outputs and gradients against every expert for every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.parallel.expert_dispatch import expert_ffn
from tests.conftest import make_mesh

E, D, F, K = 4, 8, 6, 2


def inputs(num_tokens, seed=0, skew=0.0):
    rng = np.random.default_rng(seed)

    # Small enough that float32 leaves room below the tolerances.
    def normal(*shape):
        return (0.4 * rng.normal(size=shape)).astype(np.float32)

    scores = rng.normal(size=(num_tokens, E)) - skew * np.arange(E)
    experts = np.argsort(-scores, axis=1)[:, :K].astype(np.int32)
    params = {
        "gate_proj": normal(E, D, F),
        "up_proj": normal(E, D, F),
        "down_proj": normal(E, F, D),
    }
    return normal(num_tokens, D), experts, rng.random((num_tokens, K)), params


def dense(x, experts, weights, params):
    """Every expert for every token, and then the chosen ones' weighted sum."""
    gate = jnp.einsum("nd,edf->enf", x, params["gate_proj"])
    up = jnp.einsum("nd,edf->enf", x, params["up_proj"])
    out = jnp.einsum("enf,efd->end", jax.nn.silu(gate) * up, params["down_proj"])
    share = jnp.sum((experts[..., None] == jnp.arange(E)) * weights[..., None], axis=1)
    return jnp.einsum("ne,end->nd", share, out)


@pytest.mark.parametrize("axes", [{}, {"expert": 2, "tensor": 2, "data": 2}])
@pytest.mark.parametrize(("num_tokens", "skew"), [(2, 0.0), (64, 0.0), (200, 50.0)])
def test_outputs_and_gradients(axes, num_tokens, skew):
    # With the skew every token goes to the same two experts: nothing may be dropped.
    mesh = make_mesh(**axes)
    x, experts, weights, params = inputs(num_tokens, skew=skew)
    weights = weights.astype(np.float32)

    def loss(function, x, weights, params):
        return jnp.sum(jnp.sin(function(x, weights, params)))

    def ours(x, weights, params):
        return expert_ffn(x, experts, weights, params, mesh)

    def reference(x, weights, params):
        return dense(x, experts, weights, params)

    np.testing.assert_allclose(
        jax.jit(ours)(x, weights, params), reference(x, weights, params), atol=2e-5
    )
    grad = jax.grad(loss, argnums=(1, 2, 3))
    got = jax.jit(lambda *a: grad(ours, *a))(x, weights, params)
    want = jax.jit(lambda *a: grad(reference, *a))(x, weights, params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4), got, want
    )
