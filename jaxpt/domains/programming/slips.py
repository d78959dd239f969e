"""Worked solutions, and the mistakes that those of beginners have."""

import dataclasses
import random

from jaxpt.domains.programming.compose import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slips:
    """How often a worked solution has each of a beginner's mistakes, as shares in [0, 1].

    prints: it prints its result and returns nothing.
    misnames: it calls the function something else.
    """

    prints: float = 0.0
    misnames: float = 0.0

    def __post_init__(self):
        for name, share in dataclasses.asdict(self).items():
            if not 0 <= share <= 1:
                raise ValueError(f"Slips.{name}={share} must be a share from 0 to 1.")

    def solution(self, chooser: random.Random, program: Program) -> str:
        """The program's source, one statement for each step; right if nothing slips."""
        name = "solve" if chooser.random() < self.misnames else "f"
        ending = "print(x)" if chooser.random() < self.prints else "return x"
        steps = (f"    {step.line()}" for step in program)
        lines = [f"def {name}(x):", *steps, f"    {ending}"]
        return "\n".join(lines) + "\n"
