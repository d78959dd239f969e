"""Models that say a number for each token, not the next one: critics, reward models.

Its parameters are a language model's without the unembedding, and `value_head`, [D].
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpt import mesh as mesh_lib
from jaxpt.models import transformer
from jaxpt.models.config import ModelConfig
from jaxpt.models.params import Params, ParamSpec, zeros


def param_specs(config: ModelConfig) -> dict[str, Any]:
    specs = transformer.param_specs(config)
    specs.pop("lm_head", None)
    return specs | {"value_head": ParamSpec((config.hidden_size,), ("embed",), zeros)}


def from_language_model(params: Params, mesh: Mesh) -> Params:
    """Copies of a language model's parameters, and a head that says 0 of everything."""
    copies = jax.tree.map(jnp.copy, {k: v for k, v in params.items() if k != "lm_head"})
    norm = params["norm"]
    head = jax.device_put(
        jnp.zeros(norm.shape, norm.dtype), mesh_lib.named_sharding(mesh, ("embed",))
    )
    return copies | {"value_head": head}
