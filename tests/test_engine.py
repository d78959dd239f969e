"""Sampling: one policy with the trainer, groups that share a prompt, reproducible keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.data.packing import Completion, Group, pack
from jaxpt.inference.engine import generate
from jaxpt.policy import packed_logprobs
from tests import oracle
from tests.conftest import DENSE, VOCAB, init, make_mesh, model_config

EOS, PAD, G, C = 2, 0, 3, 9
PROMPTS = [[5, 9, 11, 4], [7], [8, 8, 3, 30, 21], []]
CONFIGS = {
    "moe": model_config(),
    "moe_unrolled": model_config(unroll_layers=True),
    "dense": model_config(feed_forward=DENSE, qk_norm=True, tie_embeddings=True),
}


def run(config, mesh, *, temperature=1.0, key=0, params=None, **more):
    tokens = np.full((len(PROMPTS), 5), PAD, np.int32)
    for row, prompt in zip(tokens, PROMPTS):
        row[: len(prompt)] = prompt
    params = init(config, mesh) if params is None else params
    samples = generate(
        params,
        tokens,
        np.array([len(p) for p in PROMPTS], np.int32),
        np.full(len(PROMPTS), temperature, np.float32),
        jax.random.key(key),
        config=config,
        mesh=mesh,
        group_size=G,
        max_new_tokens=C,
        eos_id=EOS,
        pad_id=PAD,
        **more,
    )
    return params, jax.device_get(samples)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_samplers_logprobs_are_the_trainers(name, temperature, one_device):
    config = CONFIGS[name]
    params, samples = run(config, one_device, temperature=temperature)
    groups = []
    for p, prompt in enumerate(PROMPTS[:3]):
        completions = []
        for g in range(G):
            length = samples.lengths[p, g]
            completions.append(
                Completion(
                    tokens=samples.tokens[p, g, :length],
                    mask=np.ones(length, np.float32),
                    logprobs=samples.logprobs[p, g, :length],
                    processed_logprobs=samples.processed_logprobs[p, g, :length],
                )
            )
        groups.append(Group(prompt=prompt, completions=completions))
    batch = pack(groups, num_rows=6, row_length=32).batch
    policy = functools.partial(packed_logprobs, config=config, mesh=one_device)
    logprobs = jax.jit(policy)(params, batch)[0].logprobs
    mask = batch.completion_mask > 0
    assert mask.sum() == samples.lengths[:3].sum() > 0
    np.testing.assert_allclose(logprobs[mask], batch.old_logprobs[mask], atol=1e-5)
    same = np.allclose(batch.old_logprobs[mask], batch.processed_logprobs[mask], atol=1e-6)
    assert same == (temperature == 1.0)


def test_greedy_follows_the_oracle_and_ends_at_the_end_token(one_device):
    config = CONFIGS["moe"]
    params, samples = run(config, one_device, temperature=0.0)
    for p, prompt in enumerate(PROMPTS[:3]):
        tokens = list(prompt)
        for _ in range(C):
            tokens.append(int(np.argmax(oracle.logits(params, tokens, config)[-1])))
            if tokens[-1] == EOS:
                break
        want = tokens[len(prompt) :]
        for g in range(G):
            assert samples.tokens[p, g, : samples.lengths[p, g]].tolist() == want
            assert samples.finished[p, g] == (want[-1] == EOS)


def test_lengths_padding_and_padding_rows(one_device):
    # An end token made likely: short completions, cut where it comes.
    config = CONFIGS["moe"]
    params = init(config, one_device)
    params["lm_head"] = params["lm_head"].at[:, EOS].mul(6.0)
    _, samples = run(config, one_device, params=params, key=3)
    assert (samples.lengths[:3] >= 1).all()
    assert len(set(samples.lengths[:3].ravel().tolist())) > 1
    for p in range(3):
        for g in range(G):
            length = samples.lengths[p, g]
            tokens = samples.tokens[p, g]
            assert (tokens[length:] == PAD).all()
            assert (samples.logprobs[p, g, length:] == 0).all()
            assert EOS not in tokens[: length - 1]
            assert samples.finished[p, g] == (tokens[length - 1] == EOS)
    assert (samples.lengths[3] == 0).all() and samples.finished[3].all()


@pytest.mark.parametrize("axes", [{"data": 2, "expert": 2, "tensor": 2}, {"data": 4}])
def test_samples_do_not_depend_on_the_mesh(axes, one_device):
    config = CONFIGS["moe"]
    _, one = run(config, one_device, key=5)
    _, many = run(config, make_mesh(**axes), key=5)
    np.testing.assert_array_equal(one.tokens, many.tokens)
    np.testing.assert_allclose(one.logprobs, many.logprobs, atol=1e-5)


def test_every_completion_and_every_key_draws_anew(one_device):
    config = CONFIGS["moe"]
    params, first = run(config, one_device, key=1)
    _, again = run(config, one_device, key=1)
    _, other = run(config, one_device, key=2)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    rows = [tuple(row) for row in first.tokens[:3].reshape(-1, C)]
    rows += [tuple(row) for row in other.tokens[:3].reshape(-1, C)]
    assert len(set(rows)) == len(rows)
    del params


def test_sampled_frequencies_are_the_models(one_device):
    # 600 completions of one token against the oracle's distribution.
    config = CONFIGS["moe"]
    params = init(config, one_device)
    samples = generate(
        params,
        np.array([[5, 9, 11]], np.int32),
        np.array([3], np.int32),
        np.ones(1, np.float32),
        jax.random.key(0),
        config=config,
        mesh=one_device,
        group_size=600,
        max_new_tokens=1,
        eos_id=EOS,
        pad_id=PAD,
    )
    logits = oracle.logits(params, [5, 9, 11], config)[-1]
    want = np.exp(logits - logits.max())
    want /= want.sum()
    counts = np.bincount(np.asarray(samples.tokens).ravel(), minlength=VOCAB)
    error = (counts - 600 * want) / np.sqrt(600 * want * (1 - want))
    assert np.abs(error).max() < 4.5
    assert np.mean(error**2) < 1.7


def test_a_sequence_beyond_the_positions_is_refused(one_device):
    config = model_config(max_positions=13)
    with pytest.raises(ValueError, match="5 tokens and 9 new ones make 14"):
        run(config, one_device)


def test_no_computation_stands_still_after_all_are_done(one_device):
    # With every prompt a padding row, the loop ends before its first step.
    config = CONFIGS["moe"]
    params = init(config, one_device)
    calls = []

    def count(newly_done, tokens, lengths):
        jax.debug.callback(lambda: calls.append(1))

    samples = generate(
        params,
        jnp.zeros((2, 4), jnp.int32),
        jnp.zeros(2, jnp.int32),
        jnp.ones(2),
        jax.random.key(0),
        config=config,
        mesh=one_device,
        group_size=2,
        max_new_tokens=4,
        eos_id=EOS,
        pad_id=PAD,
        on_finished=count,
    )
    jax.block_until_ready(samples)
    jax.effects_barrier()
    assert calls == []


def test_each_prompt_has_its_own_limit(one_device):
    config = CONFIGS["moe"]
    params, whole = run(config, one_device)
    limits = np.array([2, C, 1, C], np.int32)
    _, cut = run(config, one_device, params=params, limits=limits)
    for p, limit in enumerate(limits[:3]):
        for g in range(G):
            length = min(whole.lengths[p, g], limit)
            assert cut.lengths[p, g] == length
            np.testing.assert_array_equal(
                cut.tokens[p, g, :length], whole.tokens[p, g, :length]
            )
            assert cut.finished[p, g] == (cut.tokens[p, g, length - 1] == EOS)
    assert not cut.finished[2].all() and (whole.lengths[2] > 1).any()
