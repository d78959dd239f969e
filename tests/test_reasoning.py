"""The reasoning domain: splits apart, one right answer, graders not fooled."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytest.importorskip("reasoning_gym", reason="needs the reasoning extra")

from jaxpt.domains import reasoning
from jaxpt.domains.domain import HELDOUT, TRAIN, Domain
from jaxpt.domains.reasoning import Dataset, Reasoning, grader
from jaxpt.domains.reasoning.grader import grade
from sandbox.local_workers import LocalWorkers
from sandbox.pool import Pool
from sandbox.protocol import Job

SUMS = Dataset(name="chain_sum", settings={"max_terms": 2, "max_digits": 1})
LETTERS = Dataset(name="letter_counting", settings={"min_words": 1, "max_words": 2})
ONE_LINE = {"has_lines": False}
DOMAIN: Domain = Reasoning(datasets=(SUMS, LETTERS), num_examples=1)


def tasks(split, count, domain=DOMAIN, seed=0):
    return [domain.task(split, seed, index) for index in range(count)]


def asked(task):
    return task.messages[-1]["content"]


def test_no_heldout_question_occurs_in_training():
    train = {
        message["content"]
        for seed in (0, 1)
        for task in tasks(TRAIN, 500, seed=seed)
        for message in task.messages
    }
    heldout = {asked(task) for task in tasks(HELDOUT, 500)}
    assert not train & heldout
    # All the space there is of sums, so that nothing is apart by luck.
    assert len(train) > 150 and len(heldout) > 30


def test_examples_come_from_training_in_both_splits():
    for split in (TRAIN, HELDOUT):
        for task in tasks(split, 100):
            system, question, answer, last = task.messages
            assert system["content"] == reasoning.INSTRUCTION
            assert reasoning.split_of(question["content"]) == TRAIN
            assert reasoning.split_of(last["content"]) == split
            assert answer["role"] == "assistant"


def test_spacing_and_case_make_no_other_question():
    for number in range(200):
        text = f"What is {number} + 1?"
        assert reasoning.split_of(text) == reasoning.split_of(f"WHAT is\n{number}  +1?")


def test_tasks_are_the_same_in_every_process():
    code = (
        "from tests.test_reasoning import DOMAIN, tasks;"
        "print([(t.messages, t.payload) for s in ('train', 'heldout')"
        " for t in tasks(s, 5, seed=3)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().decode().strip() == str(
        [(t.messages, t.payload) for s in (TRAIN, HELDOUT) for t in tasks(s, 5, seed=3)]
    )


def test_the_tasks_are_of_all_datasets_by_their_ratios():
    rare = Dataset(name="gcd", ratio=0.25)
    domain = Reasoning(datasets=(SUMS, rare, LETTERS))
    names = [task.payload["dataset"] for task in tasks(TRAIN, 900, domain)]
    assert {name: round(names.count(name) / 100) for name in sorted(set(names))} == {
        "chain_sum": 4,
        "gcd": 1,
        "letter_counting": 4,
    }


@pytest.mark.parametrize(
    ("completion", "correct", "has_format"),
    [
        ("Answer: 12", 1, 1),
        ("answer:  12 \n\n", 1, 1),
        ("5 + 7 is 12.\r\nAnswer: 12\r\n", 1, 1),
        ("Answer: 13", 0, 1),
        ("Answer: 12.", 0, 1),
        ("Answer: 12 or 13", 0, 1),
        ("Answer: 12\nAnswer: 13", 0, 1),
        ("Answer: 12\nI am sure.", 0, 0),
        ("The answer is 12", 0, 0),
        ("My Answer: 12", 0, 0),
        ("Answer:", 0, 0),
        ("Answer:\n12", 0, 0),
        ("12", 0, 0),
        ("", 0, 0),
        ("\n \n", 0, 0),
    ],
)
def test_the_last_line_decides(completion, correct, has_format):
    verdict = grade({"completion.txt": completion.encode()}, ONE_LINE | {"expected": "12"})
    assert verdict["components"] == {"correct": correct, "format": has_format}
    assert verdict["why"]


@pytest.mark.parametrize(
    ("completion", "correct"),
    [
        ("Answer:\n1 2\n3 4", 1),
        ("Answer: 1 2\n3 4\n\n", 1),
        ("Answer: 9\nno,\r\n answer:\r\n1 2\r\n3 4", 1),
        ("The answer: 1 2\n3 4", None),
        ("Answer: 1 2\n3 4\nI am sure.", 0),
        ("1 2\n3 4", None),
        ("Answer:\n \n", None),
    ],
)
def test_an_answer_of_lines_goes_to_the_end(completion, correct):
    payload = {"expected": "1 2\n3 4", "has_lines": True}
    verdict = grade({"completion.txt": completion.encode()}, payload)
    has_format = float(correct is not None)
    assert verdict["components"] == {"correct": correct or 0.0, "format": has_format}


def test_words_are_compared_without_case_and_spacing():
    for given in (b"Answer: law,  Forces", b"ANSWER: LAW, forces"):
        verdict = grade({"completion.txt": given}, ONE_LINE | {"expected": "Law, forces"})
        assert verdict["components"]["correct"] == 1.0


def test_solutions_pass_and_hostile_completions_do_not():
    hostile = {
        "empty": "",
        "none": "None",
        "surrogate": "Answer: \ud800",
        "nul": "Answer: \0",
        "not of bytes alone": "\udcff\udcfe",
        "huge": "Answer: 1" * (1 << 20),
        "many lines": "Answer: 1\n" * (1 << 18) + "end",
        "code": "__import__('os')._exit(0)",
        "verdict": '{"components": {"correct": 1.0, "format": 1.0}, "why": ""}',
    }
    with Pool(LocalWorkers(2)) as pool:
        right, wrong = {}, {}
        for task in [*tasks(TRAIN, 8), *tasks(HELDOUT, 8)]:
            job = DOMAIN.job(task, DOMAIN.solution(task), task.task_id)
            assert Job.from_json(job.to_json()) == job
            right[task.task_id] = pool.submit(job)
        task = tasks(TRAIN, 1)[0]
        for name, completion in hostile.items():
            wrong[name] = pool.submit(DOMAIN.job(task, completion, name))
        for future in right.values():
            result = future.result(timeout=120)
            assert result.verdict["components"] == {"correct": 1.0, "format": 1.0}
        for name, future in wrong.items():
            result = future.result(timeout=120)
            assert result.outcome == "ok", name
            assert result.verdict["components"]["correct"] == 0.0, name


def test_the_end_of_a_huge_completion_is_graded():
    task = tasks(TRAIN, 1)[0]
    job = DOMAIN.job(task, "thought " * (1 << 20) + "\n" + DOMAIN.solution(task), "x")
    assert len(job.artifacts["completion.txt"]) <= 1 << 16
    assert grade(job.artifacts, job.grading.payload)["components"]["correct"] == 1.0


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"name": "chain_some"}, "'chain_some'.*not registered"),
        ({"name": "gcd", "settings": {"max_valeu": 3}}, "max_valeu"),
        ({"name": "gcd", "settings": {"min_value": 0}}, "min_value"),
        ({"name": "gcd", "settings": {"min_value": {1}}}, "settings must be JSON"),
        ({"name": "gcd", "max_question_chars": 0}, "max_question_chars=0"),
        ({"name": "gcd", "max_question_chars": 9}, "most questions are longer"),
    ],
)
def test_datasets_that_there_are_not_are_refused(dataset, message):
    with pytest.raises(ValueError, match=message):
        Reasoning(datasets=(Dataset(**dataset),))


def _no_answer(*made_by):
    return {"question": "Why?", "answer": None}


def _fickle(*made_by, count=iter(range(99))):
    return {"question": f"{next(count)}?", "answer": "yes"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [(_no_answer, "'gcd' answers one of its questions by None"), (_fickle, "same number")],
)
def test_datasets_that_break_their_word_are_refused(monkeypatch, entry, message):
    monkeypatch.setattr(grader, "entry", entry)
    with pytest.raises(ValueError, match=message):
        Reasoning(datasets=(Dataset(name="gcd"),))


def test_too_few_questions_for_two_splits_are_refused():
    domain = Reasoning(
        datasets=(Dataset(name="count_bits", settings={"min_n": 1, "max_n": 1}),)
    )
    with pytest.raises(ValueError, match=r"no question of the .* split in"):
        for split in (TRAIN, HELDOUT):
            domain.task(split, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"datasets": ()}, "datasets is empty"),
        ({"num_examples": -1}, "num_examples=-1"),
        ({"weights": {"right": 1.0}}, "right"),
        ({"pass_component": "tests"}, "pass_component='tests'"),
        ({"name": "a/b"}, "name='a/b'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Reasoning(**{"datasets": (SUMS,), **arguments})


@pytest.mark.parametrize("settings", [{"seed": 1}, {"size": 9}])
def test_tasks_can_not_be_numbered_twice(settings):
    with pytest.raises(ValueError, match="no effect"):
        Dataset(name="gcd", settings=settings)
    with pytest.raises(ValueError, match="ratio=0"):
        Dataset(name="gcd", ratio=0.0)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ValueError, match=r"needs reasoning-gym .*\.\[reasoning\]"
    ) as caught:
        Reasoning(datasets=(Dataset(name="gcd"),))
    assert "\n" not in str(caught.value)


def test_the_package_is_loaded_only_when_the_domain_is_used():
    code = (
        "import sys, jaxpt.domains.reasoning;"
        "print({'jax', 'reasoning_gym'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert out.stdout.strip() == b"set()"
    assert importlib.util.find_spec("reasoning_gym") is not None
