"""The optimizer: gradient clipping, warm-up and a schedule around AdamW, all from optax."""

import optax


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
    """AdamW (arXiv:1711.05101) on gradients clipped to a global norm.

    The rate rises linearly over `warmup_steps` and then, with `decay_steps`, falls along a
    cosine to `final_fraction` of its peak at step `decay_steps`; without, it stays.
    """
    if learning_rate <= 0:
        raise ValueError(f"learning_rate={learning_rate} must be positive.")
    if decay_steps and decay_steps <= warmup_steps:
        raise ValueError(
            f"decay_steps={decay_steps} counts from the start and must exceed "
            f"warmup_steps={warmup_steps}."
        )
    if decay_steps:
        schedule = optax.warmup_cosine_decay_schedule(
            0.0 if warmup_steps else learning_rate,
            learning_rate,
            warmup_steps,
            decay_steps,
            learning_rate * final_fraction,
        )
    else:
        schedule = optax.linear_schedule(
            learning_rate / max(warmup_steps, 1), learning_rate, warmup_steps
        )
    return optax.chain(
        optax.clip_by_global_norm(max_gradient_norm),
        optax.adamw(schedule, b1=beta1, b2=beta2, eps=epsilon, weight_decay=weight_decay),
    )
