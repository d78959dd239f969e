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

# (rewards [n] of a group's episodes) -> the numbers of those to learn from, in order; none
# to leave the group out. Episodes that carry no reward are not among them.
SelectFn = Callable[[np.ndarray], list[int]]


def every_episode(rewards: np.ndarray) -> list[int]:
    """All of them; for algorithms to which a group is just its episodes."""
    return list(range(len(rewards)))


def informative_groups(rewards: np.ndarray) -> list[int]:
    """All if their rewards differ, else none: such a group carries no gradient (DAPO's
    dynamic sampling, arXiv:2503.14476, section 3.2; with
    `ReinforcementConfig.max_rounds` it refills)."""
    return every_episode(rewards) if _differ(rewards) else []


def best_and_worst(rewards: np.ndarray) -> list[int]:
    """A pair if rewards differ, the better first; of equals the first."""
    return [int(np.argmax(rewards)), int(np.argmin(rewards))] if _differ(rewards) else []


def _differ(rewards: np.ndarray) -> bool:
    return len(rewards) > 1 and float(np.ptp(rewards)) > 1e-9


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

    def chosen(self, group: Sequence[Trajectory]) -> tuple[list[Trajectory], np.ndarray]:
        """The episodes of a group that are learnt from, and their rewards, shaped.

        Those whose outcome carries no reward are not among them.
        """
        rewarded = [episode for episode in group if episode.outcome.kind in REWARDED]
        rewards = np.array([self._reward(episode) for episode in rewarded])
        numbers = self.select(rewards)
        return [rewarded[i] for i in numbers], rewards[numbers]

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
