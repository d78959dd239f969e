"""The sampled distribution against a plain float64 oracle."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpt.inference.sampling import SamplingConfig, cumulative, draw, process, sample


def oracle(logits, temperature, top_k, top_p):
    """Probabilities after temperature, then top-k, then top-p."""
    scaled = np.asarray(logits, np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    if 0 < top_k < len(probabilities):
        kth = np.sort(probabilities)[-top_k]
        probabilities = np.where(probabilities >= kth, probabilities, 0.0)
        probabilities /= probabilities.sum()
    if top_p < 1.0:
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= top_p]] = 0.0
        probabilities /= probabilities.sum()
    return probabilities


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([0.11, 0.5, 0.93, 1.0]),
)
def test_process_matches_the_oracle(seed, temperature, top_k, top_p):
    logits = np.random.default_rng(seed).normal(size=24).astype(np.float32) * 3
    got = process(jnp.asarray(logits), jnp.float32(temperature), top_k=top_k, top_p=top_p)
    want = oracle(logits, temperature, top_k, top_p)
    np.testing.assert_allclose(np.exp(got), want, atol=2e-6)


def test_order_matters_and_is_temperature_first():
    # At temperature 2 the first token's share falls below top_p, so a second one is kept.
    logits = jnp.log(jnp.array([0.64, 0.26, 0.1]))
    kept = process(logits, jnp.float32(2.0), top_k=0, top_p=0.6)
    assert np.isfinite(np.asarray(kept)).tolist() == [True, True, False]


def test_zero_temperature_is_greedy_with_the_plain_logprob():
    logits = jnp.array([[0.0, 3.0, 3.0, 1.0]])
    tokens, plain, processed = sample(jnp.array([0.999]), logits, jnp.array([0.0]))
    assert tokens.tolist() == [1]  # the first of the tied
    np.testing.assert_allclose(
        plain[0], 3 - np.log(np.exp([0.0, 3, 3, 1]).sum()), rtol=1e-6
    )
    assert processed.tolist() == [0.0]


def test_draw_inverts_the_distribution_and_never_gives_the_impossible():
    probabilities = np.array([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    uniform = (np.arange(20_000) + 0.5) / 20_000
    with np.errstate(divide="ignore"):
        logprobs = jnp.asarray(np.log(probabilities), jnp.float32)
    tokens = draw(jnp.asarray(uniform, jnp.float32), jnp.tile(logprobs, (20_000, 1)))
    counts = np.bincount(np.asarray(tokens), minlength=6) / 20_000
    np.testing.assert_allclose(counts, probabilities, atol=2e-4)
    largest = jnp.float32(1 - 2**-23)
    for edge in (jnp.float32(0.0), largest):
        assert probabilities[int(draw(edge, logprobs))] > 0


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_bad_settings_are_refused_with_the_number(bad):
    with pytest.raises(ValueError, match=str(next(iter(bad.values())))):
        SamplingConfig(**bad)


def test_a_setting_without_effect_is_refused():
    with pytest.raises(ValueError, match="no effect"):
        SamplingConfig(temperature=0.0, top_k=5)


@pytest.mark.parametrize("size", [1, 31, 33, 260, 1025, 40_000])
def test_cumulative_sums_in_blocks(size):
    x = np.random.default_rng(size).random((3, size)).astype(np.float32)
    expected = np.cumsum(x, axis=-1, dtype=np.float64)
    np.testing.assert_allclose(cumulative(x), expected, rtol=1e-5)
