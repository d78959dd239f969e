"""What is learnt from, as groups to pack: worked solutions, or trajectories with credit."""

import json
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.data.packing import Completion, Group
from jaxpt.data.tokenizer import Tokenizer
from jaxpt.types import Trajectory

# (rewards [groups, size], valid [groups, size]) -> advantages [groups, size]
AdvantageFn = Callable[[jax.Array, jax.Array], jax.Array]


def from_solutions(
    examples: Sequence[Mapping[str, str]], tokenizer: Tokenizer
) -> list[Group]:
    """Each example's prompt with its solution and the end token as the one completion."""
    groups = []
    for example in examples:
        prompt = tokenizer.encode_chat(json.loads(example["messages"]))
        tokens = np.asarray(
            [*tokenizer.encode(example["solution"]), tokenizer.eos_id], np.int32
        )
        zeros = np.zeros(len(tokens), np.float32)
        completion = Completion(
            tokens=tokens,
            mask=np.ones(len(tokens), np.float32),
            logprobs=zeros,
            processed_logprobs=zeros,
            advantages=zeros,
        )
        groups.append(Group(prompt=prompt, completions=[completion]))
    return groups


def credit(groups: Sequence[Sequence[Trajectory]], advantage_fn: AdvantageFn) -> np.ndarray:
    """Advantages [groups, group_size]; 0 for episodes that carry no reward."""
    rewards = [[t.outcome.reward for t in group] for group in groups]
    totals = np.array([[r.total if r else 0.0 for r in row] for row in rewards])
    valid = np.array([[r is not None for r in row] for row in rewards])
    return np.asarray(advantage_fn(jnp.asarray(totals, jnp.float32), jnp.asarray(valid)))


def from_trajectories(
    groups: Sequence[Sequence[Trajectory]],
    advantages: np.ndarray,
    *,
    skip_uniform_groups: bool,
) -> list[Group]:
    """Groups to learn from; advantages: [groups, group_size].

    Episodes without a reward are left out. With `skip_uniform_groups` so are groups whose
    advantages are all 0: they carry no policy gradient, and the update's mean is then over
    the tokens of the groups that do (DAPO's filter, arXiv:2503.14476, without the refill).
    """
    packed = []
    for group, group_advantages in zip(groups, advantages, strict=True):
        if skip_uniform_groups and not np.any(group_advantages):
            continue
        completions = [
            Completion(
                tokens=trajectory.tokens,
                mask=np.ones(len(trajectory.tokens), np.float32),
                logprobs=trajectory.logprobs,
                processed_logprobs=trajectory.processed_logprobs,
                advantages=np.full(len(trajectory.tokens), advantage, np.float32),
            )
            for trajectory, advantage in zip(group, group_advantages, strict=True)
            if trajectory.outcome.reward is not None
        ]
        if completions:
            packed.append(Group(prompt=group[0].prompt.tokens, completions=completions))
    return packed
