"""From losses of tokens to the loss of a batch: how much each token counts.

A weight for every token, made on the host from the lengths of the whole batch. The update
only sums weighted losses, so no micro-batch, packing or mesh can change what they mean.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

# (masks, for each completion [length] bool; group ids [n]) -> weights, each [length].
AggregationFn = Callable[[Sequence[np.ndarray], np.ndarray], list[np.ndarray]]


def token_mean(masks: Sequence[np.ndarray], groups: np.ndarray) -> list[np.ndarray]:
    """Every token of the batch counts alike (DAPO, arXiv:2503.14476)."""
    del groups
    tokens = max(sum(int(mask.sum()) for mask in masks), 1)
    return [mask / tokens for mask in masks]


def sequence_mean(masks: Sequence[np.ndarray], groups: np.ndarray) -> list[np.ndarray]:
    """Every sequence counts alike, and so do its tokens (GRPO, arXiv:2402.03300)."""
    del groups
    return [mask / (max(int(mask.sum()), 1) * len(masks)) for mask in masks]


def group_token_mean(masks: Sequence[np.ndarray], groups: np.ndarray) -> list[np.ndarray]:
    """Every group counts alike, and so do the tokens of all of its sequences."""
    ids, members = np.unique(groups, return_inverse=True)
    tokens = np.bincount(members, weights=[int(mask.sum()) for mask in masks])
    return [
        mask / (max(tokens[member], 1) * len(ids)) for mask, member in zip(masks, members)
    ]


def sequence_sum(masks: Sequence[np.ndarray], groups: np.ndarray) -> list[np.ndarray]:
    """Every token counts one over the number of sequences: losses of whole sequences are
    sums over their tokens (REINFORCE, RLOO, DPO)."""
    del groups
    return [mask / max(len(masks), 1) for mask in masks]


def constant_length(
    masks: Sequence[np.ndarray], groups: np.ndarray, *, length: int
) -> list[np.ndarray]:
    """As `sequence_sum`, over a constant number of tokens, such as the longest that a
    completion may have: long sequences are neither spared nor punished (Dr. GRPO,
    arXiv:2503.20783)."""
    return [weights / length for weights in sequence_sum(masks, groups)]


# (tokens learnt from, by domain; the domains' ratios in the mixture) -> each domain's share
# of the loss; together 1.
ShareFn = Callable[[Mapping[str, int], Mapping[str, float]], dict[str, float]]


def by_tokens(tokens: Mapping[str, int], ratios: Mapping[str, float]) -> dict[str, float]:
    """A domain counts by the tokens that are learnt from in it."""
    del ratios
    return _shares(tokens)


def by_ratio(tokens: Mapping[str, int], ratios: Mapping[str, float]) -> dict[str, float]:
    """A domain counts by its ratio in the mixture, however long its episodes are."""
    return _shares({name: ratios[name] for name in tokens})


def equal(tokens: Mapping[str, int], ratios: Mapping[str, float]) -> dict[str, float]:
    """Every domain of the batch counts alike."""
    del ratios
    return _shares(dict.fromkeys(tokens, 1.0))


def _shares(parts: Mapping[str, float]) -> dict[str, float]:
    whole = sum(parts.values())
    return {name: part / whole if whole else 0.0 for name, part in parts.items()}
