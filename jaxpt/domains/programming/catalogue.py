"""All the operations that programs are composed of.

Words, code and meaning are three separate statements of the same thing; a test holds the
code to the meaning.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpt.domains.programming.operations import (
    INT,
    LIST,
    STR,
    TYPES,
    Condition,
    Operation,
    conditional,
)

_DIGITS = range(1, 10)
_FACTORS = range(2, 6)
_COUNTS = range(1, 4)
_LETTERS = "abcd"  # what words are made of
_NEW_LETTERS = "xyz"


def _operation(
    takes: str,
    word: str,
    code: str,
    apply: Callable[..., Any],
    phrasings: Sequence[str],
    *constants: Sequence[Any],
    gives: str = "",
) -> Operation:
    return Operation(
        name=f"{takes}.{word}",
        takes=takes,
        gives=gives or takes,
        phrasings=tuple(phrasings),
        code=code,
        apply=apply,
        constants=constants,
    )


def _of_numbers() -> list[Operation]:
    def op(word, code, apply, phrasings, *constants, gives=INT):
        return _operation(INT, word, code, apply, phrasings, *constants, gives=gives)

    add = op("add", "x + {0}", lambda x, k: x + k, ["add {0}", "plus {0}"], _DIGITS)
    subtract = op(
        "subtract",
        "x - {0}",
        lambda x, k: x - k,
        ["subtract {0}", "minus {0}"],
        _DIGITS,
    )
    multiply = op(
        "multiply",
        "x * {0}",
        lambda x, k: x * k,
        ["multiply by {0}", "times {0}"],
        _FACTORS,
    )
    negate = op("negate", "-x", lambda x: -x, ["negate it", "flip its sign"])
    above = Condition(
        name="above",
        phrasing="it is above {0}",
        code="x > {0}",
        holds=lambda x, k: x > k,
        constants=(_DIGITS,),
    )
    below = Condition(
        name="below",
        phrasing="it is below {0}",
        code="x < {0}",
        holds=lambda x, k: x < k,
        constants=(_DIGITS,),
    )
    even = Condition(
        name="even",
        phrasing="it is even",
        code="x % 2 == 0",
        holds=lambda x: x % 2 == 0,
    )
    return [
        add,
        subtract,
        multiply,
        negate,
        op(
            "divide",
            "x // {0}",
            lambda x, k: x // k,
            ["floor-divide by {0}", "divide by {0} rounding down"],
            _FACTORS,
        ),
        op(
            "remainder",
            "x % {0}",
            lambda x, k: x % k,
            ["keep the remainder by {0}", "take it modulo {0}"],
            range(2, 10),
        ),
        op("square", "x * x", lambda x: x**2, ["square it", "multiply it by itself"]),
        op("absolute", "abs(x)", abs, ["take the absolute value", "drop its sign"]),
        op(
            "at_least",
            "max(x, {0})",
            lambda x, k: x if x > k else k,
            ["make it at least {0}", "raise it to {0} if lower"],
            range(0, 10),
        ),
        op(
            "at_most",
            "min(x, {0})",
            lambda x, k: x if x < k else k,
            ["make it at most {0}", "cap it at {0}"],
            range(0, 10),
        ),
        op(
            "distance",
            "abs(x - {0})",
            lambda x, k: x - k if x > k else k - x,
            ["take the distance to {0}", "see how far it is from {0}"],
            _DIGITS,
        ),
        op(
            "subtract_from",
            "{0} - x",
            lambda x, k: k - x,
            ["subtract it from {0}", "take it away from {0}"],
            _DIGITS,
        ),
        op("text", "str(x)", str, ["write it as text", "make it a string"], gives=STR),
        op(
            "digits",
            "[int(c) for c in str(abs(x))]",
            lambda x: list(map(int, str(x).lstrip("-"))),
            ["list its digits", "split it into digits"],
            gives=LIST,
        ),
        conditional(above, subtract, negate),
        conditional(below, negate, multiply),
        conditional(even, add, negate),
    ]


def _of_sequences(takes: str, items: str) -> list[Operation]:
    """What words and lists have in common; the code is the same for both."""

    def op(word, code, apply, phrasings, *constants, gives=takes):
        return _operation(takes, word, code, apply, phrasings, *constants, gives=gives)

    reverse = op("reverse", "x[::-1]", lambda x: x[::-1], ["reverse it", "turn it around"])
    first = op(
        "first",
        "x[:{0}]",
        lambda x, k: x[: min(k, len(x))],
        ["keep the first {0}", "take the first {0}"],
        _COUNTS,
    )
    drop_first = op(
        "drop_first",
        "x[{0}:]",
        lambda x, k: x[min(k, len(x)) :],
        ["drop the first {0}", "skip the first {0}"],
        _COUNTS,
    )
    double = op("double", "x + x", lambda x: x * 2, ["repeat it", "write it twice"])
    longer = Condition(
        name="longer",
        phrasing=f"it has over {{0}} {items}",
        code="len(x) > {0}",
        holds=lambda x, k: len(x) > k,
        constants=(_COUNTS,),
    )
    return [
        reverse,
        first,
        drop_first,
        double,
        op(
            "last",
            "x[-{0}:]",
            lambda x, k: x[max(len(x) - k, 0) :],
            ["keep the last {0}", "take the last {0}"],
            _COUNTS,
        ),
        op(
            "drop_last",
            "x[:-{0}]",
            lambda x, k: x[: max(len(x) - k, 0)],
            ["drop the last {0}", "cut off the last {0}"],
            _COUNTS,
        ),
        op(
            "every_second",
            "x[::2]",
            lambda x: x[::2],
            [f"keep every second of its {items}", f"skip every other of its {items}"],
        ),
        op(
            "mirror",
            "x + x[::-1]",
            lambda x: x + x[::-1],
            ["mirror it", "append its reverse"],
        ),
        op(
            "length",
            "len(x)",
            len,
            ["take its length", f"count its {items}"],
            gives=INT,
        ),
        conditional(longer, reverse, double),
        conditional(longer, first, reverse),
    ]


def _of_words() -> list[Operation]:
    def op(word, code, apply, phrasings, *constants, gives=STR):
        return _operation(STR, word, code, apply, phrasings, *constants, gives=gives)

    return [
        op("upper", "x.upper()", str.upper, ["uppercase it", "make it uppercase"]),
        op("lower", "x.lower()", str.lower, ["lowercase it", "make it lowercase"]),
        op(
            "swap_case",
            "x.swapcase()",
            str.swapcase,
            ["swap its case", "flip its case"],
        ),
        op(
            "append",
            "x + {0}",
            lambda x, a: f"{x}{a}",
            ["append {0}", "put {0} at the end"],
            _LETTERS,
        ),
        op(
            "prepend",
            "{0} + x",
            lambda x, a: f"{a}{x}",
            ["prepend {0}", "put {0} in front"],
            _LETTERS,
        ),
        op(
            "replace",
            "x.replace({0}, {1})",
            lambda x, a, b: "".join(b if c == a else c for c in x),
            ["replace {0} with {1}", "change {0} to {1}"],
            _LETTERS,
            _NEW_LETTERS,
        ),
        op(
            "remove",
            "x.replace({0}, '')",
            lambda x, a: "".join(c for c in x if c != a),
            ["remove every {0}", "delete each {0}"],
            _LETTERS,
        ),
        op(
            "sort",
            "''.join(sorted(x))",
            lambda x: "".join(sorted(x)),
            ["sort its letters", "put its letters in order"],
        ),
        op(
            "count",
            "x.count({0})",
            lambda x, a: sum(c == a for c in x),
            ["count the {0}", "tell how many {0} it has"],
            _LETTERS,
            gives=INT,
        ),
    ]


def _of_lists() -> list[Operation]:
    def op(word, code, apply, phrasings, *constants, gives=LIST):
        return _operation(LIST, word, code, apply, phrasings, *constants, gives=gives)

    def each(word, code, apply, phrasings, *constants):
        def to_all(x, *k):
            return [apply(v, *k) for v in x]

        return op(word, f"[{code} for v in x]", to_all, phrasings, *constants)

    def keep(word, code, holds, phrasings, *constants):
        def those(x, *k):
            return [v for v in x if holds(v, *k)]

        return op(word, f"[v for v in x if {code}]", those, phrasings, *constants)

    return [
        each(
            "add_each",
            "v + {0}",
            lambda v, k: v + k,
            ["add {0} to each", "increase each by {0}"],
            _DIGITS,
        ),
        each(
            "multiply_each",
            "v * {0}",
            lambda v, k: v * k,
            ["multiply each by {0}", "scale each by {0}"],
            _FACTORS,
        ),
        each(
            "remainder_each",
            "v % {0}",
            lambda v, k: v % k,
            ["take each modulo {0}", "keep each remainder by {0}"],
            range(2, 10),
        ),
        each("square_each", "v * v", lambda v: v**2, ["square each", "square every item"]),
        each("negate_each", "-v", lambda v: -v, ["negate each", "flip each sign"]),
        keep(
            "keep_even",
            "v % 2 == 0",
            lambda v: v % 2 == 0,
            ["keep the even ones", "drop the odd ones"],
        ),
        keep(
            "keep_odd",
            "v % 2 == 1",
            lambda v: v % 2 == 1,
            ["keep the odd ones", "drop the even ones"],
        ),
        keep(
            "keep_above",
            "v > {0}",
            lambda v, k: v > k,
            ["keep those above {0}", "keep those over {0}"],
            range(0, 10),
        ),
        keep(
            "keep_below",
            "v < {0}",
            lambda v, k: v < k,
            ["keep those below {0}", "keep those under {0}"],
            range(0, 10),
        ),
        op("sort", "sorted(x)", sorted, ["sort it", "put it in order"]),
        op(
            "sort_down",
            "sorted(x)[::-1]",
            lambda x: sorted(x, reverse=True),
            ["sort it descending", "sort it from high to low"],
        ),
        op(
            "unique",
            "sorted(set(x))",
            lambda x: sorted(set(x)),
            ["sort it without repeats", "sort its distinct values"],
        ),
        op(
            "append",
            "x + [{0}]",
            lambda x, k: [*x, k],
            ["append {0}", "put {0} at the end"],
            _DIGITS,
        ),
        op(
            "prepend",
            "[{0}] + x",
            lambda x, k: [k, *x],
            ["prepend {0}", "put {0} in front"],
            _DIGITS,
        ),
        op("sum", "sum(x)", sum, ["sum it", "add up its items"], gives=INT),
        op(
            "largest",
            "max(x, default=0)",
            lambda x: max(x) if x else 0,
            ["take the largest or 0", "take the maximum or 0"],
            gives=INT,
        ),
        op(
            "smallest",
            "min(x, default=0)",
            lambda x: min(x) if x else 0,
            ["take the smallest or 0", "take the minimum or 0"],
            gives=INT,
        ),
        op(
            "count",
            "x.count({0})",
            lambda x, k: sum(v == k for v in x),
            ["count the {0}", "tell how many {0} it has"],
            range(0, 10),
            gives=INT,
        ),
        op(
            "join",
            "''.join(map(str, x))",
            lambda x: "".join(str(v) for v in x),
            ["join it into text", "join it into a string"],
            gives=STR,
        ),
    ]


OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation
    for operation in (
        *_of_numbers(),
        *_of_sequences(STR, "letters"),
        *_of_words(),
        *_of_sequences(LIST, "items"),
        *_of_lists(),
    )
}
TAKING: Mapping[str, tuple[Operation, ...]] = {
    kind: tuple(each for each in OPERATIONS.values() if each.takes == kind)
    for kind in TYPES
}
