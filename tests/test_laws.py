"""The laws, for every algorithm: a row for each, and a column for each law.

`scripts/laws` runs this file and writes the table into docs/laws.md. The losses themselves
are compared to the papers' in test_algorithms.py. Laws 7 and 8 are the sandbox's
(tests/attacks, tests/test_isolation.py).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpt import credit, learner
from jaxpt.base import Base
from jaxpt.checkpoint import Checkpoints
from jaxpt.inference.engine import generate, pad_prompts
from jaxpt.learner import CriticConfig, Learner, Rows
from jaxpt.rl import aggregation, losses
from jaxpt.rl.algorithm import Algorithm
from jaxpt.rl.update import make_score
from tests.conftest import VOCAB, init, make_mesh, model_config
from tests.episodes import ALGORITHMS, GROUPS, MAX_NEW_TOKENS, learning, trajectories

MODEL = model_config()
# The first step is the gradient, so nothing hides in moments; the second needs them.
SGD = optax.sgd(1.0, momentum=0.9)
LIMITS = {
    "num_groups": 4,
    "group_size": 4,
    "max_prompt_length": 4,
    "max_new_tokens": MAX_NEW_TOKENS,
}
ROWS = Rows(length=24, micro_batch=4)
# The same rows in other passes and packings, on one device and on many.
LAYOUTS = {
    "long rows, one by one": (Rows(length=44, micro_batch=1, logits_chunk=13), {}),
    "mesh": (Rows(length=28, micro_batch=8), {"data": 2, "expert": 2, "tensor": 2}),
}
NEAR = 1e-5


def base_on(mesh, seed=0) -> Base:
    return Base(
        tokenizer=None, model=MODEL, mesh=mesh, params=lambda _: init(MODEL, mesh, seed)
    )


@dataclasses.dataclass
class Case:
    """An algorithm as configured, and its learner on one device and on others."""

    name: str
    config: learner.LearningConfig

    @property
    def plan(self) -> credit.Plan:
        return credit.Plan(algorithm=self.config.algorithm)

    @functools.cached_property
    def first(self) -> Learner:
        return self.on(ROWS)

    def on(self, rows, **axes) -> Learner:
        base = base_on(make_mesh(**axes))
        teacher = None
        if self.name == "distillation":
            other = base_on(base.mesh, seed=1)
            teacher = other, other.params(0)
        config = dataclasses.replace(self.config, rows=rows)
        return Learner(base, config, teacher=teacher, **LIMITS)

    def start(self, found: Learner | None = None) -> learner.LearnerState:
        """The first state, with a policy that has moved from the reference."""
        base = (found or self.first).base
        state = learner.start(base.params(0), base, self.config)
        if state.critic is not None:  # a head of zeros would hide what is wrong with it
            head = jnp.linspace(-1, 1, MODEL.hidden_size)
            state.critic.params["value_head"] = jax.device_put(
                head, state.critic.params["value_head"].sharding
            )
        if state.reference is not None:
            # Far enough for the differences of logprobs to have digits: what whitening
            # makes of a batch with no other signal has no more of them than these.
            state.reference["embed_tokens"] *= 3.0
            state.reference["lm_head"] *= 2.0
        return state


@pytest.fixture(scope="module", params=ALGORITHMS)
def case(request) -> Case:
    config = learning(request.param, optimizer=SGD, minibatches=1, rows=ROWS)
    if config.critic is not None:
        critic = dataclasses.replace(config.critic, optimizer=SGD)
        config = dataclasses.replace(config, critic=critic)
    return Case(request.param, config)


def step(found: Learner, state, groups):
    """The gradients of the first update, as one vector, and its metrics.

    They are read from the moments: the parameters' change has the parameters' rounding.
    """
    state, metrics = found.learn(state, groups)
    critic = state.critic.opt_state if state.critic is not None else None
    moments = jax.device_get((state.policy.opt_state, critic))
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(moments)]), metrics


def distance(a, b):
    """Relative; a gradient in which all but cancels is taken for as large as a small one
    (most have a norm of 5 to 10)."""
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 0.02)


@functools.cache
def scorer():
    """The first policy's logprobs of a batch; one program for all algorithms."""
    base = base_on(make_mesh())
    params = base.params(0)
    model = learner.language_model(base, ROWS)
    score = jax.jit(make_score(model, micro_batch_rows=16))
    return lambda batch: score(params, batch).logprobs


def sampled_logprobs(groups):
    """The episodes with the logprobs that the first policy gives their tokens."""
    everything = credit.Plan(
        algorithm=Algorithm(loss=losses.supervised, aggregation=aggregation.token_mean)
    )
    chosen = [
        credit.Chosen(domain="", episodes=group, rewards=np.zeros(len(group)))
        for group in groups
    ]
    packed = credit.pack(everything, chosen, num_rows=16, row_length=44)
    logprobs = iter(packed.gather(scorer()(packed.batch)))
    return [
        [
            dataclasses.replace(t, logprobs=own, processed_logprobs=own - 0.05)
            for t, own in ((t, next(logprobs)) for t in group)
        ]
        for group in groups
    ]


MIXED = [
    [("ok", 1.0), ("ok", 0.0), ("truncated", 0.0), ("infra_fail", None)],
    [("ok", 0.25)],
    [("ok", 1.0), ("ok", 1.0), ("grader_fail", None)],
    [("policy_fail", 0.0), ("ok", 1.0), ("ok", 0.25), ("ok", 1.0)],
]


def test_law_1_layout(case):
    """Micro-batches, packing, order and mesh change nothing: 1e-5, and less is noticed."""
    groups = sampled_logprobs(trajectories(MIXED, 5))
    reference, metrics = step(case.first, case.start(), groups)
    assert np.linalg.norm(reference) > 1e-3 and metrics["groups_learnt"] > 0
    for rows, axes in LAYOUTS.values():
        other = case.on(rows, **axes)
        turned = groups if axes else groups[::-1]
        found, others = step(other, case.start(other), turned)
        assert distance(found, reference) <= NEAR
        assert others["loss"] == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-6)
    # It can fail: another token in one episode that is learnt from is far over the bound.
    episode = groups[3][0]
    tokens = (episode.tokens - 2) % (VOCAB - 3) + 3
    groups[3][0] = dataclasses.replace(episode, tokens=tokens)
    changed, _ = step(case.first, case.start(), groups)
    assert distance(changed, reference) > 100 * NEAR


@settings(max_examples=8)
@given(groups=GROUPS, seed=st.integers(0, 2**31))
def test_law_1_order(case, groups, seed):
    """Whatever the episodes are, the order of groups changes nothing."""
    made = sampled_logprobs(trajectories(groups, seed))
    reference, metrics = step(case.first, case.start(), made)
    found, _ = step(case.first, case.start(), made[::-1])
    assert distance(found, reference) <= NEAR
    assert np.isfinite(reference).all()
    assert bool(metrics["groups_learnt"]) or not reference.any()


def test_law_2_one_policy(case):
    """What the sampler says of its tokens the learner says too."""
    found = case.first
    state = case.start()
    prompts = [[3, 4, 5], [7, 8], [9], [10, 11, 12, 13]]
    tokens, lengths = pad_prompts(prompts, num_prompts=4, length=4, pad_id=0)
    samples = jax.device_get(
        generate(
            state.params,
            tokens,
            lengths,
            np.ones(4, np.float32),
            jax.random.key(0),
            config=MODEL,
            mesh=make_mesh(),
            group_size=4,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_id=2,
            pad_id=0,
        )
    )
    groups = trajectories([[("ok", float(g % 2)) for g in range(4)]] * 4, 0)
    groups = [
        [
            dataclasses.replace(
                t,
                prompt=dataclasses.replace(t.prompt, tokens=tuple(prompts[p])),
                tokens=samples.tokens[p, g, :length],
                logprobs=samples.logprobs[p, g, :length],
                processed_logprobs=samples.processed_logprobs[p, g, :length],
            )
            for g, (t, length) in enumerate(zip(group, samples.lengths[p]))
        ]
        for p, group in enumerate(groups)
    ]
    _, metrics = found.learn(state, groups)
    assert 0 <= metrics["logprob_gap"] <= NEAR
    # It can fail: other weights than those that sampled.
    other = case.start()
    other.policy.params["norm"] *= 1.1
    _, metrics = found.learn(other, groups)
    assert metrics["logprob_gap"] > 1e-3


@settings(max_examples=10)
@given(groups=GROUPS, seed=st.integers(0, 2**31))
def test_law_3_tokens(case, groups, seed):
    """The tokens that were sampled are those that are learnt from, and nothing else is."""
    chosen = credit.choose(case.plan, trajectories(groups, seed))
    if not chosen:
        return
    packed = credit.pack(case.plan, chosen, num_rows=16, row_length=24)
    everything = [t for group in chosen for t in group.episodes]
    zeros = [np.zeros(len(t.tokens)) for t in everything]
    scores = credit.Scores(
        reference=zeros if case.config.reference else None,
        values=zeros if case.config.critic else None,
        teacher=zeros if case.name == "distillation" else None,
    )
    (batch,) = credit.credited(case.plan, [chosen], [packed], scores)
    for trajectory, tokens in zip(everything, packed.gather(batch.tokens), strict=True):
        np.testing.assert_array_equal(trajectory.tokens, tokens)
    inside = packed.scatter([np.ones(len(t.tokens)) for t in everything])
    np.testing.assert_array_equal(batch.completion_mask, inside)
    assert ((batch.loss_weights > 0) == (inside > 0)).all()
    np.testing.assert_array_equal(batch.advantages * (1 - inside), 0)


@settings(max_examples=8)
@given(groups=GROUPS, seed=st.integers(0, 2**31))
def test_law_4_outcomes(case, groups, seed):
    """An episode that the infrastructure failed is as one that never was: bit for bit."""
    made = sampled_logprobs(trajectories(groups, seed))
    failed = ("infra_fail", "grader_fail")
    without = [[t for t in group if t.outcome.kind not in failed] for group in made]
    reference, _ = step(case.first, case.start(), [g for g in without if g])
    found, _ = step(case.first, case.start(), made)
    np.testing.assert_array_equal(found, reference)


def test_law_5_resume(case, tmp_path):
    """From a checkpoint the next steps are the same, bit for bit."""
    batches = [sampled_logprobs(trajectories(MIXED, seed)) for seed in (1, 2)]
    state, _ = case.first.learn(case.start(), batches[0])
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(1, state, {"step": 1})
    undisturbed, _ = case.first.learn(state, batches[1])
    restored = checkpoints.restore(
        lambda progress: learner.shapes(case.first.base, case.config)
    )
    checkpoints.close()
    assert restored is not None
    resumed, _ = case.first.learn(restored[0], batches[1])
    for a, b in zip(jax.tree.leaves(undisturbed), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_law_6_nothing_silent(case):
    """What is missing, and what would have no effect, is an error that names both."""

    def refused(message, *, limits=None, teacher=None, **changes):
        config = dataclasses.replace(case.config, **changes)
        base = case.first.base
        with pytest.raises(ValueError, match=message):
            Learner(base, config, teacher=teacher, **(LIMITS | (limits or {})))

    other = base_on(make_mesh(), seed=1)
    teacher = (other, other.params(0))
    if case.name == "distillation":
        refused("distillation needs a teacher")
    else:
        refused("The teacher has no effect", teacher=teacher)
    if case.config.critic is not None:
        refused("needs a critic", critic=None)
    else:
        refused(
            "The critic has no effect",
            critic=CriticConfig(optimizer=SGD),
            teacher=teacher if case.name == "distillation" else None,
        )
    own = {"teacher": teacher} if case.name == "distillation" else {}
    if case.config.reference:
        refused("needs a reference policy", reference=False)
    else:
        refused("The reference policy has no effect", reference=True, **own)
    refused("minibatches=5 can't be cut from 4 groups", minibatches=5, **own)
    if case.config.algorithm.together == 1 and case.name not in (
        "distillation",
        "ppo",
        "reinforce",
        "reinforce_plus_plus",
    ):
        refused("group_size=1", limits={"group_size": 1})
    unused = dataclasses.replace(case.config.algorithm, loss=losses.supervised)
    if case.config.algorithm.together == 1:
        refused("has no effect: the loss supervised", algorithm=unused, **own)
    if case.name in ("tis", "icepop"):
        with pytest.raises(ValueError, match="correction for importance has no effect"):
            Learner(
                case.first.base,
                dataclasses.replace(case.config, recompute_old_logprobs=False),
                plain_sampling=True,
                **LIMITS,
            )
