"""Imports point one way, as the layout says."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {
    "sandbox": {"jaxpt", "jax", "flax", "optax", "numpy"},
    "jaxpt/domains": {"jax", "flax", "optax", "jaxpt.types", "jaxpt.models"},
    "jaxpt/rl": {"jaxpt.models", "jaxpt.inference", "jaxpt.rollout", "jaxpt.train"},
    "jaxpt/models": {"jaxpt.inference", "jaxpt.rl", "jaxpt.rollout", "jaxpt.rewards"},
    "jaxpt/inference": {"jaxpt.rl", "jaxpt.rollout", "jaxpt.rewards", "sandbox"},
    "jaxpt/parallel": {"jaxpt.models", "jaxpt.inference", "jaxpt.rl"},
    "jaxpt/data": {"jaxpt.train", "jaxpt.rollout", "sandbox.pool"},
}
MAY_IMPORT_SANDBOX = ("jaxpt/rewards", "jaxpt/rollout", "jaxpt/domains")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def under(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


@pytest.mark.parametrize("folder", sorted(FORBIDDEN))
def test_arrows_point_one_way(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder} has no files: the rule checks nothing"
    for path in files:
        for name in imports(path):
            for module in FORBIDDEN[folder]:
                assert not under(name, module), f"{path} imports {name}"


def test_only_the_edges_know_the_sandbox_and_gin():
    for path in sorted((ROOT / "jaxpt").rglob("*.py")):
        relative = path.relative_to(ROOT).as_posix()
        names = imports(path)
        if not relative.startswith(MAY_IMPORT_SANDBOX):
            assert not any(under(name, "sandbox") for name in names), relative
        if relative != "jaxpt/configure.py":
            assert not any(under(name, "gin") for name in names), relative


def test_axis_names_are_written_in_mesh_only():
    for path in sorted((ROOT / "jaxpt").rglob("*.py")):
        if path.name == "mesh.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("psum", "axis_index", "PartitionSpec", "all_gather")
            ):
                for argument in node.args[1:]:
                    assert not isinstance(argument, ast.Constant), (
                        f"{path}:{node.lineno} names an axis by a string"
                    )
