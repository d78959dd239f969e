"""Model families, found by what a checkpoint calls its architecture."""

from jaxpt.convert.families import llama
from jaxpt.convert.families.family import Family
from jaxpt.convert.source import CheckpointError, Source

FAMILIES: dict[str, Family] = {family.name: family for family in (llama.FAMILY,)}


def find(source: Source, key: str) -> Family:
    """The family that `key` of the checkpoint's metadata names."""
    name = source.metadata.get(key)
    if name not in FAMILIES:
        raise CheckpointError(
            f"{source.path}: {key}={name!r} is not a model family that can be read; "
            f"these are: {', '.join(FAMILIES)}."
        )
    return FAMILIES[name]
