"""Times google-tunix on the workload of workload.py; prints one JSON line.

Run by grpo_step.py, in an environment of its own.
"""
# pyright: reportMissingImports=false

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import importlib.metadata

import jax
import numpy as np
import optax
import sentencepiece
import workload
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout


class ByteTokenizer(sentencepiece.SentencePieceProcessor):
    """The tokenizer of workload.py, with the methods that tunix calls."""

    def pad_id(self):
        return workload.PAD_ID

    def bos_id(self):
        return workload.BOS_ID

    def eos_id(self):
        return workload.EOS_ID

    def GetPieceSize(self):
        return workload.VOCAB_SIZE

    def DecodeIds(self, ids):
        first = workload.FIRST_BYTE_ID
        return bytes(int(i) - first for i in ids if int(i) >= first).decode("latin1")

    def EncodeAsIds(self, text, **_):
        return [byte + workload.FIRST_BYTE_ID for byte in text.encode("latin1")]


def make_cluster(steps: int) -> rl_cluster.RLCluster:
    config = qwen3.ModelConfig(
        num_layers=4,
        vocab_size=workload.VOCAB_SIZE,
        embed_dim=128,
        hidden_dim=384,
        num_heads=4,
        head_dim=32,
        num_kv_heads=2,
        rope_theta=10000,
        norm_eps=1e-6,
    )
    actor, reference = (qwen3.Qwen3(config, rngs=nnx.Rngs(0)) for _ in range(2))
    devices = np.array(jax.devices()[:1]).reshape(1, 1)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"))
    roles = (
        rl_cluster.Role.ACTOR,
        rl_cluster.Role.REFERENCE,
        rl_cluster.Role.ROLLOUT,
    )
    return rl_cluster.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=ByteTokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(workload.LEARNING_RATE),
                eval_every_n_steps=10**6,
                max_steps=steps,
                mini_batch_size=workload.NUM_PROMPTS,
                train_micro_batch_size=workload.NUM_PROMPTS,
            ),
            # top_p=None would be silently greedy in this version.
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=workload.MAX_NEW_TOKENS,
                max_prompt_length=workload.MAX_PROMPT_LENGTH,
                kv_cache_size=workload.MAX_PROMPT_LENGTH + workload.MAX_NEW_TOKENS + 8,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
            ),
        ),
    )


def main() -> None:
    options = workload.arguments(__doc__ or "")
    steps = options.steps + workload.COLD_STEPS + 1
    clock = workload.Clock()

    def reward(prompts, completions, **_):
        del prompts
        values = [workload.share_of_target(text) for text in completions]
        clock.step(values, sum(map(len, completions)))
        return values

    learner = grpo_learner.GRPOLearner(
        rl_cluster=make_cluster(steps),
        reward_fns=reward,
        algo_config=grpo_learner.GRPOConfig(
            num_generations=workload.GROUP_SIZE, num_iterations=1, beta=0.0
        ),
    )
    clock.begin()
    learner.train([{"prompts": np.array(workload.PROMPTS)} for _ in range(steps + 2)])
    version = importlib.metadata.version("google-tunix")
    workload.report(clock.figures(f"google-tunix {version}"), options.json)


if __name__ == "__main__":
    main()
