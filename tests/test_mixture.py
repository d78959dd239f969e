"""Courses: levels by pass rate, rests, quarantine; and many domains in one update."""

import dataclasses
import itertools
import json
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpt import credit, rounds
from jaxpt.data import curriculum as curriculum_lib
from jaxpt.data.curriculum import Curriculum, Quarantine
from jaxpt.data.mixture import Course, Draws, Mixture, NothingToDraw, courses, fresh_draws
from jaxpt.domains.domain import Task, task_id
from jaxpt.rl import advantages, aggregation, losses
from jaxpt.rl.algorithm import Algorithm, informative_groups
from jaxpt.rollout.episodes import RolloutConfig
from tests.episodes import GROUPS, trajectories


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A domain whose tasks are their numbers; a prompt has as many tokens as it says."""

    name: str
    levels: int = 1
    length: int = 3
    pass_component: str = "right"

    def task(self, split, seed, index, level=0):
        name = task_id(self.name, split, seed, index, level, self.levels)
        return Task(
            task_id=name, messages=({"role": "user", "content": "x"},), payload=None
        )


class Characters:
    """A tokenizer whose prompts are as long as it is told."""

    def __init__(self, length=3):
        self.length = length

    def encode_chat(self, messages):
        return [1] * self.length


def draws(*domains, **settings) -> Draws:
    return Draws(Mixture(domains=courses(domains, **settings)), fresh_draws(), seed=0)


def after(found: Draws, prompt, passed, *, failed=0, attempts=1, step=0):
    found.record(
        prompt,
        passed=passed,
        totals=[float(p) for p in passed],
        episodes=[(False, attempts)] * len(passed) + [(True, attempts)] * failed,
        step=step,
    )


def course_of(found: Draws, name):
    return found.state["domains"][name]["curriculum"]


def test_a_level_follows_the_pass_rate_up_and_down():
    settings_ = Curriculum(low=0.25, high=0.75, window=8)
    found = draws(Numbers("n", levels=3), curriculum=settings_)
    seen = []
    for passed in (True, True, True, False, None, True, False, False, False):
        for _ in range(2):
            prompt = found.next(Characters(), step=0, max_length=9)
            rewards = [passed] * 4 if passed is not None else [True, False] * 2
            after(found, prompt, rewards)
        seen.append(course_of(found, "n")["level"])
    # It stops at the last level, stays between the rates, and falls to the first.
    assert seen == [1, 2, 2, 1, 1, 2, 1, 0, 0]
    assert prompt.prompt_id == "n/train/0/17@0"


def test_what_was_drawn_at_another_level_does_not_count():
    found = draws(Numbers("n", levels=2), curriculum=Curriculum(window=4))
    early = found.next(Characters(), step=0, max_length=9)
    after(found, early, [True] * 4)
    assert course_of(found, "n")["level"] == 1
    after(found, early, [False] * 4)
    assert course_of(found, "n") | {"drawn": 0} == curriculum_lib.fresh() | {"level": 1}


def test_tasks_without_a_signal_rest_and_come_back():
    rests = Curriculum(num_tasks=3, retire_after=2, retry_after=5, window=10**6)
    found = draws(Numbers("n"), curriculum=rests)

    def visit(step):
        prompt = found.next(Characters(), step=step, max_length=9)
        # Task 1 is always solved by all: nothing to learn.
        passed = [True, True] if prompt.number == 1 else [True, False]
        after(found, prompt, passed, step=step)
        return prompt.number

    assert [visit(step) for step in range(6)] == [0, 1, 2, 0, 1, 2]
    # Its second visit was at step 4, so it rests until 9, then twice as long.
    assert [visit(step) for step in range(6, 9)] == [0, 2, 0]
    assert found.figures(8)["domain/n/resting"] == 1
    assert [visit(9), visit(9), visit(10)] == [1, 2, 0]
    assert [visit(11), visit(12)] == [1, 2]  # the fourth visit: it rests until 21
    assert [visit(step) for step in (13, 19, 20)] == [0, 2, 0]
    assert visit(21) == 1


def test_a_broken_domain_is_left_out_and_tried_again():
    guard = Quarantine(failures=0.5, window=8, steps=4)
    found = draws(Numbers("good"), Numbers("bad"), quarantine=guard)
    drawn = []
    for step in range(40):
        prompt = found.next(Characters(), step=step, max_length=9)
        drawn.append(prompt.domain)
        broken = prompt.domain == "bad" and step < 30
        after(
            found,
            prompt,
            [True, False] if not broken else [False],
            failed=0 if not broken else 7,
            step=step,
        )
    # Each visit to it fills the window: it rests 4 steps, then 8, then 16.
    visits = [step for step, name in enumerate(drawn[:30]) if name == "bad"]
    assert len(visits) >= 2
    for number, (a, b) in enumerate(itertools.pairwise(visits)):
        assert b - a >= 4 * 2**number
    assert found.figures(visits[-1] + 1)["domain/bad/quarantined"] == 1
    assert found.figures(visits[-1] + 1)["domain/good/quarantined"] == 0


def test_flakes_count_when_they_are_bounded():
    episodes = [(False, 2)] * 3 + [(False, 1)]
    lenient = curriculum_lib.examine(
        Quarantine(window=4), curriculum_lib.healthy(), episodes, step=0
    )
    strict = curriculum_lib.examine(
        Quarantine(window=4, flakes=0.5), curriculum_lib.healthy(), episodes, step=7
    )
    assert lenient["until"] == 0 and lenient["recent"] == "aaag"
    assert strict == {"recent": "", "until": 17, "times": 1}


def test_when_nothing_is_left_the_run_stops_and_says_why():
    found = draws(Numbers("only"), quarantine=Quarantine(window=2))
    after(found, found.next(Characters(), step=0, max_length=9), [], failed=2)
    with pytest.raises(NothingToDraw, match=r"step 3: in quarantine are \['only'\]"):
        found.next(Characters(), step=3, max_length=9)
    assert found.next(Characters(), step=10, max_length=9).domain == "only"


def test_prompts_that_are_too_long_are_passed_over_and_counted():
    class Growing(Characters):
        def encode_chat(self, messages):
            self.length = 12 - self.length  # 9, 3, 9, 3, ...
            return [1] * self.length

    found = draws(Numbers("n"))
    prompts = [found.next(Growing(3), step=0, max_length=5) for _ in range(3)]
    assert [prompt.number for prompt in prompts] == [1, 3, 5]
    assert found.state["too_long"] == 3
    with pytest.raises(
        ValueError, match=r"100 prompts of 'n'.*max_prompt_length=5.*with 8"
    ):
        found.next(Characters(8), step=0, max_length=5)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), stop=st.integers(1, 30))
def test_a_state_that_went_through_json_draws_the_same(seed, stop):
    mixture = Mixture(
        domains=(
            Course(
                domain=Numbers("a", levels=3),
                ratio=2.0,
                curriculum=Curriculum(window=4, num_tasks=4, retire_after=1, retry_after=3),
            ),
            Course(domain=Numbers("b"), quarantine=Quarantine(window=4, steps=2)),
            Numbers("c"),
        )
    )

    def go(found, steps, rng):
        names = []
        for step in steps:
            prompt = found.next(Characters(), step=step, max_length=9)
            names.append((prompt.prompt_id, prompt.level))
            passed = (rng(step) < 0.5).tolist()
            failed = 6 if prompt.domain == "b" and step % 3 == 0 else 0
            after(found, prompt, passed, failed=failed, step=step)
        return names

    def rng(step):
        return np.random.default_rng([seed, step]).random(4)

    undisturbed = go(Draws(mixture, fresh_draws(), seed), range(40), rng)
    first = Draws(mixture, fresh_draws(), seed)
    begun = go(first, range(stop), rng)
    resumed = Draws(mixture, json.loads(json.dumps(first.state)), seed)
    assert begun + go(resumed, range(stop, 40), rng) == undisturbed


def test_ratios_are_the_shares_of_groups():
    found = Draws(
        Mixture(
            domains=(
                Course(domain=Numbers("a"), ratio=3.0),
                Course(domain=Numbers("b"), ratio=1.0),
            )
        ),
        fresh_draws(),
        seed=1,
    )
    names = [found.next(Characters(), step=0, max_length=9).domain for _ in range(2000)]
    assert names.count("a") == pytest.approx(1500, abs=80)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Curriculum(low=0.8, high=0.2), "low=0.8 and high=0.2"),
        (
            lambda: Curriculum(retire_after=1),
            "retire_after=1 has no effect with num_tasks=0",
        ),
        (lambda: Quarantine(failures=0.0), "failures=0.0"),
        (lambda: Course(domain=Numbers("n"), ratio=0.0), "ratio=0.0"),
        (lambda: Mixture(domains=(Numbers("n"), Numbers("n"))), "different names"),
    ],
)
def test_settings_that_can_not_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


GROUP_MEAN = Algorithm(
    advantage=advantages.group_centered,
    loss=losses.PolicyLoss(),
    aggregation=aggregation.sequence_mean,
    select=informative_groups,
)
WHITENED = Algorithm(
    advantage=advantages.whitened,
    loss=losses.PolicyLoss(objective=losses.unclipped),
    aggregation=aggregation.token_mean,
)


@settings(max_examples=30)
@given(groups=GROUPS, others=GROUPS, seed=st.integers(0, 2**31))
def test_each_domain_is_credited_as_if_it_were_alone(groups, others, seed):
    """And its tokens weigh as they did, times the domain's share."""
    of_domain = {
        "a": renamed(trajectories(groups, seed), "a"),
        "b": renamed(trajectories(others, seed + 1), "b"),
    }
    mixed = [g for pair in zip(of_domain["a"], of_domain["b"]) for g in pair]
    mixed += of_domain["a"][len(of_domain["b"]) :] + of_domain["b"][len(of_domain["a"]) :]
    plan = credit.Plan(
        algorithm=GROUP_MEAN,
        share=aggregation.by_ratio,
        courses={
            "a": Course(domain=Numbers("a"), ratio=3.0),
            "b": Course(domain=Numbers("b"), ratio=1.0, algorithm=WHITENED),
        },
    )
    assert plan.algorithms == (GROUP_MEAN, WHITENED)
    together = credited(plan, mixed)
    alone = {
        "a": credited(credit.Plan(algorithm=GROUP_MEAN), of_domain["a"]),
        "b": credited(credit.Plan(algorithm=WHITENED), of_domain["b"]),
    }
    both = all(alone.values())
    for name, share in (("a", 0.75 if both else 1.0), ("b", 0.25 if both else 1.0)):
        mine = [row for row in together if row[0] == (0 if name == "a" else 1)]
        assert len(mine) == len(alone[name])
        for got, want in zip(mine, alone[name]):
            np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got[2], share * want[2], rtol=1e-5)


def renamed(groups, domain):
    return [
        [
            dataclasses.replace(t, prompt=dataclasses.replace(t.prompt, domain=domain))
            for t in group
        ]
        for group in groups
    ]


def credited(plan, groups):
    """(loss id, advantages, weights) of each completion that is learnt from."""
    chosen = credit.choose(plan, groups)
    if not chosen:
        return []
    rows = credit.pack(plan, chosen, num_rows=32, row_length=40)
    (batch,) = credit.credited(plan, [chosen], [rows], credit.Scores())
    columns = (batch.loss_ids, batch.advantages, batch.loss_weights)
    return [(ids[0], a, w) for ids, a, w in zip(*map(rows.gather, columns))]


@pytest.mark.parametrize(
    ("share", "want"),
    [
        (aggregation.by_tokens, {"a": 0.1, "b": 0.9}),
        (aggregation.by_ratio, {"a": 0.75, "b": 0.25}),
        (aggregation.equal, {"a": 0.5, "b": 0.5}),
    ],
)
def test_shares_of_domains(share, want):
    assert share({"a": 10, "b": 90}, {"a": 3.0, "b": 1.0, "c": 7.0}) == want


def test_groups_larger_than_the_runs_take_several_places():
    rollout = RolloutConfig(
        num_prompts=4, group_size=2, max_prompt_length=5, max_new_tokens=6
    )
    large = Course(domain=Numbers("large"), group_size=4, max_new_tokens=3)
    mixture = Mixture(domains=(large, Numbers("small")))
    rounds.check_courses(mixture, rollout)
    asked = []

    def sampled(params, prompts, key, config, *, limits, **_):
        asked.append((prompts, limits))
        (made,) = trajectories([[("ok", 1.0), ("ok", 0.0)]], 0)
        return [[dataclasses.replace(t, prompt=p) for t in made] for p in prompts]

    run = types.SimpleNamespace(
        progress={"step": 0},
        base=types.SimpleNamespace(tokenizer=Characters()),
        sampler=types.SimpleNamespace(
            rollout=sampled, mixture=types.SimpleNamespace(domain=lambda name: large.domain)
        ),
        state=types.SimpleNamespace(params=None),
        key=lambda purpose, step: (purpose, step),
    )
    seen = set()
    for step in range(12):
        groups = rounds.sample(
            run,
            Draws(mixture, fresh_draws(), seed=step),
            rollout,
            max_rounds=3,
            enough=lambda groups: len(asked) % 2 == 0,
            clock={},
            on_phase=lambda name: None,
        )
        sizes = [(group[0].prompt.domain, len(group)) for group in groups]
        assert sum(size for _, size in sizes) == 2 * 4 * 2  # two rounds, all places
        seen |= set(sizes)
        for prompts, limits in asked[-2:]:
            for prompt, limit in zip(prompts, limits, strict=True):
                assert limit == (3 if prompt.domain == "large" else 6)
    # The last group of a round may have to do with the one place that is left.
    assert seen == {("large", 4), ("large", 2), ("small", 2)}
    for course, message in (
        (dataclasses.replace(large, group_size=3), "group_size=3 is no multiple"),
        (dataclasses.replace(large, max_new_tokens=7), "max_new_tokens=7 is over"),
    ):
        with pytest.raises(ValueError, match=message):
            rounds.check_courses(Mixture(domains=(course,)), rollout)


def test_what_failed_has_no_reward_in_the_figures_either():
    made = trajectories(
        [[("infra_fail", None)] * 2, [("ok", 1.0), ("grader_fail", None)]], 0
    )
    sampler = types.SimpleNamespace(
        mixture=types.SimpleNamespace(domain=lambda name: Numbers("made up"))
    )
    failed = rounds.figures(sampler, made[:1])
    assert "reward" not in failed and "pass_rate" not in failed
    assert failed["outcome_infra_fail"] == 2
    both = rounds.figures(sampler, made)
    assert both["reward"] == 1.0 and both["pass_rate"] == 0.0
