"""From groups of trajectories to batches: choose, pack, credit, weigh.

    groups -> Chosen -> Packed -> (scores of other models) -> Batch

On the host, and without a model: what models say comes in as `Scores`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxpt.data import packing
from jaxpt.data.mixture import Course
from jaxpt.data.packing import Packed
from jaxpt.rl.advantages import AdvantageFn, Episodes, Ragged
from jaxpt.rl.aggregation import ShareFn, by_tokens
from jaxpt.rl.algorithm import Algorithm
from jaxpt.types import Batch, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How each domain is learnt from.

    algorithm: of the domains whose course has none of its own, or that have no course.
    """

    algorithm: Algorithm
    share: ShareFn = by_tokens
    courses: Mapping[str, Course] = dataclasses.field(default_factory=dict)

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """All that are in use, each once; a batch's loss ids are their numbers."""
        own = [course.algorithm or self.algorithm for course in self.courses.values()]
        return tuple(dict.fromkeys(own or [self.algorithm]))

    def of(self, domain: str) -> Algorithm:
        course = self.courses.get(domain)
        return (course and course.algorithm) or self.algorithm

    def ratios(self) -> dict[str, float]:
        return {name: course.ratio for name, course in self.courses.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """A group that is learnt from: its episodes, and the reward of each, shaped."""

    domain: str
    episodes: Sequence[Trajectory]
    rewards: np.ndarray


@dataclasses.dataclass
class Scores:
    """What models say of each completion's tokens, [length] each; None without the model.

    reference, teacher: logprobs; old: the policy's before the update, recomputed; values:
    the critic's before the update.
    """

    reference: Ragged | None = None
    old: Ragged | None = None
    values: Ragged | None = None
    teacher: Ragged | None = None


def choose(plan: Plan, groups: Sequence[Sequence[Trajectory]]) -> list[Chosen]:
    """The groups that are learnt from, in their order."""
    found = []
    for group in groups:
        domain = group[0].prompt.domain
        episodes, rewards = plan.of(domain).chosen(group)
        if episodes:
            found.append(Chosen(domain=domain, episodes=episodes, rewards=rewards))
    return found


def pack(plan: Plan, chosen: Sequence[Chosen], *, num_rows: int, row_length: int) -> Packed:
    """The rows of what is learnt from; see `packing.pack`."""
    algorithms = plan.algorithms
    groups = [
        packing.Group(
            prompt=group.episodes[0].prompt.tokens,
            completions=[
                packing.Completion(
                    tokens=episode.tokens,
                    mask=np.ones(len(episode.tokens), np.float32),
                    logprobs=episode.logprobs,
                    processed_logprobs=episode.processed_logprobs,
                    loss_id=algorithms.index(plan.of(group.domain)),
                )
                for episode in group.episodes
            ],
            together=plan.of(group.domain).together,
        )
        for group in chosen
    ]
    return packing.pack(groups, num_rows=num_rows, row_length=row_length)


def credited(
    plan: Plan,
    parts: Sequence[Sequence[Chosen]],
    packed: Sequence[Packed],
    scores: Scores,
    *,
    critic_advantage: AdvantageFn | None = None,
) -> list[Batch]:
    """The packed batches, one for each part, with everything that losses may ask for.

    Each domain's episodes are credited by its own algorithm, apart from the others', all
    parts together. Tokens are weighed part by part: within each domain, and the domains by
    their shares.
    """
    chosen = [group for part in parts for group in part]
    sizes = [len(group.episodes) for group in chosen]
    numbers = np.repeat(np.arange(len(chosen)), sizes)  # of each episode, its group's
    masks = [np.ones(len(e.tokens), bool) for group in chosen for e in group.episodes]
    columns: dict[str, Ragged] = {"advantages": [np.zeros(len(mask)) for mask in masks]}
    if scores.reference is not None:
        columns["reference_logprobs"] = scores.reference
    if scores.old is not None:
        columns["old_logprobs"] = scores.old
    if critic_advantage is not None and scores.values is not None:
        columns["old_values"] = scores.values
        columns["returns"] = [np.zeros(len(mask)) for mask in masks]
    for domain, which in _by_domain(chosen, numbers):
        episodes = _episodes(chosen, numbers, which, masks, scores)
        reference = scores.reference and [scores.reference[i] for i in which]
        credit = plan.of(domain).credit(episodes, reference)
        for i, advantages in zip(which, credit, strict=True):
            columns["advantages"][i] = advantages
        if "returns" in columns and critic_advantage is not None:
            values = columns["old_values"]
            for i, error in zip(which, critic_advantage(episodes), strict=True):
                columns["returns"][i] = values[i] + error
    batches, first = [], 0
    for part, rows in zip(parts, packed, strict=True):
        own = slice(first, first + len(rows.places))
        first = own.stop
        weights = _weights(plan, part, masks[own])
        fields = {name: rows.scatter(column[own]) for name, column in columns.items()}
        fields["loss_weights"] = rows.scatter(weights)
        batches.append(dataclasses.replace(rows.batch, **fields))
    return batches


def _by_domain(
    chosen: Sequence[Chosen], numbers: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Of each domain the episodes, by number."""
    names = np.array([group.domain for group in chosen])[numbers]
    for name in dict.fromkeys(group.domain for group in chosen):
        yield name, np.flatnonzero(names == name)


def _episodes(
    chosen: Sequence[Chosen],
    numbers: np.ndarray,
    which: np.ndarray,
    masks: Ragged,
    scores: Scores,
) -> Episodes:
    trajectories = [episode for group in chosen for episode in group.episodes]
    rewards = np.concatenate([group.rewards for group in chosen])

    def of(column: Ragged | None) -> Ragged | None:
        return column and [column[i] for i in which]

    return Episodes(
        rewards=rewards[which],
        groups=numbers[which],
        masks=[masks[i] for i in which],
        logprobs=[trajectories[i].logprobs for i in which],
        token_rewards=[np.zeros(len(masks[i])) for i in which],
        turns=[np.zeros(len(masks[i]), int) for i in which],
        values=of(scores.values),
        teacher_logprobs=of(scores.teacher),
    )


def _weights(plan: Plan, part: Sequence[Chosen], masks: Ragged) -> Ragged:
    """Of each token of a part."""
    numbers = np.repeat(np.arange(len(part)), [len(group.episodes) for group in part])
    domains = list(_by_domain(part, numbers))
    tokens = {name: sum(int(masks[i].sum()) for i in which) for name, which in domains}
    shares = plan.share(tokens, plan.ratios()) if len(domains) > 1 else None
    weights: Ragged = [np.zeros(0)] * len(masks)
    for name, which in domains:
        aggregate: Callable = plan.of(name).aggregation
        share = shares[name] if shares else 1.0
        for i, own in zip(which, aggregate([masks[i] for i in which], numbers[which])):
            weights[i] = share * own
    return weights
