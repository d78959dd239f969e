"""Params -> a Hugging Face folder that `transformers` loads."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from jaxpt.convert.families.family import Family
from jaxpt.convert.safetensors import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from jaxpt.convert.source import CheckpointError
from jaxpt.data.tokenizer import Tokenizer
from jaxpt.models.config import ModelConfig

_SHARD_BYTES = 4 * 2**30


def export(
    folder: Path,
    *,
    family: Family,
    config: ModelConfig,
    leaves: Iterable[tuple[str, Any]],
    tokenizer: Tokenizer,
    dtype: Any = np.float32,
    shard_bytes: int = _SHARD_BYTES,
) -> int:
    """Writes the folder, whole or not at all; returns the bytes of the tensors.

    Args:
      leaves: `params.paths(params)`, or a checkpoint's `leaves()`; a shard's worth of
        them is held in memory.
      dtype: of the tensors on disk.
      shard_bytes: one file if all fit, else files of at most so much, and an index.

    Raises:
      CheckpointError: the folder is taken, or the leaves are not the model's.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty; remove it or choose another.")
    fields = family.write_config(config)
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        tensors = _tensors(family, config, leaves, np.dtype(dtype))
        num_bytes = _write_weights(unfinished, tensors, shard_bytes)
        token_ids = {
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "pad_token_id": tokenizer.pad_id,
        }
        fields |= token_ids | {"torch_dtype": np.dtype(dtype).name}
        _write_json(unfinished / CONFIG_FILE, fields)
        _write_json(unfinished / "generation_config.json", token_ids)
        tokenizer.save(unfinished)
        unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return num_bytes


def _tensors(
    family: Family,
    config: ModelConfig,
    leaves: Iterable[tuple[str, Any]],
    dtype: np.dtype,
) -> Iterator[tuple[str, np.ndarray]]:
    """The leaves as tensors with the names and layouts of the family."""
    sizes = family.sizes(config)
    left = {weight.target: weight for weight in family.hugging_face.weights(config)}
    for target, leaf in leaves:
        weight = left.pop(target, None)
        if weight is None:
            raise CheckpointError(
                f"{target} {list(leaf.shape)} has no place in the {family.name} "
                "family, or comes twice."
            )
        names, one = weight.names(config), weight.layout.target_shape(sizes)
        shape = (len(names), *one) if weight.stacked else one
        if tuple(leaf.shape) != shape:
            raise CheckpointError(
                f"{target} is {list(leaf.shape)}, and by the configuration {list(shape)}."
            )
        parts = leaf if weight.stacked else [leaf]
        for part, name in zip(parts, names, strict=True):
            tensor = weight.layout.to_source(np.asarray(part), sizes)
            yield name, np.ascontiguousarray(tensor, dtype)
    if left:
        raise CheckpointError(f"The params lack {', '.join(sorted(left))}.")


def _write_weights(
    folder: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int
) -> int:
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    pending_bytes = total_bytes = 0

    def flush() -> None:
        # Numbered names need the number of all shards, which is not known yet.
        safetensors.numpy.save_file(
            pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"}
        )
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / WEIGHTS_FILE)
        return total_bytes
    weight_map = {}
    for number, names in enumerate(shards):
        file_name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    _write_json(
        folder / INDEX_FILE,
        {"metadata": {"total_size": total_bytes}, "weight_map": weight_map},
    )
    return total_bytes


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
