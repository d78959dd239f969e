"""Llama and models of its architecture, such as SmolLM2: dense, without biases."""

from collections.abc import Mapping
from typing import Any

from jaxpt.convert.families.family import Family, Format, Layout, Weight
from jaxpt.convert.source import CheckpointError, Source
from jaxpt.models.config import DenseConfig, ModelConfig


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "H": config.num_heads,
        "N": config.num_kv_heads,
        "K": config.head_dim,
        "F": config.feed_forward.intermediate_size,
        "r": 2,  # which one of a rotated pair
        "p": config.head_dim // 2,  # which pair
    }


def _weights(
    config: ModelConfig, names: Mapping[str, str], q: Layout, k: Layout
) -> tuple[Weight, ...]:
    layouts = {
        "embed_tokens": Layout("V D -> V D"),
        "layers/input_layernorm": Layout("D -> D"),
        "layers/q_proj": q,
        "layers/k_proj": k,
        "layers/v_proj": Layout("NK D -> D N K"),
        "layers/o_proj": Layout("D HK -> H K D"),
        "layers/post_attention_layernorm": Layout("D -> D"),
        "layers/gate_proj": Layout("F D -> D F"),
        "layers/up_proj": Layout("F D -> D F"),
        "layers/down_proj": Layout("D F -> F D"),
        "norm": Layout("D -> D"),
        "lm_head": Layout("V D -> D V"),
    }
    if config.tie_embeddings:
        del layouts["lm_head"]
    return tuple(
        Weight(target, f"{names[target]}.weight", layout)
        for target, layout in layouts.items()
    )


_HUGGING_FACE_NAMES = {
    "embed_tokens": "model.embed_tokens",
    "layers/input_layernorm": "model.layers.{layer}.input_layernorm",
    "layers/q_proj": "model.layers.{layer}.self_attn.q_proj",
    "layers/k_proj": "model.layers.{layer}.self_attn.k_proj",
    "layers/v_proj": "model.layers.{layer}.self_attn.v_proj",
    "layers/o_proj": "model.layers.{layer}.self_attn.o_proj",
    "layers/post_attention_layernorm": "model.layers.{layer}.post_attention_layernorm",
    "layers/gate_proj": "model.layers.{layer}.mlp.gate_proj",
    "layers/up_proj": "model.layers.{layer}.mlp.up_proj",
    "layers/down_proj": "model.layers.{layer}.mlp.down_proj",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
_GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "layers/input_layernorm": "blk.{layer}.attn_norm",
    "layers/q_proj": "blk.{layer}.attn_q",
    "layers/k_proj": "blk.{layer}.attn_k",
    "layers/v_proj": "blk.{layer}.attn_v",
    "layers/o_proj": "blk.{layer}.attn_output",
    "layers/post_attention_layernorm": "blk.{layer}.ffn_norm",
    "layers/gate_proj": "blk.{layer}.ffn_gate",
    "layers/up_proj": "blk.{layer}.ffn_up",
    "layers/down_proj": "blk.{layer}.ffn_down",
    "norm": "output_norm",
    "lm_head": "output",
}


def _hugging_face_weights(config: ModelConfig) -> tuple[Weight, ...]:
    return _weights(
        config, _HUGGING_FACE_NAMES, Layout("HK D -> D H K"), Layout("NK D -> D N K")
    )


def _gguf_weights(config: ModelConfig) -> tuple[Weight, ...]:
    # GGUF's rotary embedding turns neighbours (2i, 2i + 1), where Hugging Face's turns
    # (i, i + K/2): the rows of each head of q and k are in another order.
    return _weights(
        config, _GGUF_NAMES, Layout("Hpr D -> D H rp"), Layout("Npr D -> D N rp")
    )


# What a configuration must hold, in config.json's names, and GGUF's names for the same.
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_GGUF_CONFIG_NAMES = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
}
# The rest of config.json: what may be there with one value only, and what changes no
# arithmetic. Anything else is refused unless it is off (null or false).
_DESCRIBES = {
    *_REQUIRED,
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "tie_word_embeddings",
}
_MUST_BE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_dropout": 0,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1,
}
_CHANGES_NOTHING = {
    "_name_or_path",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "pad_token_id",
    "return_dict",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
}


def _read_hugging_face_config(source: Source) -> ModelConfig:
    values = dict(source.metadata)
    for name, value in values.items():
        if name in _DESCRIBES | _CHANGES_NOTHING or value is None or value is False:
            continue
        if name not in _MUST_BE or value != _MUST_BE[name]:
            wanted = repr(_MUST_BE[name]) if name in _MUST_BE else "absent or off"
            raise CheckpointError(
                f"{source.path}: {name}={value!r} in config.json is not supported for "
                f"the llama family; it must be {wanted}."
            )
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", values.get("rope_theta"))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if rope or kind != "default":
        raise CheckpointError(
            f"{source.path}: rope scaling (type {kind!r}, {rope}) in config.json is "
            "not supported for the llama family, only plain rotary positions."
        )
    return _config(source, {**values, "rope_theta": theta})


def _read_gguf_config(source: Source) -> ModelConfig:
    values: dict[str, Any] = {
        "tie_word_embeddings": "output.weight" not in source.shapes,
        "vocab_size": len(source.metadata.get("tokenizer.ggml.tokens", ())) or None,
    }
    for key, value in source.metadata.items():
        if not key.startswith("llama."):
            continue
        name = _GGUF_CONFIG_NAMES.get(key.removeprefix("llama."))
        if name is None and value not in (0, "none"):
            raise CheckpointError(
                f"{source.path}: {key}={value!r} is not supported for the llama "
                "family; it must be absent or 0."
            )
        if name is not None and values.get(name, value) not in (None, value):
            raise CheckpointError(
                f"{source.path}: {key}={value!r}, but the metadata elsewhere gives "
                f"{name}={values[name]!r}. A model with both is not supported."
            )
        if name is not None:
            values[name] = value
    if "rope_freqs.weight" in source.shapes:
        raise CheckpointError(
            f"{source.path}: the tensor rope_freqs.weight means rope scaling, which is "
            "not supported for the llama family, only plain rotary positions."
        )
    return _config(source, values)


def _config(source: Source, values: Mapping[str, Any]) -> ModelConfig:
    """The config from values named as in config.json; Llama's defaults for the rest."""
    missing = [name for name in _REQUIRED if values.get(name) is None]
    if missing:
        raise CheckpointError(
            f"{source.path}: the configuration lacks {', '.join(missing)}."
        )
    heads = values["num_attention_heads"]
    try:
        return ModelConfig(
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            feed_forward=DenseConfig(intermediate_size=values["intermediate_size"]),
            max_positions=values["max_position_embeddings"],
            rope_theta=float(values.get("rope_theta") or 10_000.0),
            norm_epsilon=float(values["rms_norm_eps"]),
            tie_embeddings=bool(values.get("tie_word_embeddings")),
        )
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{source.path}: {error}") from error


def _write_config(config: ModelConfig) -> dict[str, Any]:
    if not isinstance(config.feed_forward, DenseConfig) or config.qk_norm:
        raise CheckpointError(
            f"The llama family has neither experts nor norms of q and k; {config} "
            "can't be written as one."
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.feed_forward.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


FAMILY = Family(
    name="llama",
    hugging_face=Format(
        read_config=_read_hugging_face_config,
        weights=_hugging_face_weights,
        # Computed from rope_theta; old files carry it along.
        ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        copies=lambda config: (
            {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_embeddings else {}
        ),
    ),
    gguf=Format(read_config=_read_gguf_config, weights=_gguf_weights),
    sizes=_sizes,
    write_config=_write_config,
)
