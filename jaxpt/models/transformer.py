"""The decoder: its parameters' declaration, and one forward function for every use."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpt import mesh as mesh_lib
from jaxpt.models import layers, moe, rope
from jaxpt.models.attention import Context, attention_block
from jaxpt.models.config import ModelConfig, MoEConfig
from jaxpt.models.params import Params, ParamSpec, normal, ones


def param_specs(config: ModelConfig) -> dict[str, Any]:
    """The tree of parameters, with Hugging Face's names; layers are stacked first."""
    L, D, V = config.num_layers, config.hidden_size, config.vocab_size
    H, N, K = config.num_heads, config.num_kv_heads, config.head_dim
    if V < 1:
        raise ValueError("vocab_size=0: set it, or take it from the tokenizer.")
    into, out_of_attention = normal(D**-0.5), normal((2 * L * H * K) ** -0.5)
    block = {
        "input_layernorm": ParamSpec((L, D), ("layers", "embed"), ones),
        "q_proj": ParamSpec((L, D, H, K), ("layers", "embed", "heads", "head"), into),
        "k_proj": ParamSpec((L, D, N, K), ("layers", "embed", "kv_heads", "head"), into),
        "v_proj": ParamSpec((L, D, N, K), ("layers", "embed", "kv_heads", "head"), into),
        "o_proj": ParamSpec(
            (L, H, K, D), ("layers", "heads", "head", "embed"), out_of_attention
        ),
        "post_attention_layernorm": ParamSpec((L, D), ("layers", "embed"), ones),
    }
    if config.qk_norm:
        block["q_norm"] = ParamSpec((L, K), ("layers", "head"), ones)
        block["k_norm"] = ParamSpec((L, K), ("layers", "head"), ones)
    F = config.feed_forward.intermediate_size
    out_of_ff = normal((2 * L * F) ** -0.5)
    match config.feed_forward:
        case MoEConfig(num_experts=E):
            axes = ("layers", "expert", "embed", "ff")
            block |= {
                "router": ParamSpec((L, D, E), ("layers", "embed", "expert"), into),
                "gate_proj": ParamSpec((L, E, D, F), axes, into),
                "up_proj": ParamSpec((L, E, D, F), axes, into),
                "down_proj": ParamSpec(
                    (L, E, F, D), ("layers", "expert", "ff", "embed"), out_of_ff
                ),
            }
        case _:
            block |= {
                "gate_proj": ParamSpec((L, D, F), ("layers", "embed", "ff"), into),
                "up_proj": ParamSpec((L, D, F), ("layers", "embed", "ff"), into),
                "down_proj": ParamSpec((L, F, D), ("layers", "ff", "embed"), out_of_ff),
            }
    specs = {
        "embed_tokens": ParamSpec((V, D), ("vocab", "embed"), normal(0.02)),
        "layers": block,
        "norm": ParamSpec((D,), ("embed",), ones),
    }
    if not config.tie_embeddings:
        specs["lm_head"] = ParamSpec((D, V), ("embed", "vocab"), into)
    return specs


def forward(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    context: Context,
    *,
    config: ModelConfig,
    mesh: Mesh,
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Hidden states of `tokens` given what `context` lets them see.

    Args:
      params: as declared by `param_specs`, or as `split_layers` gives them.
      tokens, positions: BT int32.
      context: what is attended to; see `models.attention`.

    Returns:
      hidden: BTD, after the last norm; times `layers.unembedding(params)` it is logits.
      layers: the context's layer states after the pass: stacked [L, ...], or a list of
        them when `config.unroll_layers`.
      routes: the experts chosen, [L, B, T, k] int32, or None for a dense model.
    """
    params = split_layers(params, config)
    angles = rope.cos_sin(positions, config.head_dim, config.rope_theta)
    activation_axes = ("batch", "length", None)
    x = mesh_lib.constrain(layers.embed(params, tokens), mesh, activation_axes)

    def block(x, scanned):
        layer_params, layer = scanned
        with jax.named_scope("attention"):
            normed = layers.rms_norm(
                x, layer_params["input_layernorm"], config.norm_epsilon
            )
            out, layer = attention_block(
                normed, layer_params, angles, context, layer, config
            )
            x = mesh_lib.constrain(x + out, mesh, activation_axes)
        with jax.named_scope("feed_forward"):
            normed = layers.rms_norm(
                x, layer_params["post_attention_layernorm"], config.norm_epsilon
            )
            if isinstance(config.feed_forward, MoEConfig):
                out, routes = moe.moe_block(normed, layer_params, config.feed_forward, mesh)
            else:
                routes = None
                out = layers.swiglu(
                    normed,
                    layer_params["gate_proj"],
                    layer_params["up_proj"],
                    layer_params["down_proj"],
                )
            x = mesh_lib.constrain(x + out, mesh, activation_axes)
        return x, (layer, routes)

    x, (new_layers, routes) = _over_layers(
        block, x, params["layers"], context.layers, config
    )
    hidden = layers.rms_norm(x, params["norm"], config.norm_epsilon)
    return hidden, new_layers, routes


def split_layers(params: Params, config: ModelConfig) -> Params:
    """The parameters as `forward` uses them: one tree per layer when layers are unrolled.

    A loop around `forward` takes them so, or each of its turns would cut them out anew.
    """
    if not config.unroll_layers or isinstance(params["layers"], list):
        return params
    stacked = params["layers"]
    split = [
        {name: leaf[i] for name, leaf in stacked.items()} for i in range(config.num_layers)
    ]
    return params | {"layers": split}


def _over_layers(block, x, layer_params, layer_states, config: ModelConfig):
    """Applies `block` layer after layer, in a scan or unrolled."""
    if not config.unroll_layers:
        return jax.lax.scan(block, x, (layer_params, layer_states))
    states, routes = [], []
    for i, params in enumerate(layer_params):
        state = None if layer_states is None else layer_states[i]
        x, (state, layer_routes) = block(x, (params, state))
        states.append(state)
        routes.append(layer_routes)
    return x, (states, None if routes[0] is None else jnp.stack(routes))
