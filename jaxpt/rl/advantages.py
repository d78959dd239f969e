"""Credit: the episodes that carry a reward in, an advantage for each of their tokens out.

On the host, in numpy float64. Episodes that failed for reasons of the infrastructure are
not among them, so they take part in no statistic; groups may be smaller for it. An episode
that is alone in its group has nothing to be compared to and gets 0 from what compares.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

Ragged = list[np.ndarray]  # an array [length] for each episode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episodes:
    """n episodes of one algorithm, of any number of groups.

    rewards: [n] of whole episodes; groups: [n] ids of the groups.
    masks: for each [length] bool, the tokens that the policy chose (others are a tool's).
    logprobs: for each [length], the policy's that sampled.
    token_rewards: for each [length], what is earned at a token beside the episode's reward,
      which comes with its last one: a turn's reward, or the price of leaving a reference.
    turns: for each [length] int, the turn that the token is in.
    values: for each [length], the critic's before the update; None without a critic.
    teacher_logprobs: for each [length]; None without a teacher.
    """

    rewards: np.ndarray
    groups: np.ndarray
    masks: Ragged
    logprobs: Ragged
    token_rewards: Ragged
    turns: Ragged
    values: Ragged | None = None
    teacher_logprobs: Ragged | None = None

    def totals(self) -> np.ndarray:
        """[n]: an episode's reward and all that it earned on its way."""
        earned = [float(np.sum(rewards)) for rewards in self.token_rewards]
        return np.asarray(self.rewards, np.float64) + np.asarray(earned, np.float64)

    def earned(self) -> Ragged:
        """For each its rewards token by token, the episode's with the last of its own."""
        found = []
        for reward, mask, rewards in zip(self.rewards, self.masks, self.token_rewards):
            rewards = np.array(rewards, np.float64)
            if mask.any():
                rewards[np.flatnonzero(mask)[-1]] += reward
            found.append(rewards)
        return found


AdvantageFn = Callable[[Episodes], Ragged]


def none(episodes: Episodes) -> Ragged:
    """No credit: for losses that compare completions themselves."""
    return [np.zeros(len(mask)) for mask in episodes.masks]


def group_relative(episodes: Episodes, *, epsilon: float = 1e-6) -> Ragged:
    """GRPO: reward minus the group's mean, over its standard deviation (arXiv:2402.03300).

    The standard deviation is the population's (division by n). Groups whose rewards are
    all equal get zeros.
    """

    def scaled(rewards):
        centered, deviation = rewards - rewards.mean(), rewards.std()
        if deviation <= epsilon:
            return np.zeros_like(rewards)
        return centered / (deviation + epsilon)

    return _spread(_by_group(episodes, scaled), episodes.masks)


def group_centered(episodes: Episodes) -> Ragged:
    """Dr. GRPO: reward minus the group's mean (arXiv:2503.20783)."""
    return _spread(_by_group(episodes, lambda r: r - r.mean()), episodes.masks)


def leave_one_out(episodes: Episodes) -> Ragged:
    """RLOO: reward minus the mean of the group's other episodes (arXiv:2402.14740)."""

    def against_others(rewards):
        return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))

    return _spread(_by_group(episodes, against_others), episodes.masks)


def returns(episodes: Episodes, *, discount: float = 1.0) -> Ragged:
    """REINFORCE: all that is earned from the token on, minus the batch's mean return.

    The mean is over episodes, of their totals: a baseline that no token depends on but
    through its batch (Williams 1992, doi:10.1007/BF00992696). Later rewards count less by
    `discount` for each token that the policy chose in between.
    """
    baseline = float(np.mean(episodes.totals())) if len(episodes.rewards) else 0.0
    return [
        np.where(mask, _returns(earned, mask, discount) - baseline, 0.0)
        for earned, mask in zip(episodes.earned(), episodes.masks)
    ]


def whitened(
    episodes: Episodes, *, advantage: AdvantageFn = returns, epsilon: float = 1e-8
) -> Ragged:
    """Advantages with mean 0 and standard deviation 1 over all tokens of the batch.

    Of `returns` this is REINFORCE++, of `group_centered` REINFORCE++ with a group baseline
    (arXiv:2501.03262).
    """
    found = advantage(episodes)
    chosen = [a[mask] for a, mask in zip(found, episodes.masks)]
    everything = flat(chosen)
    if not everything.size or everything.std() <= epsilon:
        return [np.zeros_like(a) for a in found]
    return [
        np.where(mask, (a - everything.mean()) / (everything.std() + epsilon), 0.0)
        for a, mask in zip(found, episodes.masks)
    ]


def generalized(
    episodes: Episodes, *, discount: float = 1.0, trace: float = 0.95
) -> Ragged:
    """Generalized advantage estimation from a critic's values (arXiv:1506.02438).

    trace: lambda, how far errors of the critic are carried back; 1 is return minus value.
    Steps are the tokens that the policy chose: a tool's are passed over. After the last one
    the value is 0, for truncated episodes too: what they got is all that they will get.

    Raises:
      ValueError: there is no critic.
    """
    if episodes.values is None:
        raise ValueError(
            "advantages.generalized needs a critic's values: set a critic, or take an "
            "advantage that compares episodes of a group."
        )
    found = []
    for earned, mask, values in zip(episodes.earned(), episodes.masks, episodes.values):
        chosen = np.flatnonzero(mask)
        advantages = np.zeros(len(mask))
        following, later = 0.0, 0.0
        # What is earned between two of the policy's tokens belongs to the first of them.
        rewards = _at_chosen(earned, chosen)
        for place, reward in zip(chosen[::-1], rewards[::-1]):
            error = reward + discount * following - values[place]
            later = error + discount * trace * later
            advantages[place], following = later, values[place]
        found.append(advantages)
    return found


def by_turn(episodes: Episodes, *, discount: float = 1.0) -> Ragged:
    """Credit turn by turn: what is earned from a turn on, minus what the group's others are
    known to have earned from that turn on.

    The baseline of an episode's turn is the mean over the group's other episodes that got
    as far. Those of a turn that nobody else reached have none and get 0. What later turns
    earn counts less by `discount` for each turn.
    """
    found = []
    for turns, earned in zip(episodes.turns, episodes.earned()):
        number = int(turns.max()) + 1 if len(turns) else 0
        at_turn = np.bincount(turns, weights=earned, minlength=number)
        for turn in range(number - 2, -1, -1):
            at_turn[turn] += discount * at_turn[turn + 1]
        found.append(at_turn)
    advantages: Ragged = []
    for i, turns in enumerate(episodes.turns):
        others = [
            found[j]
            for j in np.flatnonzero(episodes.groups == episodes.groups[i])
            if j != i
        ]
        compared = np.zeros(len(found[i]))
        for turn in range(len(compared)):
            known = [other[turn] for other in others if len(other) > turn]
            if known:
                compared[turn] = found[i][turn] - np.mean(known)
        advantages.append(
            np.where(episodes.masks[i], compared[turns] if len(turns) else 0.0, 0.0)
        )
    return advantages


def distillation(episodes: Episodes) -> Ragged:
    """On-policy distillation: the teacher's logprob minus the student's, token by token.

    Its policy gradient is that of -KL(student || teacher) at each token, given the tokens
    before it (arXiv:2306.13649; without credit for what later tokens become).

    Raises:
      ValueError: there is no teacher.
    """
    if episodes.teacher_logprobs is None:
        raise ValueError(
            "advantages.distillation needs a teacher's logprobs: set a teacher."
        )
    return [
        np.where(mask, np.asarray(teacher, np.float64) - logprobs, 0.0)
        for mask, teacher, logprobs in zip(
            episodes.masks, episodes.teacher_logprobs, episodes.logprobs
        )
    ]


def uniform_groups(episodes: Episodes) -> set[int]:
    """Ids of the groups whose episodes all earned the same, or that have but one."""
    totals = episodes.totals()
    return {
        int(group)
        for group in np.unique(episodes.groups)
        if np.ptp(totals[episodes.groups == group]) <= 1e-9
    }


def _by_group(
    episodes: Episodes, compare: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """[n]: `compare` of each group's totals; 0 for who is alone in one."""
    totals = episodes.totals()
    out = np.zeros(len(totals))
    for group in np.unique(episodes.groups):
        members = episodes.groups == group
        if members.sum() > 1:
            out[members] = compare(totals[members])
    return out


def _spread(of_episodes: np.ndarray, masks: Sequence[np.ndarray]) -> Ragged:
    return [np.where(mask, value, 0.0) for value, mask in zip(of_episodes, masks)]


def _at_chosen(earned: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """What is earned from each of these places up to the next; nothing is lost."""
    if not chosen.size:
        return np.zeros(0)
    starts = chosen.copy()
    starts[0] = 0
    return np.add.reduceat(earned, starts)


def _returns(earned: np.ndarray, mask: np.ndarray, discount: float) -> np.ndarray:
    chosen = np.flatnonzero(mask)
    out = np.zeros(len(mask))
    later = 0.0
    for place, reward in zip(chosen[::-1], _at_chosen(earned, chosen)[::-1]):
        later = reward + discount * later
        out[place] = later
    return out


def flat(ragged: Sequence[np.ndarray]) -> np.ndarray:
    """All of them, one after the other."""
    return np.concatenate([*ragged, np.zeros(0)])
