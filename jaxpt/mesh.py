"""The device mesh, and the one table that maps logical axes to its axes.

Every array of the program names its dimensions logically (`"embed"`, `"heads"`); what
they are sharded over is decided here and nowhere else. To try another layout, change one
line of `RULES`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA, CONTEXT, EXPERT, TENSOR, STAGE = "data", "context", "expert", "tensor", "stage"
AXES = (DATA, CONTEXT, EXPERT, TENSOR, STAGE)

# Logical axis -> mesh axis, or None for replicated. Weights are sharded over `data` along
# their model dimension (fully sharded data parallelism) and gathered where they are used.
RULES: dict[str, str | None] = {
    "batch": DATA,
    "length": None,
    "vocab": TENSOR,
    "embed": DATA,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "head": None,
    "ff": TENSOR,
    "expert": EXPERT,
    "layers": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each mesh axis; their product is the number of devices used."""

    data: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    stage: int = 1

    def __post_init__(self):
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {axis}={size!r} must be an integer >= 1.")
        for axis in (CONTEXT, STAGE):
            if getattr(self, axis) != 1:
                raise ValueError(
                    f"mesh axis {axis}={getattr(self, axis)}: nothing is sharded over "
                    f"{axis} in this version; set {axis}=1."
                )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over `devices` (default: all of them), which it must use up.

    Raises:
      ValueError: the product of the axes is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    size = math.prod(config.shape)
    if size != len(devices):
        axes = " x ".join(f"{axis}={n}" for axis, n in zip(AXES, config.shape) if n > 1)
        raise ValueError(
            f"The mesh {axes or 'data=1'} has {size} device(s), but this program has "
            f"{len(devices)} ({devices[0].platform}). Change MeshConfig so that its axes "
            f"multiply to {len(devices)}, or, on a CPU, simulate devices with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={size}."
        )
    return Mesh(
        np.asarray(devices).reshape(config.shape),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
    )


def partition_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """The mesh axes of an array whose dimensions have these logical axes.

    A mesh axis can shard one dimension only: the first that asks for it gets it.
    """
    taken: set[str] = set()
    spec: list[str | None] = []
    for axis in axes:
        mesh_axis = None if axis is None else RULES[axis]
        if mesh_axis in taken:
            mesh_axis = None
        if mesh_axis is not None:
            taken.add(mesh_axis)
        spec.append(mesh_axis)
    return PartitionSpec(*spec)


def named_sharding(mesh: Mesh, axes: Sequence[str | None] = ()) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes))


def check_divisible(mesh: Mesh, name: str, shape: Sequence[int], axes: Sequence) -> None:
    """Raises ValueError if a dimension of `name` can't be split over its mesh axis."""
    for size, axis, mesh_axis in zip(shape, axes, partition_spec(axes)):
        count = 1 if mesh_axis is None else mesh.shape[mesh_axis]
        if size % count:
            raise ValueError(
                f"{name}: its {axis} dimension is {size}, which the mesh axis "
                f"{mesh_axis}={count} does not divide. Choose {mesh_axis} among the "
                f"divisors of {size}, or change the model."
            )


def constrain(x: jax.Array, mesh: Mesh, axes: Sequence[str | None]) -> jax.Array:
    """Asks the compiler to lay `x` out by its logical axes."""
    if mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, named_sharding(mesh, axes))
