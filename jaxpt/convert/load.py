"""A checkpoint -> (ModelConfig, Tokenizer, params on the mesh), without guessing.

    checkpoint = open_checkpoint(path)      # a .gguf file or a Hugging Face folder
    params = checkpoint.params(mesh)

Opening compares the file with the family's table: every tensor must be used or known to
hold nothing, every leaf of the params must be there, all with the declared shapes. Only
then are weights read, one leaf of the params at a time.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpt.convert import families, gguf_tokenizer
from jaxpt.convert.families.family import Family, Format
from jaxpt.convert.gguf import GGUFFile
from jaxpt.convert.safetensors import SafetensorsFolder
from jaxpt.convert.source import CheckpointError, Source
from jaxpt.data.tokenizer import Tokenizer
from jaxpt.models import params as params_lib
from jaxpt.models import transformer
from jaxpt.models.config import ModelConfig

_PROBLEMS_SHOWN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An open checkpoint whose tensors fit the model."""

    source: Source
    family: Family
    format: Format
    config: ModelConfig

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the checkpoint carries."""
        if isinstance(self.source, GGUFFile):
            return gguf_tokenizer.from_metadata(self.source.path, self.source.metadata)
        return Tokenizer.load(self.source.path)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, as they are stored."""
        return sum(self.source.byte_sizes.values())

    def leaves(self) -> Iterator[tuple[str, np.ndarray]]:
        """The params as (name, float32 array), in the order of the family's table."""
        self._check_copies()
        sizes = self.family.sizes(self.config)
        shapes = _target_shapes(self.config)
        for weight in self.format.weights(self.config):
            leaf = np.empty(shapes[weight.target], np.float32)
            parts = leaf if weight.stacked else leaf[None]
            for part, name in zip(parts, weight.names(self.config), strict=True):
                part[...] = weight.layout.to_target(self.source.read(name), sizes)
            yield weight.target, leaf

    def params(self, mesh: Mesh, dtype: Any = jnp.float32) -> params_lib.Params:
        """The parameters in their shards; each process reads all and keeps its part."""
        specs = transformer.param_specs(self.config)
        placed = dict(params_lib.paths(params_lib.shardings(specs, mesh)))
        arrays = {}
        for name, leaf in self.leaves():
            leaf = leaf.astype(dtype, copy=False)
            arrays[name] = jax.make_array_from_callback(
                leaf.shape, placed[name], lambda index, leaf=leaf: leaf[index]
            )
        names = [name for name, _ in params_lib.paths(specs)]
        structure = jax.tree.structure(specs, is_leaf=params_lib.is_spec)
        return jax.tree.unflatten(structure, [arrays[name] for name in names])

    def _check_copies(self) -> None:
        for copy, original in self.format.copies(self.config).items():
            if copy in self.source.shapes and not np.array_equal(
                self.source.read(copy), self.source.read(original)
            ):
                raise CheckpointError(
                    f"{self.source.path}: {copy} and {original} differ, but the "
                    "configuration says that they are one (tied embeddings)."
                )


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a GGUF file or a Hugging Face folder; nothing but headers is read.

    Raises:
      CheckpointError: it can't be read, its family or an option of it is not supported,
        or its tensors are not those of the model.
    """
    path = Path(path)
    if path.is_dir():
        source = SafetensorsFolder(path)
        family = families.find(source, "model_type")
        file_format = family.hugging_face
    elif path.is_file():
        source = GGUFFile(path)
        family = families.find(source, "general.architecture")
        file_format = family.gguf
    else:
        raise CheckpointError(
            f"{path} does not exist; give a .gguf file or a folder with config.json "
            "and safetensors."
        )
    checkpoint = Checkpoint(
        source=source,
        family=family,
        format=file_format,
        config=file_format.read_config(source),
    )
    _check_tensors(checkpoint)
    return checkpoint


def load(
    path: Path, mesh: Mesh, dtype: Any = jnp.float32
) -> tuple[ModelConfig, params_lib.Params]:
    """The model in a GGUF file or a Hugging Face folder, on the mesh."""
    checkpoint = open_checkpoint(path)
    return checkpoint.config, checkpoint.params(mesh, dtype)


def _target_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    specs = params_lib.paths(transformer.param_specs(config))
    return {name: spec.shape for name, spec in specs}


def _check_tensors(checkpoint: Checkpoint) -> None:
    config, source = checkpoint.config, checkpoint.source
    sizes = checkpoint.family.sizes(config)
    weights = checkpoint.format.weights(config)
    targets = [weight.target for weight in weights]
    # The family's table is ours: if it does not cover the params once, that is a bug.
    assert sorted(targets) == sorted(_target_shapes(config)), targets
    expected = {
        name: (weight.layout.source_shape(sizes), weight.target)
        for weight in weights
        for name in weight.names(config)
    }
    copies = checkpoint.format.copies(config)
    for copy in copies.keys() & source.shapes.keys():
        expected[copy] = expected[copies[copy]]
    problems = []
    for name, (shape, target) in expected.items():
        if name not in source.shapes:
            problems.append(f"{name} {list(shape)} is missing (for {target})")
        elif source.shapes[name] != shape:
            problems.append(
                f"{name} is {list(source.shapes[name])} in the file, and {list(shape)} "
                f"by the configuration (for {target})"
            )
    for name in source.shapes.keys() - expected.keys():
        if not any(re.fullmatch(known, name) for known in checkpoint.format.ignored):
            problems.append(f"{name} {list(source.shapes[name])} has no place in it")
    if problems:
        shown = sorted(problems)[:_PROBLEMS_SHOWN]
        left_out = len(problems) - len(shown)
        more = f"\n  and {left_out} more" if left_out else ""
        raise CheckpointError(
            f"{source.path} does not hold the {checkpoint.family.name} model that its "
            "configuration describes:\n  " + "\n  ".join(shown) + more
        )
