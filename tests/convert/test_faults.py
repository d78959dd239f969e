"""What does not fit is refused before a weight is read, by an error that names it."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy

from jaxpt.convert.export import export
from jaxpt.convert.families.llama import FAMILY
from jaxpt.convert.load import load, open_checkpoint
from jaxpt.convert.source import CheckpointError
from jaxpt.models import params as params_lib
from jaxpt.models.config import MoEConfig
from tests import tiny_checkpoints as tiny

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({Q_PROJ: None}, r"layers\.1\.self_attn\.q_proj.* \[32, 64\] is missing"),
        ({"norm.bias": np.ones(3)}, r"norm\.bias \[3\] has no place in it"),
        (
            {Q_PROJ: np.ones((32, 63))},
            r"q_proj\.weight is \[32, 63\] in the file, and \[32, 64\] by the config",
        ),
        (
            {Q_PROJ: np.ones((64, 32))},
            r"q_proj\.weight is \[64, 32\] in the file, and \[32, 64\] by the config",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, tensors, change, message):
    changed = {k: v for k, v in (tensors | change).items() if v is not None}
    changed = {name: tensor.astype(np.float32) for name, tensor in changed.items()}
    folder = tiny.write_hugging_face(
        tmp_path / "m", changed, tiny.hugging_face_config(tiny.CONFIG)
    )
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_many_problems_are_counted(tmp_path, tensors):
    config = tiny.hugging_face_config(tiny.CONFIG) | {"num_hidden_layers": 5}
    folder = tiny.write_hugging_face(tmp_path / "m", tensors, config)
    with pytest.raises(CheckpointError, match="and 10 more"):
        open_checkpoint(folder)


def test_repeated_and_computed_tensors(tmp_path):
    tensors = tiny.hugging_face_tensors(tiny.random_params(tiny.TIED))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    config = tiny.hugging_face_config(tiny.TIED)
    load(tiny.write_hugging_face(tmp_path / "m", tensors, config), tiny.one_device())
    tensors["lm_head.weight"][0, 0] += 1
    folder = tiny.write_hugging_face(tmp_path / "m", tensors, config)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and .* differ"):
        load(folder, tiny.one_device())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "model_type='qwen3' is not a model family .* llama"),
        ({"architectures": ["X"]}, r"architectures=\['X'\] .* it must be \['LlamaFor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling .*linear"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling .*yarn"),
        ({"attention_bias": True}, "attention_bias=True .* must be absent or off"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"sliding_window": 16}, "sliding_window=16"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' .* must be 'silu'"),
        ({"new_option": 3}, "new_option=3"),
        ({"rms_norm_eps": None}, "the configuration lacks rms_norm_eps"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"hidden_size": "64"}, r"hidden_size='64' must be an integer"),
    ],
)
def test_config_faults(tmp_path, tensors, change, message):
    config = tiny.hugging_face_config(tiny.CONFIG) | change
    folder = tiny.write_hugging_face(tmp_path / "m", tensors, config)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_damaged_folders(tmp_path, tensors):
    config = tiny.hugging_face_config(tiny.CONFIG)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    folder = tiny.write_hugging_face(tmp_path / "m", tensors, config)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for length in (0, 4, 100, len(content) - 1):
        weights.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=rf"\({length} bytes\) can't be read"):
            open_checkpoint(folder)
    integers = {**tensors, Q_PROJ: np.ones((32, 64), np.int8)}
    safetensors.numpy.save_file(integers, weights)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is stored as I8"):
        open_checkpoint(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(folder)


def test_damaged_shards(tmp_path, tensors):
    folder = tiny.write_shards(
        tmp_path / "m", tensors, tiny.hugging_face_config(tiny.CONFIG)
    )
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    file_name = index["weight_map"].pop(Q_PROJ)
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"differ about \['model\.layers\.1\.self"):
        open_checkpoint(folder)
    index["weight_map"][Q_PROJ] = f"../{file_name}"
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is not a file of this folder"):
        open_checkpoint(folder)
    (folder / file_name).unlink()
    index["weight_map"][Q_PROJ] = file_name
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{file_name} is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blk.1.attn_q.weight": None}, r"blk\.1\.attn_q.* \[32, 64\] is missing"),
        ({"blk.1.attn_q.bias": np.ones(32)}, r"attn_q\.bias \[32\] has no place in it"),
        ({"blk.1.attn_q.weight": np.ones((32, 96))}, r"\[32, 96\] in the file, and"),
        ({"rope_freqs.weight": np.ones(4)}, "rope_freqs.weight means rope scaling"),
        ({"output.weight": None, "token_embd.weight": None}, "token_embd.* is missing"),
    ],
)
def test_gguf_tensors_that_do_not_fit(tmp_path, gguf_tensors, change, message):
    changed = {k: v for k, v in (gguf_tensors | change).items() if v is not None}
    changed = {name: tensor.astype(np.float32) for name, tensor in changed.items()}
    path = tiny.write_gguf(tmp_path / "m.gguf", changed, tiny.CONFIG)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"architecture": "gemma3"},
            "general.architecture='gemma3' is not a model fam",
        ),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type='yarn'"),
        ({"extra": {"llama.expert_count": 8}}, "llama.expert_count=8 is not supported"),
        ({"extra": {"llama.attention.sliding_window": 64}}, "sliding_window=64"),
    ],
)
def test_gguf_option_faults(tmp_path, gguf_tensors, options, message):
    path = tiny.write_gguf(tmp_path / "m.gguf", gguf_tensors, tiny.CONFIG, **options)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_partial_rotary_is_refused(tmp_path, gguf_tensors):
    path = tmp_path / "m.gguf"
    tiny.write_gguf(path, gguf_tensors, tiny.CONFIG)
    content, key = path.read_bytes(), b"llama.rope.dimension_count"
    start = content.index(key) + len(key) + 4  # after the value's type
    assert content[start] == 8
    path.write_bytes(content[:start] + b"\x04" + content[start + 1 :])
    with pytest.raises(CheckpointError, match=r"dimension_count=4, but .* head_dim=8"):
        open_checkpoint(path)


def test_damaged_gguf(tmp_path, gguf_tensors, tokenizer):
    path = tiny.write_gguf(
        tmp_path / "m.gguf", gguf_tensors, tiny.CONFIG, tokenizer=tokenizer
    )
    content = path.read_bytes()
    lengths = [1, 10, 30, 200, 3000, 6000, len(content) // 2, len(content) - 100]
    for length in lengths:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut off|not a GGUF file"):
            open_checkpoint(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is empty"):
        open_checkpoint(path)
    path.write_bytes(b"GGML" + content[4:])
    with pytest.raises(CheckpointError, match="not a GGUF file: it begins with b'GGML'"):
        open_checkpoint(path)
    path.write_bytes(content[:4] + b"\x01" + content[5:])
    with pytest.raises(CheckpointError, match="GGUF version 1"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer_model": "llama"}, "model='llama', pre='smollm' can't be read"),
        ({"tokenizer_pre": "tekken"}, r"pre in \['gpt-2', 'llama-bpe', 'smollm'\]"),
        ({"tokenizer": None}, "has no tokenizer.ggml.model in its metadata"),
    ],
)
def test_tokenizer_faults(tmp_path, gguf_tensors, tokenizer, options, message):
    path = tmp_path / "m.gguf"
    options = {"tokenizer": tokenizer} | options
    tiny.write_gguf(path, gguf_tensors, tiny.CONFIG, **options)
    with pytest.raises(CheckpointError, match=message):
        _ = open_checkpoint(path).tokenizer


def test_export_faults_leave_nothing(tmp_path, tokenizer, params):
    def run(folder="new", config=tiny.CONFIG, **changes):
        leaves = dict(params_lib.paths(params)) | changes
        export(
            tmp_path / folder,
            family=FAMILY,
            config=config,
            leaves=[(name, leaf) for name, leaf in leaves.items() if leaf is not None],
            tokenizer=tokenizer,
        )

    with pytest.raises(CheckpointError, match="The params lack norm"):
        run(norm=None)
    with pytest.raises(CheckpointError, match=r"norm is \[3\], and by the .* \[64\]"):
        run(norm=np.ones(3))
    with pytest.raises(CheckpointError, match=r"bias \[3\] has no place in the llama"):
        run(bias=np.ones(3))
    experts = MoEConfig(num_experts=2, experts_per_token=1, intermediate_size=8)
    with pytest.raises(CheckpointError, match="neither experts nor norms of q and k"):
        run(config=dataclasses.replace(tiny.CONFIG, feed_forward=experts))
    assert not list(tmp_path.iterdir())
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(CheckpointError, match="taken is not empty"):
        run("taken")
