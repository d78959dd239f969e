"""What a checkpoint gives: metadata, the shapes of its tensors, and each tensor."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class CheckpointError(ValueError):
    """A checkpoint can't be read, or not without guessing."""


class Source(Protocol):
    """A checkpoint, opened. Tensors are read from disk one at a time, when asked for.

    metadata: GGUF's key-values, or what config.json holds.
    """

    @property
    def path(self) -> Path: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def byte_sizes(self) -> Mapping[str, int]: ...

    def read(self, name: str) -> np.ndarray:
        """The tensor in float32, of the shape that `shapes` gives."""
        ...
