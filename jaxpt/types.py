"""The records that a prompt becomes, in order: Prompt, Trajectory, Reward, Batch."""

import dataclasses
import math
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
_ROUNDING = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the policy is asked: the task as tokens, made from (split, seed, index)."""

    prompt_id: str
    domain: str
    tokens: tuple[int, ...]
    task: Any  # the domain's Task, which also holds the hidden tests
    level: int = 0  # of difficulty
    number: int = 0  # of the task in its domain's course


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
    """Named components, each in [0, 1], and their weighted total.

    Raises ValueError for a number that is not finite.
    """

    components: Mapping[str, float]
    total: float

    def __post_init__(self):
        for name, value in (*self.components.items(), ("total", self.total)):
            if not math.isfinite(value):
                raise ValueError(f"The reward's {name} is {value}; it must be finite.")


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

    Raises ValueError for logprobs that are missing or can't be any.
    """

    prompt: Prompt
    tokens: np.ndarray
    logprobs: np.ndarray
    processed_logprobs: np.ndarray
    finished: bool
    outcome: Outcome

    def __post_init__(self):
        for name in ("logprobs", "processed_logprobs"):
            values = getattr(self, name)
            if len(values) != len(self.tokens):
                raise ValueError(
                    f"{self.prompt.prompt_id}: {len(values)} {name} for {len(self.tokens)} "
                    "tokens; each token that was sampled needs its own."
                )
            # Rounding may put a certain token a little over 0; NaN fails as well.
            if not np.all(values <= _ROUNDING) or np.any(np.isinf(values)):
                worst = values[np.argmax(~(values <= _ROUNDING) | np.isinf(values))]
                raise ValueError(
                    f"{self.prompt.prompt_id}: its {name} hold {worst}, which is the "
                    "logarithm of no probability of a token that was drawn."
                )


@struct.dataclass
class Batch:
    """Packed rows of tokens to learn from. All arrays are [R, T] unless said otherwise.

    A row holds segments; a segment holds one prompt and completions sampled from it, each a
    branch (see `models.attention.tree_mask`). Padding has segment 0.

    tokens, positions, segment_ids, branch_ids: int32.
    sequence_ids: int32, the number of the token's completion in its row, from 1; 0 on
      prompts and padding. A completion is never cut.
    parents: int32, the place in the row of the token that predicts this one.
    completion_mask: float32, 1 on the tokens that are learnt from.
    loss_ids: int32, which of the update's loss functions is the token's.
    loss_weights: float32, how much the token's loss counts in the whole batch's (see
      `rl.aggregation`); 0 where the mask is.
    sampler_logprobs: the sampler's, plain; processed_logprobs: of the distribution drawn
      from; old_logprobs: of the policy that ratios are taken against.
    advantages: float32, each token's.
    reference_logprobs: of the policy that is not to be left behind, where there is one.
    old_values, returns: the critic's before the update and what it should have said, where
      there is one.
    num_rows: int32 scalar, the rows in use; those after it are padding.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    branch_ids: jax.Array
    sequence_ids: jax.Array
    parents: jax.Array
    completion_mask: jax.Array
    loss_ids: jax.Array
    loss_weights: jax.Array
    sampler_logprobs: jax.Array
    processed_logprobs: jax.Array
    old_logprobs: jax.Array
    advantages: jax.Array
    num_rows: jax.Array
    reference_logprobs: jax.Array | None = None
    old_values: jax.Array | None = None
    returns: jax.Array | None = None


@struct.dataclass
class Outputs:
    """What a model says of a batch's completions; arrays [R, T] float32, 0 elsewhere.

    logprobs: of each token; entropy: of the distribution that it was drawn from, in nats;
    values: a critic's or reward model's. None of what the model does not say.
    """

    logprobs: jax.Array | None = None
    entropy: jax.Array | None = None
    values: jax.Array | None = None
