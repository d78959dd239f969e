"""A domain whose grader always fails: to see what a run does with one."""

import dataclasses
from collections.abc import Mapping

from jaxpt.domains import domain
from jaxpt.domains.domain import Task
from sandbox.protocol import Grading, Job

_GRADER = """
def grade(artifacts, payload):
    raise RuntimeError("broken on purpose")
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Broken:
    """Its tasks ask for a word, and nothing that is answered can be graded."""

    name: str = "broken"
    weights: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"right": 1.0})
    pass_component: str = "right"
    levels: int = 1

    def task(self, split: str, seed: int, index: int, level: int = 0) -> Task:
        return Task(
            task_id=domain.task_id(self.name, split, seed, index, level, self.levels),
            messages=({"role": "user", "content": f"Say {index}."},),
            payload={"number": index},
        )

    def solution(self, task: Task) -> str:
        return str(task.payload["number"])

    def job(self, task: Task, completion: str, job_id: str) -> Job:
        return Job(
            job_id=job_id,
            domain=self.name,
            execution=None,
            grading=Grading(program=_GRADER, payload=None),
            artifacts={"completion.txt": completion.encode(errors="replace")},
        )
