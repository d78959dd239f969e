"""Programs as pipelines of steps, and the two splits of their space.

The splits have nothing in common, in two ways. By composition: some pairs of adjacent
operations are reserved; a held-out program contains one, a training program none. By
behaviour: a program's outputs on fixed inputs are hashed, and the hash decides which split
may contain it, so programs that behave the same are never in both.
"""

import dataclasses
import functools
import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

from jaxpt.domains.domain import HELDOUT, TRAIN
from jaxpt.domains.programming.catalogue import TAKING
from jaxpt.domains.programming.operations import INT, LIST, STR, TYPES, Operation

RESERVED_PAIRS = 8  # one adjacent pair of operations in so many is held out
HELDOUT_BUCKETS = 8  # one behaviour in so many may be held out


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation with its constants."""

    operation: Operation
    constants: tuple[Any, ...]

    def say(self, chooser: random.Random) -> str:
        return chooser.choice(self.operation.phrasings).format(*self.constants)

    def line(self) -> str:
        return f"x = {self.operation.code.format(*map(repr, self.constants))}"

    def apply(self, value: Any) -> Any:
        return self.operation.apply(value, *self.constants)


Program = tuple[Step, ...]

_PROBES = random.Random("probes")
PROBES: dict[str, tuple[Any, ...]] = {
    INT: (*range(-12, 13), 17, 20, 25, 36, 99, -30, -77),
    STR: (
        "",
        *(
            "".join(_PROBES.choice("abcdxyzAB") for _ in range(_PROBES.randint(1, 8)))
            for _ in range(31)
        ),
    ),
    LIST: (
        (),
        *(
            tuple(_PROBES.randint(-9, 12) for _ in range(_PROBES.randint(1, 7)))
            for _ in range(31)
        ),
    ),
}


def run(program: Program, value: Any) -> Any:
    """The value that the program gives, by the operations' meaning."""
    for step in program:
        value = step.apply(value)
    return value


def probe(kind: str, index: int) -> Any:
    """A fresh copy of a probe input, lists as lists."""
    value = PROBES[kind][index]
    return list(value) if kind == LIST else value


def behaviour(program: Program) -> tuple[str, ...]:
    """What the program does to the probes: its identity in the splits."""
    kind = program[0].operation.takes
    return (
        kind,
        *(repr(run(program, probe(kind, i))) for i in range(len(PROBES[kind]))),
    )


def bucket(behaviour: tuple[str, ...]) -> int:
    digest = hashlib.sha256("\n".join(behaviour).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELDOUT_BUCKETS


def is_trivial(behaviour: tuple[str, ...]) -> bool:
    """Too few different outputs, or the input itself."""
    kind, *outputs = behaviour
    inputs = [repr(probe(kind, i)) for i in range(len(outputs))]
    return len(set(outputs)) < 4 or outputs == inputs


@functools.cache
def is_reserved(first: str, second: str) -> bool:
    """Whether training never composes these two operations in this order."""
    digest = hashlib.sha256(f"{first} then {second}".encode()).digest()
    return digest[0] % RESERVED_PAIRS == 0


def split_of(program: Program, signature: tuple[str, ...]) -> str | None:
    """The split that may contain the program; None if neither may."""
    names = [step.operation.name for step in program]
    reserved = any(is_reserved(a, b) for a, b in itertools.pairwise(names))
    held_out = bucket(signature) == 0
    if reserved != held_out:
        return None
    return HELDOUT if reserved else TRAIN


def random_program(chooser: random.Random, min_steps: int, max_steps: int) -> Program:
    kind = chooser.choice(TYPES)
    steps = []
    for _ in range(chooser.randint(min_steps, max_steps)):
        operation = chooser.choice(TAKING[kind])
        constants = tuple(chooser.choice(values) for values in operation.constants)
        steps.append(Step(operation, constants))
        kind = operation.gives
    return tuple(steps)


def draw(
    chooser: random.Random, split: str, min_steps: int, max_steps: int
) -> tuple[Program, tuple[str, ...]]:
    """A program of the split and its behaviour, by drawing until one belongs."""
    while True:
        program = random_program(chooser, min_steps, max_steps)
        names = [step.operation.name for step in program]
        reserved = any(is_reserved(a, b) for a, b in itertools.pairwise(names))
        if reserved != (split == HELDOUT):
            continue
        signature = behaviour(program)
        if split_of(program, signature) == split and not is_trivial(signature):
            return program, signature


def all_programs(num_steps: int) -> Iterator[Program]:
    """Every pipeline of so many steps, with every constant."""
    if num_steps == 0:
        yield ()
        return
    for kind in TYPES:
        yield from _continuations(kind, num_steps)


def _continuations(kind: str, num_steps: int) -> Iterator[Program]:
    if num_steps == 0:
        yield ()
        return
    for operation in TAKING[kind]:
        for constants in itertools.product(*operation.constants):
            for rest in _continuations(operation.gives, num_steps - 1):
                yield (Step(operation, constants), *rest)
