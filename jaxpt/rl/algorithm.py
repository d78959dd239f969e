"""An algorithm: what is learnt from, its credit, its loss, and how much each token counts.

Every part is a function that is passed, so that an algorithm is a few lines of gin (see
configs/algorithms). What a batch needs beside its tokens follows from the parts: a
reference policy for a penalty, a critic for `advantages.generalized`, a teacher for
`advantages.distillation`.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxpt.rl import advantages as advantages_lib
from jaxpt.rl.advantages import AdvantageFn, Episodes, Ragged
from jaxpt.rl.aggregation import AggregationFn
from jaxpt.rl.kl import Penalty
from jaxpt.rl.losses import LossFn
from jaxpt.types import REWARDED, Trajectory

Groups = Sequence[Sequence[Trajectory]]


def every_episode(groups: Groups, rewards: Sequence[np.ndarray]) -> list[list[int]]:
    """All that carry a reward; an algorithm for which a group is just its episodes."""
    del rewards
    return [list(range(len(group))) for group in groups]


def informative_groups(groups: Groups, rewards: Sequence[np.ndarray]) -> list[list[int]]:
    """Groups whose rewards differ; the others carry no gradient (DAPO's dynamic sampling,
    arXiv:2503.14476, section 3.2; `RolloutConfig.max_rounds` refills)."""
    return [
        list(range(len(group))) if np.ptp([*earned, *earned[:1]] or [0.0]) > 1e-9 else []
        for group, earned in zip(groups, rewards)
    ]


def best_and_worst(groups: Groups, rewards: Sequence[np.ndarray]) -> list[list[int]]:
    """Of each group whose rewards differ a pair, the better first; the first of equals."""
    chosen = []
    for earned in rewards:
        pair = [int(np.argmax(earned)), int(np.argmin(earned))] if len(earned) else []
        chosen.append(pair if pair and earned[pair[0]] > earned[pair[1]] else [])
    return chosen


# (groups, without the episodes that carry no reward; their rewards) -> for each group, the
# numbers of the episodes to learn from, in order; none to leave the group out.
SelectFn = Callable[[Groups, Sequence[np.ndarray]], list[list[int]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How a batch of groups becomes an update of the policy.

    advantage: none for a loss that has no use for it, of pairs.
    select: which episodes are learnt from; `together` of them in a row of the batch, 2 for
      a loss of pairs.
    shape: what is added to an episode's reward for its length in tokens.
    reward_penalty: for leaving the reference policy, in the reward of each token.
    """

    loss: LossFn
    aggregation: AggregationFn
    advantage: AdvantageFn = advantages_lib.none
    select: SelectFn = every_episode
    together: int = 1
    shape: Callable[[int], float] | None = None
    reward_penalty: Penalty | None = None

    def __post_init__(self):
        if self.together < 1:
            raise ValueError(f"Algorithm.together={self.together} must be 1 or more.")
        if self.reward_penalty is not None and self.reward_penalty.weighted:
            raise ValueError(
                "Algorithm.reward_penalty: weighted=True has no effect in the reward, "
                "which is a constant. Leave it out."
            )

    def chosen(self, groups: Groups) -> list[tuple[list[Trajectory], np.ndarray]]:
        """What is learnt from: groups that are left, and the rewards of each, shaped.

        Episodes whose outcome carries no reward are in none.
        """
        rewarded = [
            [episode for episode in group if episode.outcome.kind in REWARDED]
            for group in groups
        ]
        rewards = [np.array([self._reward(e) for e in group]) for group in rewarded]
        return [
            ([group[i] for i in numbers], earned[numbers])
            for group, earned, numbers in zip(
                rewarded, rewards, self.select(rewarded, rewards), strict=True
            )
            if numbers
        ]

    def _reward(self, episode: Trajectory) -> float:
        assert episode.outcome.reward is not None
        shaped = self.shape(len(episode.tokens)) if self.shape else 0.0
        return episode.outcome.reward.total + shaped

    def credit(self, episodes: Episodes, reference: Ragged | None) -> Ragged:
        """Advantages of all tokens; reference: a policy's logprobs, for the penalty.

        Raises:
          ValueError: there is a penalty in the reward and no reference.
        """
        if self.reward_penalty is not None:
            if reference is None:
                raise ValueError(
                    "Algorithm.reward_penalty needs a reference policy: set "
                    "ReinforcementConfig.reference."
                )
            episodes = dataclasses.replace(
                episodes,
                token_rewards=[
                    earned + self._price(logprobs, theirs, mask)
                    for earned, logprobs, theirs, mask in zip(
                        episodes.token_rewards,
                        episodes.logprobs,
                        reference,
                        episodes.masks,
                    )
                ],
            )
        return self.advantage(episodes)

    def _price(self, logprobs, reference, mask) -> np.ndarray:
        assert self.reward_penalty is not None
        estimate = np.asarray(self.reward_penalty.estimator(logprobs, reference))
        return np.where(mask, -self.reward_penalty.weight * estimate, 0.0)
