"""Programming: a specification in words and examples, a Python function, hidden tests.

    x is a number. add 3, then square it. f(2) = 25, f(-1) = 4

    def f(x):
        x = x + 3
        x = x * x
        return x

The candidate runs in one sandbox, on the tests' inputs; the expected outputs are only in
the grader's, and what crosses between them is JSON.
"""

import dataclasses
import functools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpt.domains import domain
from jaxpt.domains.domain import Task
from jaxpt.domains.programming import compose
from jaxpt.domains.programming.compose import Program
from jaxpt.domains.programming.operations import INT, LIST, STR
from jaxpt.domains.programming.slips import Slips
from sandbox.protocol import Execution, Grading, Job, Limits

_LONGEST_EXAMPLE = 40  # characters; longer ones are left out of the specification
_TYPE_NAMES = {INT: "number", STR: "word", LIST: "list"}


@functools.cache
def _source(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programming:
    """Generated functions of `min_steps` to `max_steps` operations.

    Up to num_examples are shown in the specification, num_tests are hidden.
    slips: how often the worked solutions are wrong, and how.
    weights: of the components `tests` (1 if all pass) and `fraction` (of tests passed).
    """

    min_steps: int = 2
    max_steps: int = 3
    num_examples: int = 1
    num_tests: int = 8
    slips: Slips = Slips()
    name: str = "programming"
    weights: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"tests": 1.0})
    limits: Limits = Limits(
        wall_seconds=20.0,
        cpu_seconds=2,
        memory_bytes=256 << 20,
        processes=8,
        file_bytes=1 << 20,
        workspace_bytes=4 << 20,
    )
    pass_component: str = "tests"

    def __post_init__(self):
        if not 2 <= self.min_steps <= self.max_steps <= 6:
            raise ValueError(
                f"min_steps={self.min_steps} and max_steps={self.max_steps} must satisfy "
                "2 <= min_steps <= max_steps <= 6: held-out programs are new pairs of "
                "operations, so one operation alone can't be held out."
            )
        if self.num_examples < 0 or self.num_tests < 1:
            raise ValueError(
                f"num_examples={self.num_examples} must be 0 or more and "
                f"num_tests={self.num_tests} 1 or more."
            )

    @property
    def levels(self) -> int:
        return 1

    def task(self, split: str, seed: int, index: int, level: int = 0) -> Task:
        task_id = domain.task_id(self.name, split, seed, index, level, self.levels)
        chooser = random.Random(task_id)
        program, _ = compose.draw(chooser, split, self.min_steps, self.max_steps)
        kind = program[0].operation.takes
        examples = _examples(chooser, program, self.num_examples)
        tests = _test_inputs(chooser, kind, self.num_tests, examples)
        steps = ", then ".join(step.say(chooser) for step in program)
        pairs = [f"f({x!r}) = {compose.run(program, x)!r}" for x in examples]
        shown = ", ".join(pair for pair in pairs if len(pair) <= _LONGEST_EXAMPLE)
        text = f"x is a {_TYPE_NAMES[kind]}. {steps}. {shown}".rstrip()
        return Task(
            task_id=task_id,
            messages=({"role": "user", "content": text},),
            payload={
                "solution": self.slips.solution(chooser, program),
                "inputs": tests,
                "expected": [compose.run(program, x) for x in tests],
            },
        )

    def solution(self, task: Task) -> str:
        return task.payload["solution"]

    def job(self, task: Task, completion: str, job_id: str) -> Job:
        # No program needs more than half of its workspace; what is over it is cut off.
        largest = self.limits.workspace_bytes // 2
        source = completion.encode("utf-8", errors="surrogatepass")[:largest]
        return Job(
            job_id=job_id,
            domain=self.name,
            execution=Execution(
                command=("python", "-I", "-S", "harness.py"),
                files={
                    "solution.py": source,
                    "harness.py": _source("harness.py").encode(),
                    "inputs.txt": repr(task.payload["inputs"]).encode(),
                },
                artifacts=("outputs.json",),
                limits=self.limits,
            ),
            grading=Grading(
                program=_source("grader.py"),
                payload={
                    "inputs": task.payload["inputs"],
                    "expected": task.payload["expected"],
                },
            ),
        )


def _examples(chooser: random.Random, program: Program, count: int) -> list[Any]:
    """Inputs to show, different ones and short together with their outputs."""
    kind = program[0].operation.takes
    chosen: list[Any] = []
    while len(chosen) < count:
        candidates = [_short_input(chooser, kind) for _ in range(4)]
        chosen.append(
            min(
                (value for value in candidates if value not in chosen),
                key=lambda value: len(repr((value, compose.run(program, value)))),
                default=candidates[0],
            )
        )
    return chosen


def _short_input(chooser: random.Random, kind: str) -> Any:
    if kind == INT:
        return chooser.randint(-9, 20)
    if kind == STR:
        return "".join(chooser.choice("abcd") for _ in range(chooser.randint(2, 4)))
    return [chooser.randint(-5, 12) for _ in range(chooser.randint(2, 4))]


def _test_inputs(
    chooser: random.Random, kind: str, count: int, shown: list[Any]
) -> list[Any]:
    """Hidden inputs: an edge case first, none of those shown, none twice."""
    edges = {INT: [0], STR: [""], LIST: [[]]}[kind]
    tests = [edge for edge in edges if edge not in shown][:count]
    while len(tests) < count:
        size = chooser.randint(1, 8)
        if kind == INT:
            value: Any = chooser.randint(-40, 60)
        elif kind == STR:
            value = "".join(chooser.choice("abcdxyzAB") for _ in range(size))
        else:
            value = [chooser.randint(-12, 20) for _ in range(size)]
        if value not in tests and value not in shown:
            tests.append(value)
    return tests
