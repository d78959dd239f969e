"""Eight simulated devices for every test, and one tiny model to test with."""

import dataclasses
import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Compiled for the sake of compiling fast: seven times as fast as by default. What runs for
# long, and what is timed, has a process of its own without these.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_use_fusion_emitters=false",
)

import jax
import numpy as np
import pytest
from hypothesis import settings

from jaxpt import mesh as mesh_lib
from jaxpt.data.packing import Completion, Group, pack
from jaxpt.mesh import MeshConfig
from jaxpt.models import params as params_lib
from jaxpt.models import transformer
from jaxpt.models.config import DenseConfig, ModelConfig, MoEConfig
from jaxpt.rl import aggregation

# Tests must pass under load: no example has a time limit.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

VOCAB = 48
DENSE = DenseConfig(intermediate_size=24)


def model_config(**changes) -> ModelConfig:
    """Two layers, grouped heads, four experts; sizes that a 2x2x2 mesh divides."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_positions": 64,
        "feed_forward": MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=24),
    }
    return ModelConfig(**(shape | changes))


def make_mesh(**axes):
    config = MeshConfig(**axes)
    return mesh_lib.make_mesh(config, jax.devices()[: int(np.prod(config.shape))])


def init(config, mesh, seed=0):
    return params_lib.init_params(seed, transformer.param_specs(config), mesh)


def random_groups(seed, sizes, *, prompt=(2, 6), completion=(1, 8)):
    """Groups with random tokens, masks and logprobs; sizes: completions of each."""
    rng = np.random.default_rng(seed)
    groups = []
    for size in sizes:
        completions = []
        for _ in range(size):
            length = int(rng.integers(*completion))
            values = -rng.exponential(2.0, (2, length)).astype(np.float32)
            completions.append(
                Completion(
                    tokens=rng.integers(3, VOCAB, length).astype(np.int32),
                    mask=(rng.random(length) < 0.9).astype(np.float32),
                    logprobs=values[0],
                    processed_logprobs=values[1],
                )
            )
        tokens = rng.integers(3, VOCAB, int(rng.integers(*prompt))).tolist()
        groups.append(Group(prompt=tokens, completions=completions))
    return groups


def packed_batch(groups, *, num_rows, row_length):
    """Their batch, with an advantage that each completion's tokens decide, tokens alike."""
    packed = pack(groups, num_rows=num_rows, row_length=row_length)
    completions = [completion for group in groups for completion in group.completions]
    masks = [completion.mask > 0 for completion in completions]
    advantages = [
        np.full(len(c.tokens), np.cos(c.tokens.sum()), np.float32) for c in completions
    ]
    weights = aggregation.token_mean(masks, np.arange(len(masks)))
    return dataclasses.replace(
        packed.batch,
        advantages=packed.scatter(advantages),
        loss_weights=packed.scatter(weights),
    )


@pytest.fixture(scope="session")
def one_device():
    return make_mesh()
