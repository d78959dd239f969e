"""Worked solutions, and the mistakes that those of beginners have."""

import dataclasses
import random

from jaxpt.domains.programming.compose import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slips:
    """How often a worked solution has each of a beginner's mistakes, as shares in [0, 1].

    prints: it prints its result and returns nothing.
    swaps: it does the steps in the reverse order.
    forgets: it leaves out the last step.
    """

    prints: float = 0.0
    swaps: float = 0.0
    forgets: float = 0.0

    def __post_init__(self):
        for name, share in dataclasses.asdict(self).items():
            if not 0 <= share <= 1:
                raise ValueError(f"Slips.{name}={share} must be a share from 0 to 1.")

    def solution(self, chooser: random.Random, program: Program) -> str:
        """The program's source, one statement for each step; right if nothing slips."""
        if chooser.random() < self.swaps:
            program = program[::-1]
        if chooser.random() < self.forgets:
            program = program[:-1]
        ending = "print(x)" if chooser.random() < self.prints else "return x"
        lines = ["def f(x):", *(f"    {step.line()}" for step in program), f"    {ending}"]
        return "\n".join(lines) + "\n"
