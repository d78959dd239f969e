"""Reasoning: questions of `reasoning-gym` whose one right answer is compared as text.

    Calculate 4 + 9 - 2. -> Answer: 11

A question's text decides its split, so no held-out question is ever asked in training.
Nothing of the model's runs: its completion crosses to the grader's sandbox as a file.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpt.domains import domain
from jaxpt.domains.domain import HELDOUT, TRAIN, Task
from sandbox.protocol import Grading, Job

INSTRUCTION = "Reply with one line, Answer: X"
COMPONENTS = ("correct", "format")

# Datasets whose own `score_answer` only adds to the one right answer: other spellings of
# an integer, or credit for a part. Read in reasoning-gym 0.1.25. Of any other dataset with
# a rule of its own there may be many right answers.
ONE_ANSWER = ("chain_sum", "products", "spell_backward")

_SIZE = 1 << 18  # questions of a dataset; a few datasets make a table of this length
_MOST_DRAWS = 1000  # of questions, until one is of the wanted split
_PROBES = 8  # questions that a dataset is tried on before it is used
_GRADED_BYTES = 64 << 10  # of a completion: its end, where the answer must be


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset of `reasoning-gym`, by its name there, and how hard its questions are.

    settings: fields of the dataset's configuration, such as {"max_terms": 3}.
    ratio: its share of the domain's tasks, relative to the others'.
    """

    name: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ratio: float = 1.0

    def __post_init__(self):
        if taken := sorted({"seed", "size"} & set(self.settings)):
            raise ValueError(
                f"Dataset {self.name!r}: settings give {taken}, which have no effect: "
                "the domain numbers its tasks itself. Leave them out."
            )
        if not 0 < self.ratio < math.inf:
            raise ValueError(f"Dataset {self.name!r}: ratio={self.ratio} must be positive.")

    @functools.cached_property
    def generator(self) -> Any:
        """The `ProceduralDataset`; its questions have the numbers below `_SIZE`.

        Raises:
          ValueError: reasoning-gym is missing, or does not know the name or a setting.
        """
        try:
            with warnings.catch_warnings():
                # A package that it imports has invalid comparisons in its source.
                warnings.simplefilter("ignore", SyntaxWarning)
                import reasoning_gym
        except ImportError as error:
            raise ValueError(
                f"The reasoning domain needs reasoning-gym ({error}). "
                "Run: pip install -e '.[reasoning]' -c constraints.txt"
            ) from error
        try:
            return reasoning_gym.create_dataset(
                self.name, seed=0, size=_SIZE, **self.settings
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(
                f"Dataset {self.name!r} with the settings {dict(self.settings)}: {error}."
            ) from error

    def question(self, number: int) -> tuple[str, str]:
        """The question with this number, and its answer.

        Raises:
          ValueError: the answer is no line of text.
        """
        entry = self.generator[number % _SIZE]
        answer = entry["answer"]
        if not isinstance(answer, str) or len(answer.strip().splitlines()) != 1:
            raise ValueError(
                f"Dataset {self.name!r} answers one of its questions by {answer!r:.80}, "
                "but an answer must be one line of text. Take another dataset."
            )
        return entry["question"].strip(), answer.strip()

    def check(self) -> None:
        """Refuses a dataset whose answers can't be graded by comparing texts."""
        own_rule = "score_answer" in {
            name
            for kind in type(self.generator).__mro__
            if kind.__module__ != "reasoning_gym.dataset"
            for name in vars(kind)
        }
        if own_rule and self.name not in ONE_ANSWER:
            raise ValueError(
                f"Dataset {self.name!r} scores answers by a rule of its own "
                "(score_answer), so other texts than the expected one may be right. Take "
                f"a dataset without such a rule, or one of {list(ONE_ANSWER)}."
            )
        numbers = [domain.digest(f"probe/{number}") for number in range(_PROBES)]
        first = [self.question(number) for number in numbers]
        again = [self.question(number) for number in reversed(numbers)]
        if first != again[::-1]:
            raise ValueError(
                f"Dataset {self.name!r} gives another question when it is asked for the "
                "same number again, so a run could not be repeated. Take another dataset."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reasoning:
    """Questions of some datasets, each to be answered by a last line `Answer: X`.

    num_examples: questions of the training split that go before each question, answered.
    instruction: the system message; it has to ask for that line.
    weights: of the components `correct` (the line gives the expected answer) and `format`
    (there is such a line).
    """

    datasets: tuple[Dataset, ...]
    num_examples: int = 0
    instruction: str = INSTRUCTION
    name: str = "reasoning"
    weights: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"correct": 1.0}
    )
    pass_component: str = "correct"

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

    def task(self, split: str, seed: int, index: int) -> Task:
        task_id = domain.task_id(self.name, split, seed, index)
        dataset = self._choose(task_id)
        question, answer = _draw(dataset, split, task_id)
        messages = [{"role": "system", "content": self.instruction}]
        for number in range(self.num_examples):
            asked, answered = _draw(dataset, TRAIN, f"{task_id}/example/{number}")
            messages += [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": _line(answered)},
            ]
        messages.append({"role": "user", "content": question})
        return Task(
            task_id=task_id,
            messages=tuple(messages),
            payload={"dataset": dataset.name, "expected": answer},
        )

    def solution(self, task: Task) -> str:
        return _line(task.payload["expected"])

    def job(self, task: Task, completion: str, job_id: str) -> Job:
        text = completion.encode("utf-8", errors="surrogatepass")
        return Job(
            job_id=job_id,
            domain=self.name,
            execution=None,
            grading=Grading(
                program=_grader(), payload={"expected": task.payload["expected"]}
            ),
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


def split_of(question: str) -> str:
    """The split that a question is in; its case and spacing make no difference."""
    return HELDOUT if domain.is_held_out("".join(question.split()).casefold()) else TRAIN


def _draw(dataset: Dataset, split: str, draw_id: str) -> tuple[str, str]:
    """The first question drawn that is in the split, and its answer."""
    for attempt in range(_MOST_DRAWS):
        question, answer = dataset.question(domain.digest(f"{draw_id}/{attempt}"))
        if split_of(question) == split:
            return question, answer
    raise ValueError(
        f"Dataset {dataset.name!r} with the settings {dict(dataset.settings)} gave no "
        f"question of the {split} split in {_MOST_DRAWS} draws: it has too few different "
        "ones. Widen its settings."
    )


def _line(answer: str) -> str:
    return f"Answer: {answer}"


@functools.cache
def _grader() -> str:
    return (Path(__file__).parent / "grader.py").read_text()
