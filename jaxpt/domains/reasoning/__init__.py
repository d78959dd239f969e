"""Reasoning: questions of `reasoning-gym`, each answered at the end of a completion.

    Calculate 4 + 9 - 2. -> Answer: 11

A question's text decides its split, so no held-out question is ever asked in training.
Nothing of the model's runs: its completion crosses to the grader's sandbox as a file. There
it is compared with the one right answer, or, where there are many, judged by the dataset's
own rule on the question, which is made again there.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpt.domains import domain
from jaxpt.domains.domain import TRAIN, Task
from jaxpt.domains.reasoning.dataset import (
    ONE_ANSWER,
    Dataset,
    Question,
    shown,
    site_packages,
    split_of,
)
from sandbox.protocol import Grading, Job, Limits

__all__ = [
    "COMPONENTS",
    "INSTRUCTION",
    "LINES_INSTRUCTION",
    "ONE_ANSWER",
    "Dataset",
    "Reasoning",
    "shown",
    "site_packages",
    "split_of",
]

INSTRUCTION = "Reply with one line, Answer: X"
LINES_INSTRUCTION = "Reply with Answer: X, where X has several lines"
COMPONENTS = ("correct", "format")

_GRADED_BYTES = 64 << 10  # of a completion: its end, where the answer must be
# Of graders that import reasoning-gym, and keep its datasets.
_RULE_LIMITS = Limits(wall_seconds=120.0, memory_bytes=2 << 30)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reasoning:
    """Questions of some datasets, each to be answered by `Answer: X` at the end.

    num_examples: questions of the training split that go before each question, answered.
    instruction: the system message; it has to ask for that last line.
    lines_instruction: the same, where the answer has several lines.
    weights: of the components `correct` (1 if the answer is right; between 0 and 1 where
      the dataset has a rule that gives credit for a part) and `format` (there is one).
    packages: the folder that has reasoning-gym where graders run; as here, if not given.
    """

    datasets: tuple[Dataset, ...]
    num_examples: int = 0
    instruction: str = INSTRUCTION
    lines_instruction: str = LINES_INSTRUCTION
    name: str = "reasoning"
    weights: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"correct": 1.0}
    )
    pass_component: str = "correct"
    packages: str = ""

    def __post_init__(self):
        domain.check_name(self.name)
        domain.check_weights(self.weights, COMPONENTS)
        if self.pass_component not in COMPONENTS:
            raise ValueError(
                f"pass_component={self.pass_component!r} must be one of {COMPONENTS}."
            )
        if not self.datasets:
            raise ValueError("Reasoning.datasets is empty: name at least one dataset.")
        if self.num_examples < 0:
            raise ValueError(f"num_examples={self.num_examples} must be 0 or more.")
        for dataset in self.datasets:
            dataset.check()

    @property
    def levels(self) -> int:
        return max(len(dataset.levels) for dataset in self.datasets)

    def task(self, split: str, seed: int, index: int, level: int = 0) -> Task:
        task_id = domain.task_id(self.name, split, seed, index, level, self.levels)
        dataset = self._choose(task_id)
        question = dataset.draw(split, task_id, level)
        has_lines = "\n" in question.answer
        instruction = self.lines_instruction if has_lines else self.instruction
        messages = [{"role": "system", "content": instruction}]
        for number in range(self.num_examples):
            example = dataset.draw(TRAIN, f"{task_id}/example/{number}", level)
            messages += [
                {"role": "user", "content": example.text},
                {"role": "assistant", "content": _ending(example.answer)},
            ]
        messages.append({"role": "user", "content": question.text})
        payload = {
            "dataset": dataset.name,
            "expected": question.answer,
            "has_lines": has_lines,
        }
        if dataset.has_rule:
            payload["rule"] = _rule(dataset, question)
        return Task(task_id=task_id, messages=tuple(messages), payload=payload)

    def solution(self, task: Task) -> str:
        return _ending(task.payload["expected"])

    def job(self, task: Task, completion: str, job_id: str) -> Job:
        text = completion.encode("utf-8", errors="surrogatepass")
        payload, limits = dict(task.payload), Limits()
        if "rule" in payload:
            payload["packages"] = self.packages or site_packages()
            limits = _RULE_LIMITS
        return Job(
            job_id=job_id,
            domain=self.name,
            execution=None,
            grading=Grading(program=_grader(), payload=payload, limits=limits),
            artifacts={"completion.txt": text[-_GRADED_BYTES:]},
        )

    def _choose(self, task_id: str) -> Dataset:
        """The dataset of a task, by the ratios."""
        point = domain.digest(f"{task_id}/dataset") / 2**64
        point *= sum(dataset.ratio for dataset in self.datasets)
        for dataset in self.datasets[:-1]:
            point -= dataset.ratio
            if point < 0:
                return dataset
        return self.datasets[-1]


def _rule(dataset: Dataset, question: Question) -> dict[str, Any]:
    """What a grader makes the question again by, whose rule judges the answer."""
    return {
        "dataset": dataset.name,
        "settings": dataset.settings_json,
        "size": dataset.size,
        "level": question.level,
        "number": question.number,
        "digest": question.digest,
    }


def _ending(answer: str) -> str:
    return f"Answer:\n{answer}" if "\n" in answer else f"Answer: {answer}"


@functools.cache
def _grader() -> str:
    return (Path(__file__).parent / "grader.py").read_text()
