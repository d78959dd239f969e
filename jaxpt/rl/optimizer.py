"""AdamW and Muon, by optax, with gradient clipping, warm-up and a schedule."""

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers


def adamw(
    *,
    learning_rate: float,
    warmup_steps: int = 0,
    decay_steps: int = 0,
    final_fraction: float = 0.1,
    max_gradient_norm: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) on gradients clipped to a global norm; see `schedule`."""
    rate = schedule(learning_rate, warmup_steps, decay_steps, final_fraction)
    return optax.chain(
        optax.clip_by_global_norm(max_gradient_norm),
        optax.adamw(rate, b1=beta1, b2=beta2, eps=epsilon, weight_decay=weight_decay),
    )


def muon(
    *,
    learning_rate: float,
    warmup_steps: int = 0,
    decay_steps: int = 0,
    final_fraction: float = 0.1,
    max_gradient_norm: float = 1.0,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Muon for the layers' projections, each expert's on its own, and AdamW for the rest.

    An update of a projection is its momentum with all singular values brought near 1, by
    Newton-Schulz, and scaled to the RMS of an AdamW update, so that one learning rate
    serves both (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982). Gradients
    are clipped to a global norm first; see `schedule`.
    """
    rate = schedule(learning_rate, warmup_steps, decay_steps, final_fraction)
    return optax.chain(
        optax.clip_by_global_norm(max_gradient_norm),
        optax.contrib.muon(
            rate,
            beta=momentum,
            weight_decay=weight_decay,
            adam_weight_decay=weight_decay,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=_projections,
        ),
    )


def _projections(params: Any) -> Any:
    """Which dimensions a projection reads and writes; None for what is none.

    Dimensions before these (layers, experts) hold one matrix each.
    """
    reads_and_writes = {
        "q_proj": ((-3,), (-2, -1)),
        "k_proj": ((-3,), (-2, -1)),
        "v_proj": ((-3,), (-2, -1)),
        "o_proj": ((-3, -2), (-1,)),
        "gate_proj": ((-2,), (-1,)),
        "up_proj": ((-2,), (-1,)),
        "down_proj": ((-2,), (-1,)),
    }

    def dimensions(path, _):
        found = reads_and_writes.get(path[-1].key)
        return found and MuonDimensionNumbers(*found)

    return jax.tree.map_with_path(dimensions, params)


def schedule(
    learning_rate: float, warmup_steps: int, decay_steps: int, final_fraction: float
) -> optax.Schedule:
    """The rate by step: it rises linearly over `warmup_steps` and then, with `decay_steps`,
    falls along a cosine to `final_fraction` of its peak at step `decay_steps`; without, it
    stays.
    """
    if learning_rate <= 0:
        raise ValueError(f"learning_rate={learning_rate} must be positive.")
    if decay_steps and decay_steps <= warmup_steps:
        raise ValueError(
            f"decay_steps={decay_steps} counts from the start and must exceed "
            f"warmup_steps={warmup_steps}."
        )
    if decay_steps:
        return optax.warmup_cosine_decay_schedule(
            0.0 if warmup_steps else learning_rate,
            learning_rate,
            warmup_steps,
            decay_steps,
            learning_rate * final_fraction,
        )
    return optax.linear_schedule(
        learning_rate / max(warmup_steps, 1), learning_rate, warmup_steps
    )
