"""The shape of a decoder-only transformer, checked when it is made."""

import dataclasses


def _require_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{type(owner).__name__}.{name}={value!r} must be an integer >= 1."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """One SwiGLU feed-forward block for every token."""

    intermediate_size: int

    def __post_init__(self):
        _require_positive(self, "intermediate_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """SwiGLU experts of which a router chooses `experts_per_token` for each token.

    The router's softmax runs over all experts; the weights of the chosen ones are divided
    by their sum when `normalize_weights` (Qwen3-MoE, Mixtral).
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool = True

    def __post_init__(self):
        _require_positive(self, "num_experts", "experts_per_token", "intermediate_size")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must lie between 1 and "
                f"num_experts={self.num_experts}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm transformer with grouped-query attention and rotary positions.

    `vocab_size` may be 0 in a config file: it is then taken from the tokenizer.
    `max_positions` bounds prompt and completion together. `unroll_layers` compiles each
    layer instead of one scanned over: faster on a CPU, but compile time grows with depth.
    """

    vocab_size: int = 0
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    feed_forward: DenseConfig | MoEConfig
    max_positions: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    qk_norm: bool = False
    tie_embeddings: bool = False
    unroll_layers: bool = False

    def __post_init__(self):
        _require_positive(
            self,
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        )
        if self.vocab_size < 0:
            raise ValueError(f"vocab_size={self.vocab_size} must not be negative.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}: query heads share key-value heads "
                "evenly."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} must be even: rotary positions turn pairs."
            )
        if not isinstance(self.feed_forward, DenseConfig | MoEConfig):
            raise ValueError(
                f"feed_forward={self.feed_forward!r} must be a DenseConfig or MoEConfig."
            )

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads
