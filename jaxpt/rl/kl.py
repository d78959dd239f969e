"""Estimates of KL(policy || reference) from tokens drawn from the policy, and their uses.

With d = log reference - log policy at a sampled token (http://joschu.net/blog/kl-approx.html):

| estimate | value | unbiased | gradient as a loss | as a weighted loss | in the reward |
|---|---|---|---|---|---|
| `k1` | -d | yes | 0: no effect | reverse | reverse |
| `k2` | d^2 / 2 | no | reverse | of its own mean | of none |
| `k3` | exp(d) - 1 - d | yes | forward | reverse | reverse - forward |

The gradients are expected ones: "reverse" is that of KL(policy || reference), which is
meant, "forward" that of KL(reference || policy). As a loss the estimate is differentiated
at the tokens that were drawn, weighted the estimate times the ratio of the policy to the
one that drew them. In the reward it is a constant, which the policy gradient passes on. A
test enumerates all of them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # of jax, or of numpy
# (logprobs, reference logprobs) -> estimates, all of one shape.
Estimator = Callable[[Array, Array], Array]


def k1(logprobs: Array, reference_logprobs: Array) -> Array:
    return logprobs - reference_logprobs


def k2(logprobs: Array, reference_logprobs: Array) -> Array:
    return (reference_logprobs - logprobs) ** 2 / 2.0


def k3(logprobs: Array, reference_logprobs: Array) -> Array:
    """Never negative, and 0 where the two agree."""
    difference = reference_logprobs - logprobs
    # On the host numpy's: jax would compile it for each length of an episode.
    exp = jnp.exp if isinstance(difference, jax.Array) else np.exp
    return exp(difference) - 1.0 - difference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Penalty:
    """The price of leaving the reference policy: an estimate times `weight`.

    weighted: as a part of a loss, times the ratio of the policy to the old one; see above.
    """

    estimator: Estimator = k3
    weight: float
    weighted: bool = False

    def __post_init__(self):
        if self.weight <= 0:
            raise ValueError(
                f"Penalty.weight={self.weight} must be positive; for no penalty, give none."
            )

    def loss(
        self, logprobs: jax.Array, ratio: jax.Array, reference_logprobs: jax.Array
    ) -> jax.Array:
        """What is added to each token's loss; arrays [R, T]."""
        estimate = self.estimator(logprobs, reference_logprobs)
        return self.weight * (ratio * estimate if self.weighted else estimate)

    def check_as_loss(self) -> None:
        """Raises ValueError for an estimate that has no expected gradient there."""
        if self.estimator is k1 and not self.weighted:
            raise ValueError(
                "kl.Penalty.estimator=kl.k1 as a part of the loss has no effect: its "
                "gradient is 0 in expectation. Set weighted=True, take k2 or k3, or put "
                "the penalty into the reward."
            )
