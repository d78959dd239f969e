"""Times jaxpt on the workload of workload.py; prints one JSON line.

    python scripts/bench/grpo_jaxpt.py --steps 12 --json figures.json

Beside the figures that all systems give, `parts_s` has the medians of what a step is made
of, and `logprob_gap` the largest difference between sampler and learner.
"""

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import numpy as np
import workload

from jaxpt import mesh as mesh_lib
from jaxpt.data import packing
from jaxpt.inference.engine import Samples, generate, pad_prompts
from jaxpt.models import params as params_lib
from jaxpt.models import transformer
from jaxpt.models.config import DenseConfig, ModelConfig
from jaxpt.policy import packed_logprobs
from jaxpt.rl import advantages, aggregation, losses, optimizer
from jaxpt.rl.update import init_state, make_update

CONFIG = ModelConfig(
    vocab_size=workload.VOCAB_SIZE,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    feed_forward=DenseConfig(intermediate_size=384),
    max_positions=256,
    qk_norm=True,
    unroll_layers=True,
)
PROMPTS = [
    [workload.BOS_ID, *(byte + workload.FIRST_BYTE_ID for byte in prompt.encode())]
    for prompt in workload.PROMPTS
]


def text_of(tokens: np.ndarray) -> str:
    first = workload.FIRST_BYTE_ID
    return bytes(int(t) - first for t in tokens if t >= first).decode("latin1")


def completion(samples: Samples, p: int, g: int) -> packing.Completion:
    """What was sampled in place `g` for prompt `p`."""
    length = samples.lengths[p, g]
    return packing.Completion(
        tokens=np.asarray(samples.tokens[p, g, :length]),
        mask=np.ones(length, np.float32),
        logprobs=np.asarray(samples.logprobs[p, g, :length]),
        processed_logprobs=np.asarray(samples.processed_logprobs[p, g, :length]),
    )


def rewards_of(samples: Samples) -> np.ndarray:
    """[prompts, samples] float32."""
    return np.array(
        [
            [
                workload.share_of_target(text_of(tokens[:length]))
                for tokens, length in zip(*group)
            ]
            for group in zip(samples.tokens, samples.lengths)
        ],
        np.float32,
    )


def make_step() -> Callable[[int, workload.Clock], dict[str, float]]:
    """A function that makes step number `i`, and gives the seconds of its parts."""
    mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig())
    longest = max(map(len, PROMPTS))
    tokens, lengths = pad_prompts(
        PROMPTS, num_prompts=len(PROMPTS), length=longest, pad_id=workload.PAD_ID
    )
    row_length = longest + 2 * workload.MAX_NEW_TOKENS
    num_rows = packing.rows_needed(
        num_groups=workload.NUM_PROMPTS,
        group_size=workload.GROUP_SIZE,
        prompt_length=longest,
        completion_length=workload.MAX_NEW_TOKENS,
        row_length=row_length,
    )
    adam = optimizer.adamw(learning_rate=workload.LEARNING_RATE)
    state = init_state(
        params_lib.init_params(0, transformer.param_specs(CONFIG), mesh), adam
    )
    policy = functools.partial(packed_logprobs, config=CONFIG, mesh=mesh)
    update = jax.jit(
        make_update(policy, losses.PolicyLoss(), adam, micro_batch_rows=num_rows),
        donate_argnums=0,
    )
    keys = jax.random.key(0)

    def step(i: int, clock: workload.Clock) -> dict[str, float]:
        nonlocal state
        begin = time.perf_counter()
        samples = jax.device_get(
            generate(
                state.params,
                tokens,
                lengths,
                np.ones(len(PROMPTS), np.float32),
                jax.random.fold_in(keys, i),
                config=CONFIG,
                mesh=mesh,
                group_size=workload.GROUP_SIZE,
                max_new_tokens=workload.MAX_NEW_TOKENS,
                eos_id=workload.EOS_ID,
                pad_id=workload.PAD_ID,
            )
        )
        sampled = time.perf_counter()
        rewards = rewards_of(samples)
        clock.step(rewards.ravel().tolist(), int(samples.lengths.sum()))
        groups = [
            packing.Group(
                prompt=prompt,
                completions=[completion(samples, p, g) for g in range(workload.GROUP_SIZE)],
            )
            for p, prompt in enumerate(PROMPTS)
        ]
        packed = packing.pack(groups, num_rows=num_rows, row_length=row_length)
        masks = [np.ones(n, bool) for _, _, n in packed.places]
        numbers = np.repeat(np.arange(len(PROMPTS)), workload.GROUP_SIZE)
        episodes = advantages.Episodes(
            rewards=rewards.ravel(),
            groups=numbers,
            masks=masks,
            logprobs=packed.gather(packed.batch.sampler_logprobs),
            token_rewards=[np.zeros(len(mask)) for mask in masks],
            turns=[np.zeros(len(mask), int) for mask in masks],
        )
        batch = dataclasses.replace(
            packed.batch,
            advantages=packed.scatter(advantages.group_relative(episodes)),
            loss_weights=packed.scatter(aggregation.token_mean(masks, numbers)),
        )
        packed = time.perf_counter()
        state, metrics = update(state, batch)
        gap = float(metrics["logprob_gap"])
        return {
            "sample": sampled - begin,
            "pack": packed - sampled,
            "update": time.perf_counter() - packed,
            "gap": gap,
        }

    return step


def main() -> None:
    options = workload.arguments(__doc__ or "")
    clock = workload.Clock()
    step = make_step()
    clock.begin()
    # One more, so that `steps` of them end at the next one's rewards.
    parts = [step(i, clock) for i in range(options.steps + workload.COLD_STEPS + 1)]
    warm = parts[workload.COLD_STEPS :]
    figures = clock.figures("jaxpt") | {
        "parts_s": {
            name: statistics.median(part[name] for part in warm)
            for name in ("sample", "pack", "update")
        },
        "logprob_gap": max(part["gap"] for part in parts),
    }
    workload.report(figures, options.json)


if __name__ == "__main__":
    main()
