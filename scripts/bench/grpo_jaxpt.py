"""Times one GRPO step on a small dense model; prints one JSON line.

Qwen3-shaped, 854,400 parameters, float32 on CPU: 4 prompts x 8 samples x 64 new tokens,
Adam 1e-3, no KL, reward = share of the letter `a`. The argument is the number of steps.
"""

import functools
import json
import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp
import numpy as np

from jaxpt import mesh as mesh_lib
from jaxpt.data.packing import Completion, Group, pack, rows_needed
from jaxpt.inference.engine import generate
from jaxpt.models import params as params_lib
from jaxpt.models import transformer
from jaxpt.models.config import DenseConfig, ModelConfig
from jaxpt.policy import packed_logprobs
from jaxpt.rl import advantages, losses, optimizer
from jaxpt.rl.update import init_state, make_update

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 12
GROUP, PROMPTS, COMPLETION_LEN = 8, 4, 64
EOS, BOS = 2, 1

config = ModelConfig(
    vocab_size=260,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    feed_forward=DenseConfig(intermediate_size=384),
    max_positions=256,
    qk_norm=True,
)
prompts = [[BOS, *(b + 4 for b in f"say letter {i}".encode())] for i in range(PROMPTS)]
lengths = np.array([len(p) for p in prompts], np.int32)
tokens = np.zeros((PROMPTS, max(lengths)), np.int32)
for row, prompt in zip(tokens, prompts):
    row[: len(prompt)] = prompt
row_length = int(max(lengths)) + 2 * COMPLETION_LEN
num_rows = rows_needed(
    num_groups=PROMPTS,
    group_size=GROUP,
    prompt_length=int(max(lengths)),
    completion_length=COMPLETION_LEN,
    row_length=row_length,
)
start = time.perf_counter()
mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig())
adam = optimizer.adamw(learning_rate=1e-3)
state = init_state(
    params_lib.init_params(0, transformer.param_specs(config), mesh),
    adam,
)
policy = functools.partial(packed_logprobs, config=config, mesh=mesh)
update = jax.jit(
    make_update(
        policy,
        functools.partial(losses.clipped),
        adam,
        micro_batch_rows=num_rows,
    ),
    donate_argnums=0,
)
wall, cpu, rewards, sampling = [], [], [], []
print("init", time.perf_counter() - start, file=sys.stderr)
for step in range(STEPS + 1):
    before = time.perf_counter()
    samples = generate(
        state.params,
        tokens,
        lengths,
        np.ones(PROMPTS, np.float32),
        jax.random.fold_in(jax.random.key(0), step),
        config=config,
        mesh=mesh,
        group_size=GROUP,
        max_new_tokens=COMPLETION_LEN,
        eos_id=EOS,
        pad_id=0,
    )
    samples = jax.device_get(samples)
    sampling.append(time.perf_counter() - before)
    wall.append(time.perf_counter())
    cpu.append(time.process_time())
    reward = np.zeros((PROMPTS, GROUP), np.float32)
    for p in range(PROMPTS):
        for g in range(GROUP):
            text = samples.tokens[p, g, : samples.lengths[p, g]]
            reward[p, g] = np.sum(text == ord("a") + 4) / max(1, len(text))
    rewards.append(round(float(reward.mean()), 4))
    credit = np.asarray(
        advantages.group_relative(jnp.asarray(reward), jnp.ones(reward.shape, bool))
    )
    groups = []
    for p in range(PROMPTS):
        completions = []
        for g in range(GROUP):
            n = samples.lengths[p, g]
            completions.append(
                Completion(
                    tokens=samples.tokens[p, g, :n],
                    mask=np.ones(n, np.float32),
                    logprobs=samples.logprobs[p, g, :n],
                    processed_logprobs=samples.processed_logprobs[p, g, :n],
                    advantages=np.full(n, credit[p, g], np.float32),
                )
            )
        groups.append(Group(prompt=prompts[p], completions=completions))
    batch = pack(groups, num_rows=num_rows, row_length=row_length)
    state, metrics = update(state, batch)
    gap = float(metrics["logprob_gap"])
step_s = float(np.median(np.diff(wall)[2:]))
print(
    json.dumps(
        {
            "system": "jaxpt",
            "first_step_s": round(wall[1] - start, 3),
            "step_s": round(step_s, 4),
            "cpu_step_s": round(float(np.median(np.diff(cpu)[2:])), 4),
            "completion_tokens_per_s": round(GROUP * PROMPTS * COMPLETION_LEN / step_s),
            "rewards": rewards,
            "sample_s": round(float(np.median(sampling[2:])), 4),
            "logprob_gap": gap,
        }
    )
)
