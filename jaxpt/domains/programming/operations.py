"""The operations that functions are made of: their words, their code and their meaning.

An operation takes a value x of one type and gives one of the same or another type. Code is
an expression in x, so that a step is always the statement `x = <code>`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

INT, STR, LIST = TYPES = ("int", "str", "list")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One kind of step.

    name: "<type taken>.<word>".
    phrasings, code: templates, in which {0}, {1}, ... are the constants.
    apply: (x, *constants) -> the new x, the reference meaning; x is left as it was.
    constants: for each constant, the values it may have.
    """

    name: str
    takes: str
    gives: str
    phrasings: tuple[str, ...]
    code: str
    apply: Callable[..., Any]
    constants: tuple[Sequence[Any], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
    """What a conditional step asks about x; `holds` is (x, *constants) -> bool."""

    name: str
    phrasing: str
    code: str
    holds: Callable[..., bool]
    constants: tuple[Sequence[Any], ...] = ()


def conditional(
    condition: Condition, first: Operation, second: Operation
) -> Operation:
    """The step that does `first` if the condition holds, otherwise `second`."""
    asked, done = len(condition.constants), len(first.constants)
    places = [f"{{{i}}}" for i in range(asked + done + len(second.constants))]
    of_first, of_second = places[asked : asked + done], places[asked + done :]
    then_words = first.phrasings[0].format(*of_first)
    else_words = second.phrasings[0].format(*of_second)
    then_code = first.code.format(*of_first)
    else_code = second.code.format(*of_second)

    def apply(x: Any, *constants: Any) -> Any:
        if condition.holds(x, *constants[:asked]):
            return first.apply(x, *constants[asked : asked + done])
        return second.apply(x, *constants[asked + done :])

    then_name, else_name = (each.name.partition(".")[2] for each in (first, second))
    return Operation(
        name=f"{first.takes}.if_{condition.name}_{then_name}_else_{else_name}",
        takes=first.takes,
        gives=first.gives,
        phrasings=(
            f"if {condition.phrasing} {then_words} otherwise {else_words}",
            f"{then_words} if {condition.phrasing} otherwise {else_words}",
        ),
        code=f"{then_code} if {condition.code} else {else_code}",
        apply=apply,
        constants=condition.constants + first.constants + second.constants,
    )


_DIGITS = range(1, 10)
_FACTORS = range(2, 7)
_COUNTS = range(1, 4)
_LETTERS = "abcd"
_OTHER_LETTERS = "xyz"


def _numbers() -> list[Operation]:
    def make(word, phrasings, code, apply, *constants, gives=INT):
        return Operation(
            name=f"{INT}.{word}",
            takes=INT,
            gives=gives,
            phrasings=phrasings,
            code=code,
            apply=apply,
            constants=constants,
        )

    add = make("add", ("add {0}", "increase it by {0}", "plus {0}"),
               "x + {0}", lambda x, k: x + k, _DIGITS)
