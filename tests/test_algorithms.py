"""Each algorithm's loss and gradient, from rewards on, against its paper; its parts too."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpt import credit, learner
from jaxpt.rl import advantages, aggregation, kl, losses, preference, shaping
from jaxpt.rl.advantages import Episodes
from jaxpt.rl.algorithm import Algorithm, best_and_worst, informative_groups
from jaxpt.types import Outcome, Outputs, Reward
from tests import papers
from tests.episodes import ALGORITHMS, GROUPS, MAX_NEW_TOKENS, learning, trajectories

ROW = 40
ORACLES = {
    "dapo": functools.partial(papers.dapo, limit=MAX_NEW_TOKENS),
    "dr_grpo": functools.partial(papers.dr_grpo, length=MAX_NEW_TOKENS),
}


@pytest.fixture(scope="module", params=ALGORITHMS)
def algorithm(request):
    return request.param, learning(request.param, minibatches=1)


def plan(config) -> credit.Plan:
    return credit.Plan(algorithm=config.algorithm, share=config.share)


def near(rng, logprobs, spread):
    """Other logprobs of the same tokens, some of them far enough away to be clipped."""
    return [np.minimum(x + rng.normal(0, spread, len(x)), -1e-3) for x in logprobs]


@settings(max_examples=25)
@given(groups=GROUPS, seed=st.integers(0, 2**31))
def test_loss_and_gradient_are_the_papers(algorithm, groups, seed):
    name, config = algorithm
    rng = np.random.default_rng(seed)
    groups = trajectories(groups, seed)
    chosen = credit.choose(plan(config), groups)
    oracle = ORACLES.get(name) or getattr(papers, name)
    everything = [t for group in groups for t in group]
    if not any(t.outcome.reward for t in everything):
        assert not chosen
        return
    sampled = [np.asarray(t.logprobs, np.float64) for t in everything]
    said = {
        "new": near(rng, sampled, 0.3),
        "old": near(rng, sampled, 0.1) if config.recompute_old_logprobs else sampled,
        "reference": near(rng, sampled, 0.5),
        "teacher": near(rng, sampled, 0.5),
        "value": [rng.normal(0, 0.5, len(x)) for x in sampled],
    }
    loss, gradients = oracle(_episodes(groups, said))
    if not chosen:
        assert not gradients
        return
    packed = credit.pack(plan(config), chosen, num_rows=16, row_length=ROW)

    index = {id(t): i for i, t in enumerate(everything)}
    order = [index[id(t)] for group in chosen for t in group.episodes]

    def ours(field):
        return [said[field][i].astype(np.float32) for i in order]

    scores = credit.Scores(
        reference=ours("reference") if config.reference else None,
        old=ours("old") if config.recompute_old_logprobs else None,
        values=ours("value") if config.critic else None,
        teacher=ours("teacher") if name == "distillation" else None,
    )
    (batch,) = credit.credited(
        plan(config),
        [chosen],
        [packed],
        scores,
        critic_advantage=config.critic.advantage if config.critic else None,
    )

    def total(logprobs):
        outputs = Outputs(logprobs=logprobs, entropy=jnp.zeros_like(logprobs))
        of_tokens, _ = config.algorithm.loss(outputs, batch)
        learnt = batch.completion_mask > 0
        return jnp.sum(jnp.where(learnt, of_tokens, 0) * batch.loss_weights)

    got, gradient = jax.value_and_grad(total)(packed.scatter(ours("new")))
    assert float(got) == pytest.approx(loss, rel=2e-4, abs=2e-5)
    found = packed.gather(gradient)
    assert len(found) == len(gradients)
    for ours_, theirs in zip(found, gradients):
        np.testing.assert_allclose(ours_, theirs, rtol=5e-4, atol=2e-5)


def _episodes(groups, said):
    found = []
    for number, group in enumerate(groups):
        for t in group:
            i = len(found)
            found.append(
                {
                    "group": number,
                    "reward": t.outcome.reward and t.outcome.reward.total,
                    "sampler": np.asarray(t.logprobs, np.float64),
                    "drawn": np.asarray(t.processed_logprobs, np.float64),
                    "new": np.zeros(len(t.tokens)),
                    **{field: values[i] for field, values in said.items()},
                }
            )
    return found


def test_an_oracle_of_another_algorithm_does_not_pass():
    # The comparison above can fail: GSPO's ratio is not GRPO's.
    episodes = _episodes(trajectories([[("ok", 0.0), ("ok", 1.0)]], 0), {})
    for e in episodes:
        e |= {"old": e["sampler"], "new": e["sampler"] + 0.1 * np.arange(len(e["new"]))}
    assert papers.grpo(episodes)[0] != pytest.approx(papers.gspo(episodes)[0], rel=1e-3)


def made_up(seed, *, groups=(0, 0, 1), length=5, masked=0.0, turns=1):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, len(groups))
    return Episodes(
        rewards=rng.random(len(groups)),
        groups=np.array(groups),
        masks=[rng.random(n) >= masked for n in lengths],
        logprobs=[-rng.random(n) for n in lengths],
        token_rewards=[rng.random(n) for n in lengths],
        turns=[np.sort(rng.integers(0, turns, n)) for n in lengths],
        values=[rng.random(n) for n in lengths],
        teacher_logprobs=[-rng.random(n) for n in lengths],
    )


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), discount=st.sampled_from([1.0, 0.9]))
def test_generalized_advantages_pass_over_tools(seed, discount):
    episodes = made_up(seed, masked=0.3)
    found = advantages.generalized(episodes, discount=discount, trace=0.8)
    for i, mask in enumerate(episodes.masks):
        chosen = np.flatnonzero(mask)
        assert not found[i][~mask].any()
        if not chosen.size:
            continue
        earned = episodes.token_rewards[i].copy()
        earned[chosen[-1]] += episodes.rewards[i]
        # What a tool's tokens earn belongs to the policy's token before them.
        owner = np.maximum(np.searchsorted(chosen, np.arange(len(mask)), "right") - 1, 0)
        rewards = np.bincount(owner, weights=earned, minlength=len(chosen))
        want = papers.gae(rewards, episodes.values[i][chosen], discount, 0.8)
        np.testing.assert_allclose(found[i][chosen], want, atol=1e-12)
        returns = advantages.returns(episodes, discount=discount)[i][chosen]
        baseline = np.mean(episodes.totals())
        to_go = [
            sum(discount ** (s - t) * rewards[s] for s in range(t, len(rewards)))
            for t in range(len(rewards))
        ]
        np.testing.assert_allclose(returns, np.array(to_go) - baseline, atol=1e-12)


def test_credit_by_turn_lands_on_the_turn():
    episodes = Episodes(
        rewards=np.array([1.0, 0.0, 0.5]),
        groups=np.array([7, 7, 7]),
        masks=[np.array([1, 0, 1, 1], bool), np.ones(2, bool), np.ones(3, bool)],
        logprobs=[np.zeros(4), np.zeros(2), np.zeros(3)],
        token_rewards=[np.array([0.5, 0, 0, 0]), np.zeros(2), np.zeros(3)],
        turns=[np.array([0, 0, 1, 1]), np.array([0, 1]), np.array([0, 0, 0])],
    )
    # From turn 0 on they earn 1.5, 0 and 0.5; from turn 1 on 1 and 0, the third none.
    found = advantages.by_turn(episodes)
    np.testing.assert_allclose(found[0], [1.5 - 0.25, 0, 1.0, 1.0])
    np.testing.assert_allclose(found[1], [0 - 1.0, -1.0])
    np.testing.assert_allclose(found[2], [0.5 - 0.75] * 3)


@pytest.mark.parametrize(
    ("aggregate", "want"),
    [
        (aggregation.token_mean, [[1 / 6] * 3, [1 / 6, 0], [1 / 6] * 2]),
        (aggregation.sequence_mean, [[1 / 9] * 3, [1 / 3, 0], [1 / 6] * 2]),
        (aggregation.group_token_mean, [[1 / 8] * 3, [1 / 8, 0], [1 / 4] * 2]),
        (aggregation.sequence_sum, [[1 / 3] * 3, [1 / 3, 0], [1 / 3] * 2]),
        (
            functools.partial(aggregation.constant_length, length=10),
            [[1 / 30] * 3, [1 / 30, 0], [1 / 30] * 2],
        ),
    ],
)
def test_weights_of_tokens(aggregate, want):
    masks = [np.ones(3, bool), np.array([True, False]), np.ones(2, bool)]
    for got, wanted in zip(aggregate(masks, np.array([4, 4, 9])), want, strict=True):
        np.testing.assert_allclose(got, wanted)


def _gradient(function, logits):
    """The exact gradient of an expectation under softmax(logits), by enumeration."""
    return jax.grad(lambda x: jnp.sum(function(jax.nn.log_softmax(x))))(logits)


@pytest.mark.parametrize("use", ["loss", "weighted", "reward"])
@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_each_kl_estimate_has_the_gradient_that_its_table_says(name, use):
    logits = jnp.array([0.3, -1.2, 0.8, 0.1])
    reference = jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.5, 0.0]))
    reverse = _gradient(lambda p: jnp.exp(p) * (p - reference), logits)
    forward = _gradient(lambda p: jnp.exp(reference) * (reference - p), logits)
    estimate = getattr(kl, name)
    old = jax.nn.log_softmax(logits)

    def expected(p):
        """The loss of each token, times the constant probability that it is drawn."""
        drawn = jnp.exp(old)
        if use == "loss":
            return drawn * estimate(p, reference)
        if use == "weighted":
            return drawn * jnp.exp(p - old) * estimate(p, reference)
        return drawn * jax.lax.stop_gradient(estimate(p, reference)) * p

    of_mean = _gradient(lambda p: jnp.exp(p) * estimate(p, reference), logits)
    want = {
        ("k1", "loss"): jnp.zeros(4),
        ("k1", "weighted"): reverse,
        ("k1", "reward"): reverse,
        ("k2", "loss"): reverse,
        ("k2", "weighted"): of_mean,
        ("k3", "loss"): forward,
        ("k3", "weighted"): reverse,
        ("k3", "reward"): reverse - forward,
    }.get((name, use))
    got = _gradient(expected, logits)
    if want is None:  # k2 in the reward is the gradient of neither
        for other in (reverse, forward, of_mean, jnp.zeros(4)):
            assert jnp.max(jnp.abs(got - other)) > 1e-2
        return
    np.testing.assert_allclose(got, want, atol=1e-6)
    if (name, use) == ("k2", "weighted"):
        assert jnp.max(jnp.abs(of_mean - reverse)) > 1e-2


def test_pairs_are_the_best_and_the_worst():
    rewards = [np.array([0.0, 1.0, 0.5, 1.0]), np.array([1.0, 1.0]), np.zeros(0)]
    assert [best_and_worst(r) for r in rewards] == [[1, 0], [], []]
    assert [informative_groups(r) for r in rewards] == [[0, 1, 2, 3], [], []]


def test_a_reward_model_compares_last_tokens():
    groups = trajectories([[("ok", 1.0), ("ok", 0.0)], [("ok", 0.0), ("ok", 1.0)]], 3)
    config = learner.LearningConfig(
        algorithm=Algorithm(
            loss=preference.bradley_terry,
            aggregation=aggregation.sequence_sum,
            select=best_and_worst,
            together=2,
        ),
        optimizer=None,
        rows=learner.Rows(length=ROW, micro_batch=1),
    )
    chosen = credit.choose(plan(config), groups)
    packed = credit.pack(plan(config), chosen, num_rows=4, row_length=ROW)
    (batch,) = credit.credited(plan(config), [chosen], [packed], credit.Scores())
    rng = np.random.default_rng(0)
    values = [rng.normal(size=n) for _, _, n in packed.places]

    def total(values):
        of_tokens, metrics = preference.bradley_terry(Outputs(values=values), batch)
        return jnp.sum(of_tokens * batch.loss_weights), metrics

    (got, metrics), gradient = jax.value_and_grad(total, has_aux=True)(
        packed.scatter(values)
    )
    margins = [values[0][-1] - values[1][-1], values[2][-1] - values[3][-1]]
    want = np.mean(np.log1p(np.exp(-np.array(margins))))
    assert float(got) == pytest.approx(want, rel=1e-5)
    for i, found in enumerate(packed.gather(gradient)):
        sign, margin = (-1 if i % 2 == 0 else 1), margins[i // 2]
        assert not found[:-1].any()
        assert found[-1] == pytest.approx(sign / (1 + np.exp(margin)) / 2, rel=1e-5)
    accuracy = packed.gather(metrics["pair_accuracy"])
    assert [a[0] for a in accuracy[::2]] == [margin > 0 for margin in margins]


def test_a_critic_is_clipped_to_its_old_values():
    rng = np.random.default_rng(0)
    values, old, returns = rng.normal(0, 0.4, (3, 2, 16)).astype(np.float32)
    config = learning("ppo")
    assert config.critic is not None
    batch = dataclasses.replace(
        credit.pack(
            plan(config),
            credit.choose(plan(config), trajectories([[("ok", 1.0)]], 0)),
            num_rows=2,
            row_length=16,
        ).batch,
        old_values=old,
        returns=returns,
    )
    loss, metrics = config.critic.loss_fn(Outputs(values=values), batch)
    near_old = np.clip(values, old - 0.2, old + 0.2)
    want = np.maximum((values - returns) ** 2, (near_old - returns) ** 2) / 2
    np.testing.assert_allclose(loss, want, rtol=1e-5, atol=1e-7)
    assert 0 < np.mean(metrics["value_clip_fraction"]) < 1


def test_the_dual_clip_bounds_what_a_bad_token_costs():
    ratio = jnp.array([0.5, 1.0, 2.0, 10.0, 10.0])
    credit = jnp.array([-1.0, -1.0, -1.0, -1.0, 1.0])
    value, is_clipped = losses.dual_clipped(ratio, jnp.zeros(5), credit, bound=3.0)
    np.testing.assert_allclose(value, [-0.8, -1.0, -2.0, -3.0, 1.2])
    assert is_clipped.tolist() == [True, False, False, True, True]


def test_overlong_punishment_counts_tokens():
    got = [shaping.soft_overlong(n, limit=10, buffer=4) for n in (1, 6, 7, 9, 10, 12)]
    assert got == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    with pytest.raises(ValueError, match=r"buffer=11 .* limit=10"):
        shaping.soft_overlong(3, limit=10, buffer=11)


def test_losses_of_many_domains_keep_to_their_tokens():
    groups = trajectories([[("ok", 1.0), ("ok", 0.0)]], 1)
    config = learning("grpo")
    chosen = credit.choose(plan(config), groups)
    packed = credit.pack(plan(config), chosen, num_rows=1, row_length=ROW)
    (batch,) = credit.credited(plan(config), [chosen], [packed], credit.Scores())
    ids = packed.scatter([np.zeros(packed.places[0][2]), np.ones(packed.places[1][2])])
    batch = dataclasses.replace(batch, loss_ids=ids.astype(np.int32))
    outputs = Outputs(logprobs=batch.old_logprobs - 0.1, entropy=batch.old_logprobs)
    both, _ = losses.by_loss_id(losses.supervised, losses.PolicyLoss())(outputs, batch)
    first, _ = losses.supervised(outputs, batch)
    second, _ = losses.PolicyLoss()(outputs, batch)
    found, (a, b) = packed.gather(both), (packed.gather(first), packed.gather(second))
    np.testing.assert_array_equal(found[0], a[0])
    np.testing.assert_array_equal(found[1], b[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": np.array([-1.0, np.nan])}, "p0: its logprobs hold nan"),
        ({"logprobs": np.array([-1.0, 0.5])}, "hold 0.5"),
        ({"processed_logprobs": np.array([-np.inf, -1])}, "processed_logprobs hold -inf"),
        ({"logprobs": np.zeros(0)}, "0 logprobs for 2 tokens"),
    ],
)
def test_logprobs_that_can_not_be_are_refused(change, message):
    ((episode,),) = trajectories([[("ok", 1.0)]], 0)
    whole = dataclasses.replace(
        episode,
        tokens=np.array([4, 5]),
        logprobs=np.array([-1.0, 1e-7]),
        processed_logprobs=np.array([-1.0, -2.0]),
    )
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(whole, **change)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rewards_that_can_not_be_are_refused(value):
    with pytest.raises(ValueError, match="total is"):
        Reward(components={}, total=value)
    with pytest.raises(ValueError, match="right is"):
        Reward(components={"right": value}, total=1.0)
    with pytest.raises(ValueError, match="infra_fail has no reward"):
        Outcome(kind="infra_fail", reason="", why="", reward=Reward(components={}, total=0))


def test_a_batch_without_a_group_to_learn_from_is_counted():
    groups = trajectories([[("infra_fail", None)] * 3, [("ok", 1.0)] * 2], 0)
    assert credit.choose(plan(learning("grpo")), groups) == []
