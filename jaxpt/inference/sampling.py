"""The choice of the next token: logits in, a token and its two logprobs out."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Temperature, then top-k, then top-p, applied in this order.

    temperature 0 is greedy. top_k=0 and top_p=1.0 keep the whole distribution.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 or more.")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (off) or more.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1].")
        if self.temperature == 0.0 and (self.top_k or self.top_p < 1.0):
            raise ValueError(
                f"top_k={self.top_k} and top_p={self.top_p} have no effect with "
                "temperature=0 (greedy); leave them at 0 and 1.0."
            )

    @property
    def is_plain(self) -> bool:
        """Whether the distribution drawn from is the model's own."""
        return self == SamplingConfig()


def _first(candidates: jax.Array) -> jax.Array:
    """Index of the first True along the last axis, and the last index if there is none.

    A minimum of indices: on a CPU several times as fast as argmax.
    """
    size = candidates.shape[-1]
    return jnp.min(jnp.where(candidates, jnp.arange(size), size - 1), axis=-1)


def process(
    logits: jax.Array, temperature: jax.Array, *, top_k: int, top_p: float
) -> jax.Array:
    """Logprobs of the distribution that is sampled from; [..., V] -> [..., V].

    temperature: [...], 0 puts everything on the most likely token. Excluded tokens get
    -inf. Of the tokens tied at the k-th place all are kept; top-p keeps the smallest set of
    most likely tokens whose probability reaches top_p.
    """
    greedy = temperature[..., None] == 0.0
    best = _first(logits == jnp.max(logits, axis=-1, keepdims=True))[..., None]
    only_best = jnp.where(jnp.arange(logits.shape[-1]) == best, 0.0, -jnp.inf)
    logits = logits / jnp.where(greedy, 1.0, temperature[..., None])
    if 0 < top_k < logits.shape[-1]:
        kth = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits >= kth, logits, -jnp.inf)
    if top_p < 1.0:
        descending = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(descending)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        kept = jnp.where(before < top_p, descending, jnp.inf)
        logits = jnp.where(
            logits >= jnp.min(kept, axis=-1, keepdims=True), logits, -jnp.inf
        )
    return jnp.where(greedy, only_best, jax.nn.log_softmax(logits))


def cumulative(x: jax.Array) -> jax.Array:
    """Sums of the first 1, 2, ... entries of the last dimension; [..., V] -> [..., V].

    By products with triangles of ones, which a CPU does faster than `jnp.cumsum`.
    """
    size, block = x.shape[-1], 32
    if size <= block:
        ones = jnp.triu(jnp.ones((size, size), x.dtype))
        return jnp.matmul(x, ones, precision=jax.lax.Precision.HIGHEST)
    leading = [(0, 0)] * (x.ndim - 1)
    blocks = -(-size // block)
    x = jnp.pad(x, [*leading, (0, blocks * block - size)])
    within = cumulative(x.reshape(*x.shape[:-1], blocks, block))
    totals = cumulative(within[..., -1])
    before = jnp.pad(totals[..., :-1], [*leading, (1, 0)])
    return (within + before[..., None]).reshape(x.shape)[..., :size]


def draw(uniform: jax.Array, logprobs: jax.Array) -> jax.Array:
    """Tokens from distributions by inverting their cumulative sums.

    uniform: [...] in [0, 1), logprobs: [..., V] -> [...] int32. One random number per
    token instead of one per vocabulary entry; a token of probability 0 is never drawn.
    """
    probabilities = jnp.exp(logprobs)
    possible = probabilities > 0
    sums = cumulative(probabilities)
    total = jnp.max(jnp.where(possible, sums, 0.0), axis=-1, keepdims=True)
    return _first((sums > uniform[..., None] * total) & possible)


def sample(
    uniform: jax.Array,
    logits: jax.Array,
    temperature: jax.Array,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token per row; uniform (in [0, 1)) and temperature: [...], logits: [..., V].

    Returns tokens [...] int32, their logprobs in the plain distribution (the model's own,
    at temperature 1), and in the processed one that they were drawn from.
    """
    logits = logits.astype(jnp.float32)
    processed = process(logits, temperature, top_k=top_k, top_p=top_p)
    tokens = draw(uniform, processed)
    chosen = tokens[..., None]
    logprobs = jnp.take_along_axis(logits, chosen, -1)[..., 0]
    return (
        tokens,
        logprobs - jax.nn.logsumexp(logits, axis=-1),
        jnp.take_along_axis(processed, chosen, -1)[..., 0],
    )
