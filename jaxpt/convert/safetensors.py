"""Hugging Face model folders: config.json and safetensors, in one file or in shards."""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
import numpy as np
import safetensors

from jaxpt.convert.source import CheckpointError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class SafetensorsFolder:
    """An open Hugging Face folder; see `source.Source`.

    Raises:
      CheckpointError: a file is missing or cut off, the index and the shards differ, or
        a tensor is neither float32, float16 nor bfloat16.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.metadata = _read_json(self.path / CONFIG_FILE)
        self._files = {}  # tensor name -> the open file that holds it
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.byte_sizes: dict[str, int] = {}
        if (self.path / INDEX_FILE).is_file():
            self._open_shards(_read_json(self.path / INDEX_FILE))
        else:
            self._open(self.path / WEIGHTS_FILE)

    def read(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name).astype(np.float32, copy=False)

    def _open_shards(self, index: dict[str, Any]) -> None:
        listed = index.get("weight_map")
        if not isinstance(listed, dict):
            raise CheckpointError(f"{self.path / INDEX_FILE} has no weight_map.")
        for file_name in sorted(set(listed.values())):
            if Path(file_name).name != file_name:
                raise CheckpointError(
                    f"{self.path / INDEX_FILE} names {file_name!r}, which is not a "
                    "file of this folder."
                )
            names = self._open(self.path / file_name)
            expected = {name for name, file in listed.items() if file == file_name}
            if names != expected:
                raise CheckpointError(
                    f"{self.path / INDEX_FILE} and {file_name} differ about "
                    f"{sorted(names ^ expected)[:5]}."
                )

    def _open(self, file: Path) -> set[str]:
        """The names of the tensors in the file, now open."""
        if not file.is_file():
            raise CheckpointError(f"{file} is missing.")
        try:
            opened = safetensors.safe_open(file, framework="numpy")
        except safetensors.SafetensorError as error:
            raise CheckpointError(
                f"{file} ({file.stat().st_size} bytes) can't be read, it may be cut "
                f"off: {error}. Fetch it again."
            ) from None
        names = set(opened.keys())
        for name in sorted(names):
            view = opened.get_slice(name)
            if view.get_dtype() not in _ITEM_BYTES:
                raise CheckpointError(
                    f"{file}: {name} is stored as {view.get_dtype()}; only "
                    f"{', '.join(_ITEM_BYTES)} can be read."
                )
            shape = tuple(view.get_shape())
            self._files[name] = opened
            self.shapes[name] = shape
            self.byte_sizes[name] = math.prod(shape) * _ITEM_BYTES[view.get_dtype()]
        return names


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return value
