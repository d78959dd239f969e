"""GGUF files: metadata, and tensors dequantized one at a time to float32.

The file is parsed here (version 2 and 3, little-endian; a few lines, and fifty times as
fast as the `gguf` package's reader on a vocabulary); the quantized formats are read by
the `gguf` package. Shapes are in NumPy's order, the reverse of GGUF's.
"""

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxpt.convert.source import CheckpointError

_SCALARS = {
    gguf.GGUFValueType.UINT8: "<B",
    gguf.GGUFValueType.INT8: "<b",
    gguf.GGUFValueType.UINT16: "<H",
    gguf.GGUFValueType.INT16: "<h",
    gguf.GGUFValueType.UINT32: "<I",
    gguf.GGUFValueType.INT32: "<i",
    gguf.GGUFValueType.FLOAT32: "<f",
    gguf.GGUFValueType.BOOL: "<?",
    gguf.GGUFValueType.UINT64: "<Q",
    gguf.GGUFValueType.INT64: "<q",
    gguf.GGUFValueType.FLOAT64: "<d",
}


@dataclasses.dataclass(frozen=True)
class _Tensor:
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    byte_shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.byte_shape)


class GGUFFile:
    """An open GGUF file; see `source.Source`.

    Raises:
      CheckpointError: the file is not GGUF, or it ends too early.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise CheckpointError(f"{self.path} is empty.") from None
        header = _Header(self.path, self._bytes)
        self.metadata, self._tensors = header.parse()
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.byte_sizes = {name: t.num_bytes for name, t in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.offset)
        try:
            values = gguf.dequantize(raw.reshape(tensor.byte_shape), tensor.kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: {name} is stored as {tensor.kind.name}, which can't be "
                "dequantized. Use a file with another quantization, such as Q8_0."
            ) from None
        return values.astype(np.float32, copy=False).reshape(tensor.shape)


class _Header:
    """Reads a GGUF header from its start to the tensors' data."""

    def __init__(self, path: Path, data: mmap.mmap):
        self._path = path
        self._data = data
        self._position = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        """(metadata, tensors)."""
        if (magic := self._take(4)) != b"GGUF":
            raise CheckpointError(
                f"{self._path} is not a GGUF file: it begins with {magic!r}."
            )
        if (version := self._scalar("<I")) not in (2, 3):
            raise CheckpointError(
                f"{self._path}: GGUF version {version} (or big-endian) is not "
                "supported; 2 and 3 are."
            )
        num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("<I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        start = -(-self._position // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise CheckpointError(f"{self._path}: {name} is in the file twice.")
            tensors[name] = self._tensor(name, shape, kind, start + offset)
        return metadata, tensors

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
        kind, offset = self._scalar("<I"), self._scalar("<Q")
        return name, tuple(reversed(dimensions)), kind, offset

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> _Tensor:
        try:
            quantization = gguf.GGMLQuantizationType(kind)
            byte_shape = gguf.quant_shape_to_byte_shape(shape, quantization)
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {name}: {error}") from None
        tensor = _Tensor(quantization, shape, tuple(map(int, byte_shape)), offset)
        if offset + tensor.num_bytes > len(self._data):
            raise CheckpointError(
                f"{self._path} is cut off: it has {len(self._data)} bytes, and {name} "
                f"{list(shape)} needs bytes {offset} to {offset + tensor.num_bytes}. "
                "Fetch it again."
            )
        return tensor

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise CheckpointError(
                f"{self._path} is cut off in its header: it has {len(self._data)} "
                f"bytes, and {end} are needed. Fetch it again."
            )
        piece = self._data[self._position : end]
        self._position = end
        return piece

    def _scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _string(self) -> str:
        return self._take(self._scalar("<Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        match kind:
            case gguf.GGUFValueType.STRING:
                return self._string()
            case gguf.GGUFValueType.ARRAY:
                item_kind, length = self._scalar("<I"), self._scalar("<Q")
                if item_kind in _SCALARS:
                    layout = np.dtype(_SCALARS[gguf.GGUFValueType(item_kind)])
                    items = np.frombuffer(self._take(length * layout.itemsize), layout)
                    return items.tolist()
                return [self._value(item_kind) for _ in range(length)]
            case gguf.GGUFValueType.FLOAT32:
                # The shortest decimal for it: 1e-05 and not 9.999999747378752e-06.
                return float(str(np.float32(self._scalar("<f"))))
            case _ if kind in _SCALARS:
                return self._scalar(_SCALARS[gguf.GGUFValueType(kind)])
        raise CheckpointError(f"{self._path}: metadata of the unknown type {kind}.")
