"""Tiny random llama checkpoints, written by the libraries that own the formats."""

import dataclasses
import json
from pathlib import Path

import gguf
import jax
import numpy as np
import safetensors.numpy

from jaxpt import mesh as mesh_lib
from jaxpt.data.tokenizer import Tokenizer, train_bpe
from jaxpt.models import params as params_lib
from jaxpt.models import transformer
from jaxpt.models.config import DenseConfig, ModelConfig

CONFIG = ModelConfig(
    vocab_size=270,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    feed_forward=DenseConfig(intermediate_size=96),
    max_positions=128,
    rope_theta=50_000.0,
    norm_epsilon=1e-5,
)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)


def one_device() -> jax.sharding.Mesh:
    return mesh_lib.make_mesh(mesh_lib.MeshConfig(), jax.devices()[:1])


def random_params(config: ModelConfig) -> params_lib.Params:
    """Every value differs from every other, those of norms too."""
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda spec: generator.standard_normal(spec.shape, np.float32),
        transformer.param_specs(config),
        is_leaf=params_lib.is_spec,
    )


def tiny_tokenizer() -> Tokenizer:
    return train_bpe(["the cat sat on the mat 12\n"] * 3, CONFIG.vocab_size)


def hugging_face_tensors(params: params_lib.Params) -> dict[str, np.ndarray]:
    """As `transformers` has them: [out, in] matrices, one name for each layer."""
    layers = params["layers"]
    tensors = {
        "model.embed_tokens.weight": params["embed_tokens"],
        "model.norm.weight": params["norm"],
    }
    if "lm_head" in params:
        tensors["lm_head.weight"] = params["lm_head"].T
    for i in range(len(layers["q_proj"])):
        name = f"model.layers.{i}"
        embed = layers["q_proj"].shape[1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = layers[norm][i]
        for matrix in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{name}.self_attn.{matrix}.weight"] = (
                layers[matrix][i].reshape(embed, -1).T
            )
        output = layers["o_proj"][i].reshape(-1, embed).T
        tensors[f"{name}.self_attn.o_proj.weight"] = output
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{name}.mlp.{matrix}.weight"] = layers[matrix][i].T
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def hugging_face_config(config: ModelConfig) -> dict:
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
        "transformers_version": "4.46.0",
        "use_cache": True,
    }


def write_hugging_face(folder: Path, tensors: dict, config: dict) -> Path:
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_shards(folder: Path, tensors: dict, config: dict) -> Path:
    """Two shards and their index, tensors in turn."""
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for number in range(2):
        shard = dict(list(tensors.items())[number::2])
        file_name = f"model-{number + 1:05d}-of-00002.safetensors"
        safetensors.numpy.save_file(shard, folder / file_name)
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(tensors: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    """As llama.cpp's converter writes them: q's and k's pairs become neighbours."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    renamed = {}
    for name, tensor in tensors.items():
        for matrix, count in heads.items():
            if matrix in name:
                halves = tensor.reshape(count, 2, config.head_dim // 2, -1)
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        for before, after in _GGUF_NAMES.items():
            name = name.replace(before, after)
        renamed[name] = np.ascontiguousarray(tensor)
    return renamed


def write_gguf(
    path: Path,
    tensors: dict,
    config: ModelConfig,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    extra: dict | None = None,
    tokenizer: Tokenizer | None = None,
    tokenizer_model: str = "gpt2",
    tokenizer_pre: str = "smollm",
) -> Path:
    """Matrices are quantized, vectors stay in float32. extra: uint32 or string keys."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.feed_forward.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    for key, value in (extra or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key, value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, tokenizer_model, tokenizer_pre)
    for name, tensor in tensors.items():
        vector = tensor.ndim == 1
        kind = gguf.GGMLQuantizationType.F32 if vector else quantization
        writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: Tokenizer, model: str, pre: str
) -> None:
    backend = json.loads(tokenizer.backend.to_str())
    numbers = backend["model"]["vocab"]
    tokens = sorted(numbers, key=numbers.get)
    specials = {token["content"] for token in backend["added_tokens"]}
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL if token in specials else gguf.TokenType.NORMAL
            for token in tokens
        ]
    )
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_pad_token_id(tokenizer.pad_id)
    writer.add_chat_template(tokenizer.chat_template)
