"""How a model family names and lays out its weights: tables read in both directions."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxpt.convert.source import Source
from jaxpt.models.config import ModelConfig

LAYER = "{layer}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Reorders dimensions, as in "HK D -> D H K": source [H*K, D], target [D, H, K].

    A word is a dimension, its letters what it is made of, outermost first. Values are
    only moved, so `to_source` undoes `to_target` bitwise.
    """

    text: str

    def __post_init__(self):
        if sorted("".join(self._source)) != sorted("".join(self._target)):
            raise ValueError(f"The two sides of {self.text!r} have other letters.")

    @property
    def _source(self) -> list[str]:
        return self.text.split("->")[0].split()

    @property
    def _target(self) -> list[str]:
        return self.text.split("->")[1].split()

    def source_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return _shape(self._source, sizes)

    def target_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return _shape(self._target, sizes)

    def to_target(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        return _rearrange(array, self._source, self._target, sizes)

    def to_source(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        return _rearrange(array, self._target, self._source, sizes)


def _shape(words: list[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[letter] for letter in word) for word in words)


def _rearrange(
    array: np.ndarray, before: list[str], after: list[str], sizes: Mapping[str, int]
) -> np.ndarray:
    letters, wanted = "".join(before), "".join(after)
    split = array.reshape([sizes[letter] for letter in letters])
    moved = split.transpose([letters.index(letter) for letter in wanted])
    return moved.reshape(_shape(after, sizes))


@dataclasses.dataclass(frozen=True)
class Weight:
    """A leaf of the params, and the tensor (one for each {layer}, if named) it is from.

    target: as in "layers/q_proj". layout: of one layer.
    """

    target: str
    source: str
    layout: Layout

    @property
    def stacked(self) -> bool:
        return LAYER in self.source

    def names(self, config: ModelConfig) -> list[str]:
        """The tensors, in the order in which the leaf stacks them."""
        if not self.stacked:
            return [self.source]
        numbers = range(config.num_layers)
        return [self.source.replace(LAYER, str(number)) for number in numbers]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A family in one file format.

    read_config: refuses (CheckpointError) what the model can't do.
    weights: all of a model's.
    ignored: patterns of tensors that hold nothing learnt.
    copies: tensors that a file may repeat: they must equal the tensor named.
    """

    read_config: Callable[[Source], ModelConfig]
    weights: Callable[[ModelConfig], tuple[Weight, ...]]
    ignored: tuple[str, ...] = ()
    copies: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model, as checkpoints hold it.

    sizes: of a model, what the letters of its layouts stand for.
    write_config: config.json's fields but for the tokenizer's ids; refuses
      (CheckpointError) what the family can't express.
    """

    name: str
    hugging_face: Format
    gguf: Format
    sizes: Callable[[ModelConfig], Mapping[str, int]]
    write_config: Callable[[ModelConfig], dict[str, Any]]
