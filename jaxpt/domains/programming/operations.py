"""An operation: one kind of step, with its words, its code and its meaning.

It takes a value x of one type and gives one of the same or another type. Its code is an
expression in x, so that a step is always the statement `x = <code>`.
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


def conditional(condition: Condition, first: Operation, second: Operation) -> Operation:
    """The step that does `first` if the condition holds, and otherwise `second`."""
    asked = len(condition.constants)
    split = asked + len(first.constants)
    constants = condition.constants + first.constants + second.constants
    places = [f"{{{i}}}" for i in range(len(constants))]
    then_words = first.phrasings[0].format(*places[asked:split])
    else_words = second.phrasings[0].format(*places[split:])
    then_code = first.code.format(*places[asked:split])
    else_code = second.code.format(*places[split:])

    def apply(x: Any, *values: Any) -> Any:
        if condition.holds(x, *values[:asked]):
            return first.apply(x, *values[asked:split])
        return second.apply(x, *values[split:])

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
        constants=constants,
    )
