"""What the papers say, in plain numpy float64: from rewards to a loss and its gradient.

Nothing here comes from the library. An episode is a dictionary: `reward` (None where the
infrastructure failed), `group`, and arrays over its tokens: `new`, `old`, `drawn`,
`reference`, `teacher` (logprobs), `value` (a critic's) and `entropy`. An oracle takes all
episodes of a batch and returns the loss that is minimised, and of each episode that is
learnt from, in order, the gradient of the loss by its `new` logprobs.
"""

import numpy as np


def _learnt(episodes):
    return [e for e in episodes if e["reward"] is not None]


def _groups(episodes):
    found = {}
    for episode in episodes:
        found.setdefault(episode["group"], []).append(episode)
    return list(found.values())


def _mixed_groups(episodes):
    """Those whose rewards are not all the same, as DAPO keeps them."""
    return [g for g in _groups(_learnt(episodes)) if len({e["reward"] for e in g}) > 1]


def _together(parts):
    """(loss, gradients) of parts of one loss."""
    loss = sum(part for part, _ in parts)
    return loss, [gradient for _, gradients in parts for gradient in gradients]


def _grpo_advantages(group):
    rewards = np.array([e["reward"] for e in group], np.float64)
    deviation = np.sqrt(np.mean((rewards - rewards.mean()) ** 2))
    if len(group) < 2 or deviation <= 1e-6:
        return np.zeros(len(group))
    return (rewards - rewards.mean()) / (deviation + 1e-6)


def _ppo_token(new, old, advantage, low, high):
    """-min(r A, clip(r) A) of one token and its derivative by `new`."""
    ratio = np.exp(new - old)
    free, bounded = ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage
    if bounded < free:
        return -bounded, 0.0
    return -free, -free


def _clipped(episode, advantages, weight, low, high):
    """One episode's part of the loss, each of its tokens weighed alike."""
    terms = [
        _ppo_token(n, o, a, low, high)
        for n, o, a in zip(
            episode["new"], episode["old"], np.broadcast_to(advantages, len(episode["new"]))
        )
    ]
    loss = weight * sum(term for term, _ in terms)
    return loss, weight * np.array([slope for _, slope in terms])


def reinforce(episodes):
    """Williams: maximise the mean over episodes of sums of (R - mean R) pi / pi_old."""
    learnt = _learnt(episodes)
    baseline = np.mean([e["reward"] for e in learnt])
    parts = []
    for e in learnt:
        terms = -np.exp(e["new"] - e["old"]) * (e["reward"] - baseline) / len(learnt)
        parts.append((terms.sum(), [terms]))
    return _together(parts)


def rloo(episodes):
    learnt = _learnt(episodes)
    parts = []
    for e in learnt:
        others = [o["reward"] for o in learnt if o["group"] == e["group"] and o is not e]
        advantage = e["reward"] - np.mean(others) if others else 0.0
        terms = -np.exp(e["new"] - e["old"]) * advantage / len(learnt)
        parts.append((terms.sum(), [terms]))
    return _together(parts)


def reinforce_plus_plus(episodes, beta=0.01):
    """Returns to go of reward and -beta log(pi_old / pi_ref), whitened over all tokens."""
    learnt = _learnt(episodes)
    returns = []
    for e in learnt:
        rewards = -beta * (e["sampler"] - e["reference"])
        rewards[-1] += e["reward"]
        returns.append(np.array([rewards[t:].sum() for t in range(len(rewards))]))
    # The batch's mean return cancels in the whitening.
    flat = np.concatenate(returns)
    parts = []
    for e, r in zip(learnt, returns):
        advantages = (r - flat.mean()) / (flat.std() + 1e-8)
        loss, gradient = _clipped(e, advantages, 1 / len(flat), 0.2, 0.2)
        parts.append((loss, [gradient]))
    return _together(parts)


def gae(rewards, values, discount, trace):
    """The definition: sums of discounted temporal differences, quadratic in the length."""
    following = [*values[1:], 0.0]
    errors = [r + discount * f - v for r, f, v in zip(rewards, following, values)]
    return np.array(
        [
            sum((discount * trace) ** (s - t) * errors[s] for s in range(t, len(errors)))
            for t in range(len(errors))
        ]
    )


def ppo(episodes):
    learnt = _learnt(episodes)
    found = []
    for e in learnt:
        rewards = np.zeros(len(e["new"]))
        rewards[-1] = e["reward"]
        found.append(gae(rewards, e["value"], 1.0, 0.95))
    flat = np.concatenate(found)
    parts = []
    for e, a in zip(learnt, found):
        advantages = (a - flat.mean()) / (flat.std() + 1e-8)
        loss, gradient = _clipped(e, advantages, 1 / len(flat), 0.2, 0.2)
        parts.append((loss, [gradient]))
    return _together(parts)


def grpo(episodes):
    groups = _mixed_groups(episodes)
    number = sum(map(len, groups))
    parts = []
    for group in groups:
        for e, advantage in zip(group, _grpo_advantages(group)):
            weight = 1 / (len(e["new"]) * number)
            loss, gradient = _clipped(e, advantage, weight, 0.2, 0.2)
            parts.append((loss, [gradient]))
    return _together(parts)


def grpo_reference(episodes, beta=0.04):
    """With beta (pi_ref / pi - log(pi_ref / pi) - 1), over all groups."""
    groups = _groups(_learnt(episodes))
    number = sum(map(len, groups))
    parts = []
    for group in groups:
        for e, advantage in zip(group, _grpo_advantages(group)):
            weight = 1 / (len(e["new"]) * number)
            loss, gradient = _clipped(e, advantage, weight, 0.2, 0.2)
            ratio = np.exp(e["reference"] - e["new"])
            loss += weight * beta * np.sum(ratio - np.log(ratio) - 1)
            parts.append((loss, [gradient + weight * beta * (1 - ratio)]))
    return _together(parts)


def dr_grpo(episodes, length):
    groups = _mixed_groups(episodes)
    number = sum(map(len, groups))
    parts = []
    for group in groups:
        mean = np.mean([e["reward"] for e in group])
        for e in group:
            loss, gradient = _clipped(
                e, e["reward"] - mean, 1 / (length * number), 0.2, 0.2
            )
            parts.append((loss, [gradient]))
    return _together(parts)


def dapo(episodes, limit, buffer=4):
    """Overlong punishment in tokens, groups that differ, clip-higher, all tokens alike."""
    shaped = []
    for e in episodes:
        if e["reward"] is None:
            continue
        length, start = len(e["new"]), limit - buffer
        punishment = 0.0 if length <= start else max((start - length) / buffer, -1.0)
        shaped.append(e | {"reward": e["reward"] + punishment})
    groups = [g for g in _groups(shaped) if np.ptp([e["reward"] for e in g]) > 1e-9]
    tokens = sum(len(e["new"]) for group in groups for e in group)
    parts = []
    for group in groups:
        for e, advantage in zip(group, _grpo_advantages(group)):
            loss, gradient = _clipped(e, advantage, 1 / tokens, 0.2, 0.28)
            parts.append((loss, [gradient]))
    return _together(parts)


def gspo(episodes, low=3e-4, high=4e-4):
    """-min(s A, clip(s) A) of each sequence, s = (pi(y) / pi_old(y))^(1 / |y|)."""
    groups = _mixed_groups(episodes)
    number = sum(map(len, groups))
    parts = []
    for group in groups:
        for e, advantage in zip(group, _grpo_advantages(group)):
            length = len(e["new"])
            s = np.prod(np.exp(e["new"] - e["old"])) ** (1 / length)
            free, bounded = s * advantage, min(max(s, 1 - low), 1 + high) * advantage
            slope = 0.0 if bounded < free else -free / length
            parts.append((-min(free, bounded) / number, [np.full(length, slope / number)]))
    return _together(parts)


def cispo(episodes, high=0.28):
    """-sg(min(r, 1 + high)) A log pi; the gradient does not go through the weight."""
    groups = _mixed_groups(episodes)
    tokens = sum(len(e["new"]) for group in groups for e in group)
    parts = []
    for group in groups:
        for e, advantage in zip(group, _grpo_advantages(group)):
            weight = np.minimum(np.exp(e["new"] - e["old"]), 1 + high)
            slope = -weight * advantage / tokens
            parts.append((np.sum(slope * e["new"]), [slope]))
    return _together(parts)


def _importance(episodes, weigh):
    groups = _mixed_groups(episodes)
    tokens = sum(len(e["new"]) for group in groups for e in group)
    parts = []
    for group in groups:
        for e, advantage in zip(group, _grpo_advantages(group)):
            terms = [
                _ppo_token(n, o, advantage, 0.2, 0.2) for n, o in zip(e["new"], e["old"])
            ]
            weights = np.array([weigh(np.exp(o - d)) for o, d in zip(e["old"], e["drawn"])])
            values, slopes = np.array(terms).T
            parts.append((np.sum(weights * values) / tokens, [weights * slopes / tokens]))
    return _together(parts)


def tis(episodes):
    return _importance(episodes, lambda k: min(k, 2.0))


def icepop(episodes):
    return _importance(episodes, lambda k: k if 0.5 <= k <= 5.0 else 0.0)


def distillation(episodes):
    """Policy gradient of log(teacher / student) at each token; rewards do not matter."""
    learnt = _learnt(episodes)
    tokens = sum(len(e["new"]) for e in learnt)
    parts = []
    for e in learnt:
        loss, gradient = _clipped(e, e["teacher"] - e["sampler"], 1 / tokens, 0.2, 0.2)
        parts.append((loss, [gradient]))
    return _together(parts)


def dpo(episodes, beta=0.1):
    """-log sigmoid(beta (log pi/ref of the better - of the worse)), mean over pairs."""
    pairs = []
    for group in _mixed_groups(episodes):
        rewards = [e["reward"] for e in group]
        pairs.append((group[int(np.argmax(rewards))], group[int(np.argmin(rewards))]))
    parts = []
    for better, worse in pairs:
        margin = beta * (
            np.sum(better["new"] - better["reference"])
            - np.sum(worse["new"] - worse["reference"])
        )
        slope = -beta / (1 + np.exp(margin)) / len(pairs)
        gradients = [np.full(len(better["new"]), slope), np.full(len(worse["new"]), -slope)]
        parts.append((np.log1p(np.exp(-margin)) / len(pairs), gradients))
    return _together(parts)
