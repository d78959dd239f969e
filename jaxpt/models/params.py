"""Parameters declared once: from a tree of `ParamSpec` follow arrays and shardings."""

import dataclasses
import hashlib
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpt import mesh as mesh_lib

Initializer = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
Params = dict[str, Any]  # a nested dict of arrays with the names of the specs


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Shape, logical axes (one per dimension) and initializer of one parameter."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Initializer

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length.")


def normal(stddev: float) -> Initializer:
    """Normal of the given standard deviation."""

    def init(generator, shape):
        return stddev * generator.standard_normal(shape, np.float32)

    return init


def ones(generator, shape):
    del generator
    return np.ones(shape, np.float32)


def zeros(generator, shape):
    del generator
    return np.zeros(shape, np.float32)


def is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)


def paths(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with their names, as in `layers/q_proj`, in the order of the tree."""
    flat, _ = jax.tree.flatten_with_path(tree, is_leaf=is_spec)
    return [("/".join(str(key.key) for key in path), leaf) for path, leaf in flat]


def count(specs: Any) -> int:
    """Number of scalars in the parameters."""
    return sum(math.prod(spec.shape) for _, spec in paths(specs))


def shardings(specs: Any, mesh: Mesh) -> Any:
    """A NamedSharding per parameter; ValueError where the mesh does not divide one."""
    for name, spec in paths(specs):
        mesh_lib.check_divisible(mesh, name, spec.shape, spec.axes)
    return jax.tree.map(
        lambda spec: mesh_lib.named_sharding(mesh, spec.axes), specs, is_leaf=is_spec
    )


def shapes(specs: Any, mesh: Mesh, dtype: Any = jnp.float32) -> Any:
    """The parameters as ShapeDtypeStructs with shardings: to restore or to lower with."""
    return jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding),
        specs,
        shardings(specs, mesh),
        is_leaf=is_spec,
    )


def init_params(seed: int, specs: Any, mesh: Mesh, dtype: Any = jnp.float32) -> Params:
    """Fresh parameters, placed in their shards.

    A parameter's values depend on the seed, its name and its shape alone: adding one leaves
    the others as they were, and the mesh changes nothing. They are drawn on the host, since
    compiling as many random draws as there are parameters takes longer than drawing them.
    """
    flat, treedef = jax.tree.flatten(shardings(specs, mesh))
    leaves = []
    for (name, spec), sharding in zip(paths(specs), flat):
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        value = spec.init(generator, spec.shape)
        leaves.append(jax.device_put(value.astype(dtype), sharding))
    return jax.tree.unflatten(treedef, leaves)


def content_hash(params: Params) -> str:
    """SHA-256 of names, types, shapes and values: equal only for bitwise equal weights."""
    digest = hashlib.sha256()
    for name, leaf in paths(params):
        value = np.asarray(jax.device_get(leaf))
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()
