"""Made-up episodes of all kinds, and algorithms as their gin files make them."""

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from jaxpt import configure, train
from jaxpt.learner import LearningConfig
from jaxpt.types import Outcome, Prompt, Reward, Trajectory
from tests.conftest import VOCAB

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = sorted(path.stem for path in (ROOT / "configs" / "algorithms").glob("*.gin"))
MAX_NEW_TOKENS = 8

# Outcomes of an episode: its kind, and its reward where it carries one.
_ENDS = st.sampled_from(
    [
        ("ok", 0.0),
        ("ok", 1.0),
        ("ok", 0.25),
        ("truncated", 0.0),
        ("policy_fail", 0.0),
        ("infra_fail", None),
        ("grader_fail", None),
    ]
)
# Groups of one to four, some of them with equal rewards, some with failures.
GROUPS = st.lists(st.lists(_ENDS, min_size=1, max_size=4), min_size=1, max_size=4)


def trajectories(groups, seed, vocab=VOCAB) -> list[list[Trajectory]]:
    """Episodes with these ends, of lengths 1 to MAX_NEW_TOKENS."""
    rng = np.random.default_rng(seed)
    found = []
    for number, ends in enumerate(groups):
        prompt = Prompt(
            prompt_id=f"p{number}",
            domain="made up",
            tokens=tuple(rng.integers(3, vocab, int(rng.integers(1, 5))).tolist()),
            task=None,
        )
        found.append([_trajectory(prompt, kind, r, rng, vocab) for kind, r in ends])
    return found


def _trajectory(prompt, kind, reward, rng, vocab):
    length = int(rng.integers(1, MAX_NEW_TOKENS + 1))
    logprobs = -rng.exponential(1.0, (2, length)).astype(np.float32)
    return Trajectory(
        prompt=prompt,
        tokens=rng.integers(3, vocab, length).astype(np.int32),
        logprobs=logprobs[0],
        processed_logprobs=logprobs[1],
        finished=kind != "truncated",
        outcome=Outcome(
            kind=kind,
            reason="made up",
            why="",
            reward=None if reward is None else Reward(components={}, total=reward),
        ),
    )


def learning(name: str, **changes) -> LearningConfig:
    """The algorithm's configuration for the main job; it is gin's until the next is asked
    for, since parts of it look up their values when they are called."""
    files = [
        str(ROOT / "configs" / "runs" / "quickstart.gin"),
        str(ROOT / "configs" / "algorithms" / f"{name}.gin"),
    ]
    bindings = [f"MAX_NEW_TOKENS = {MAX_NEW_TOKENS}"]
    if name == "distillation":
        bindings.append("TEACHER = 'nowhere'")
    with contextlib.chdir(ROOT):  # where includes are looked for
        configure.parse(train.train, files, bindings)
    found = configure.arguments(train.train)["reinforcement"].learning
    return dataclasses.replace(found, **changes)
