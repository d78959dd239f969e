"""The records that a prompt becomes, in order: Prompt, Trajectory, Reward, Batch."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import struct

# How an episode ended. Only the first three carry a reward; the others are retried by the
# sandbox pool and then left out of everything but the counts.
OK, TRUNCATED, POLICY_FAIL = "ok", "truncated", "policy_fail"
INFRA_FAIL, GRADER_FAIL = "infra_fail", "grader_fail"
OUTCOMES = (OK, TRUNCATED, POLICY_FAIL, INFRA_FAIL, GRADER_FAIL)
REWARDED = (OK, TRUNCATED, POLICY_FAIL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the policy is asked: the task as tokens, made from (split, seed, index)."""

    prompt_id: str
    domain: str
    tokens: tuple[int, ...]
    task: Any  # the domain's Task, which also holds the hidden tests


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
    """Named components, each in [0, 1], and their weighted total."""

    components: Mapping[str, float]
    total: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an episode ended: a class (see OUTCOMES), its reward if it carries one, and why.

    `reason` is the sandbox's code (`graded`, `wall_timeout`, ...), `why` a sentence.
    `seconds` are its spans (queue, acquire, execute, grade, deliver), `usage` what its
    program used (cpu_seconds, memory_bytes, processes, workspace_bytes), if one ran.
    """

    kind: str
    reason: str
    why: str
    reward: Reward | None
    attempts: int = 1
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    usage: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.kind not in OUTCOMES:
            raise ValueError(f"outcome {self.kind!r} is none of {OUTCOMES}.")
        if (self.reward is not None) != (self.kind in REWARDED):
            raise ValueError(
                f"outcome {self.kind} {'needs a' if self.reward is None else 'has no'} "
                f"reward: only {REWARDED} carry one."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One sampled completion: the very tokens that the policy chose, and what came of it.

    tokens, logprobs, processed_logprobs: [length]; the logprobs are the sampler's, in the
    plain distribution and in the one drawn from.
    """

    prompt: Prompt
    tokens: np.ndarray
    logprobs: np.ndarray
    processed_logprobs: np.ndarray
    finished: bool
    outcome: Outcome


@struct.dataclass
class Batch:
    """Packed rows of tokens to learn from. All arrays are [R, T] unless said otherwise.

    A row holds segments; a segment holds one prompt and completions sampled from it, each a
    branch (see `models.attention.tree_mask`). Padding has segment 0.

    tokens, positions, segment_ids, branch_ids: int32.
    parents: int32, the place in the row of the token that predicts this one.
    completion_mask: float32, 1 on the tokens that are learnt from.
    old_logprobs: the sampler's, plain; processed_logprobs: of the distribution drawn from.
    advantages: float32, each token's.
    num_rows: int32 scalar, the rows in use; those after it are padding.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    branch_ids: jax.Array
    parents: jax.Array
    completion_mask: jax.Array
    old_logprobs: jax.Array
    processed_logprobs: jax.Array
    advantages: jax.Array
    num_rows: jax.Array
