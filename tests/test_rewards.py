"""Episodes out of the jitted program and outcomes back: each once, from every shard."""

from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.inference.engine import generate
from jaxpt.rewards import grade
from jaxpt.rewards.callback_queue import CallbackQueue, then
from jaxpt.types import OUTCOMES, Outcome, Reward
from sandbox.protocol import Output, Result
from tests.conftest import init, make_mesh, model_config

P, G, C, EOS = 4, 2, 8, 2
WEIGHTS = {"tests": 1.0}


def outcome(total):
    return Outcome(
        kind="ok",
        reason="graded",
        why="",
        reward=Reward(components={"tests": total}, total=total),
    )


def done(value) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def program(mesh, queue, *, prompts=P, collect=False):
    """One batch; the end token is likely, so that the episodes end at different steps."""
    config = model_config()
    params = init(config, mesh)
    params["lm_head"] = params["lm_head"].at[:, EOS].mul(5.0)
    tokens = np.tile(np.arange(4, 8, dtype=np.int32), (P, 1))
    tokens[:, 0] += np.arange(P)
    lengths = np.where(np.arange(P) < prompts, 4, 0).astype(np.int32)

    def run(params, tokens, lengths):
        samples = generate(
            params,
            tokens,
            lengths,
            jnp.ones(P),
            jax.random.key(1),
            config=config,
            mesh=mesh,
            group_size=G,
            max_new_tokens=C,
            eos_id=EOS,
            pad_id=0,
            on_finished=queue.on_finished,
        )
        return samples, queue.collect_in_graph(samples.lengths) if collect else None

    return jax.device_get(jax.jit(run)(params, tokens, lengths))


MESHES = [{}, {"data": 2, "expert": 2, "tensor": 2}, {"data": 4, "tensor": 2}]


@pytest.mark.parametrize("axes", MESHES)
def test_every_episode_is_submitted_once_with_its_own_tokens(axes):
    mesh = make_mesh(**axes)
    seen = {}
    with CallbackQueue(mesh) as queue:

        def submit(row, tokens):
            assert row not in seen
            seen[row] = tokens
            return done(outcome(row / 10))

        queue.open(list(range(6)), submit)
        samples, _ = program(mesh, queue, prompts=3)
        outcomes = queue.collect()
    assert sorted(outcomes) == list(range(6))
    assert outcomes[5].reward.total == 0.5
    assert len({len(tokens) for tokens in seen.values()}) > 1
    for row, tokens in seen.items():
        p, g = divmod(row, G)
        np.testing.assert_array_equal(tokens, samples.tokens[p, g, : samples.lengths[p, g]])


@pytest.mark.parametrize("axes", MESHES)
def test_rewards_come_back_into_the_graph(axes):
    mesh = make_mesh(**axes)
    with CallbackQueue(mesh) as queue:

        def submit(row, tokens):
            if row == 3:
                return done(Outcome(kind="infra_fail", reason="x", why="", reward=None))
            return done(outcome(row / 10))

        queue.open(list(range(6)), submit)
        _, (rewards, valid) = program(mesh, queue, prompts=3, collect=True)
    want = [0.0, 0.1, 0.2, 0.0, 0.4, 0.5, 0.0, 0.0]
    np.testing.assert_allclose(rewards.ravel(), want, atol=1e-6)
    expected_valid = [True, True, True, False, True, True, False, False]
    assert valid.ravel().tolist() == expected_valid


def test_execution_starts_before_sampling_ends():
    # The first episode's outcome can be there while the loop still runs: with a submit that
    # notes what had been submitted, the notes grow one by one, not all at the end.
    mesh = make_mesh()
    batches = []
    with CallbackQueue(mesh) as queue:
        original = queue._put

        def put(newly_done, *rest):
            batches.append(int(np.sum(newly_done)))
            original(newly_done, *rest)

        queue._put = put
        queue.open(list(range(8)), lambda row, tokens: done(outcome(0.0)))
        program(mesh, queue)
        queue.collect()
    assert sum(batches) == 8 and len(batches) > 1


def test_an_error_in_submitting_reaches_the_one_who_waits():
    mesh = make_mesh()
    with CallbackQueue(mesh) as queue:

        def submit(row, tokens):
            raise KeyError("the domain broke")

        queue.open(list(range(8)), submit)
        program(mesh, queue)
        with pytest.raises(RuntimeError, match="the domain broke"):
            queue.collect()


def test_a_batch_left_behind_is_an_error():
    with CallbackQueue(make_mesh()) as queue:
        queue.open([0, 1], lambda row, tokens: done(outcome(0.0)))
        with pytest.raises(RuntimeError, match="2 episodes of the last batch"):
            queue.open([0], lambda row, tokens: done(outcome(0.0)))


def test_then_passes_results_and_errors_on():
    assert then(done(2), lambda x: x + 1).result() == 3
    with pytest.raises(ZeroDivisionError):
        then(done(0), lambda x: 1 / x).result()


def result(outcome, reason="graded", components=None, stderr=""):
    verdict = {"components": components, "why": "so"} if components else None
    encoded = stderr.encode()
    return Result(
        job_id="j",
        outcome=outcome,
        reason=reason,
        verdict=verdict,
        stderr=Output(tail=encoded, total_bytes=len(encoded)),
    )


def test_outcomes_are_typed_and_only_three_carry_a_reward():
    graded = result("ok", components={"tests": 0.5, "style": 1.0})
    good = grade.outcome(graded, weights={"tests": 0.8, "style": 0.1}, finished=True)
    assert (good.kind, good.why) == ("ok", "so")
    assert good.reward.total == pytest.approx(0.5)
    cut = grade.outcome(graded, weights=WEIGHTS, finished=False)
    assert (cut.kind, cut.reward.total) == ("truncated", 0.5)
    failed = grade.outcome(
        result("policy_fail", "wall_timeout"), weights=WEIGHTS, finished=True
    )
    assert (failed.kind, failed.reward.total) == ("policy_fail", 0.0)
    for kind in ("infra_fail", "grader_fail"):
        ours = grade.outcome(result(kind, "died"), weights=WEIGHTS, finished=False)
        assert (ours.kind, ours.reward) == (kind, None)


def test_a_weight_for_a_component_that_is_not_given_is_an_error():
    with pytest.raises(ValueError, match=r"\['style'\].*\['tests'\]"):
        grade.total_reward({"tests": 1.0}, {"style": 1.0})


@pytest.mark.parametrize("kind", OUTCOMES)
def test_an_outcome_can_not_lie_about_its_reward(kind):
    carries = kind in ("ok", "truncated", "policy_fail")
    reward = None if carries else Reward(components={}, total=0.0)
    with pytest.raises(ValueError, match=kind):
        Outcome(kind=kind, reason="", why="", reward=reward)
