"""Every generator of reasoning-gym: the same tasks everywhere, right answers and levels."""

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("reasoning_gym", reason="needs the reasoning extra")

from jaxpt import configure
from jaxpt.data.mixture import Mixture
from jaxpt.domains import reasoning
from jaxpt.domains.domain import HELDOUT, SPLITS, TRAIN
from jaxpt.domains.programming import Programming
from jaxpt.domains.reasoning import Dataset, Reasoning, generators, grader
from sandbox.backends.backend import SandboxUnavailable
from sandbox.backends.local.backend import LocalBackend
from sandbox.local_workers import LocalWorkers
from sandbox.pool import Pool
from sandbox.protocol import Execution, Job

# Stands for a grader's sandbox: another process, another seed of hashes, no package on
# the path; the last tasks first.
GRADER = """
import json, sys
namespace = {"__name__": "grader"}
for line in sys.stdin:
    program, text, payload = json.loads(line)
    if "grade" not in namespace:
        exec(compile(program, "grader.py", "exec"), namespace)
    print(json.dumps(namespace["grade"]({"completion.txt": text.encode()}, payload)))
"""


def graded(jobs, *, replace=("", "")):
    """The verdicts on these jobs, by their own program in a process of its own."""
    lines = [
        json.dumps(
            [
                job.grading.program.replace(*replace),
                job.artifacts["completion.txt"].decode(),
                job.grading.payload,
            ]
        )
        for job in jobs
    ]
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", GRADER],
        input="\n".join(reversed(lines)),
        env=os.environ | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    verdicts = [json.loads(line) for line in ran.stdout.splitlines() if line[0] == "{"]
    assert len(verdicts) == len(jobs)
    return verdicts[::-1]


def domain(name):
    return Reasoning(datasets=(Dataset(name=name),), name=name)


@pytest.fixture(scope="module")
def everything():
    return generators.every_generator()


def ends(made):
    """The easiest level and the hardest."""
    return sorted({0, made.levels - 1})


def test_all_are_there_but_those_left_out_by_name(everything):
    names = generators.generator_names()
    assert {made.name for made in everything} == set(names) - set(generators.LEFT_OUT)
    assert len(everything) > 90
    Mixture(domains=everything).task(split=TRAIN, seed=0, index=0)


def test_right_answers_score_1_and_wrong_ones_less_in_another_process(everything, tmp_path):
    broken_out = tmp_path / "broken_out"
    wrong = ("banana", "nan", f"__import__('pathlib').Path({str(broken_out)!r}).touch()")
    right, others = [], []
    for made in everything:
        for level in ends(made):
            task = made.task(TRAIN, 0, 1, level)
            right.append(made.job(task, made.solution(task), task.task_id))
            assert Job.from_json(right[-1].to_json()) == right[-1]
        others += [made.job(task, f"Answer: {answer}", answer) for answer in wrong]
    jobs = right + others
    with ThreadPoolExecutor() as threads:  # two processes, for as many cores
        even, odd = threads.map(graded, (jobs[::2], jobs[1::2]))
    verdicts = [
        verdict for pair in itertools.zip_longest(even, odd) for verdict in pair if verdict
    ]
    for job, verdict in zip(right, verdicts):
        assert verdict["components"] == {"correct": 1.0, "format": 1.0}, (job, verdict)
    for job, verdict in zip(others, verdicts[len(right) :]):
        assert verdict["components"]["correct"] < 0.7, (job, verdict)
        assert verdict["components"]["format"] == 1.0
    assert not broken_out.exists()


def test_levels_are_other_tasks_of_other_configurations(everything):
    for made in everything:
        (dataset,) = made.datasets
        assert made.levels == len(dataset.levels) <= 6
        configurations = [
            repr(grader.configuration(made.name, "{}", level, dataset.size))
            for level in dataset.levels
        ]
        assert len(set(configurations)) == made.levels, made.name
        tasks = [made.task(TRAIN, 0, 0, level) for level in ends(made)]
        assert len({task.task_id for task in tasks}) == len(tasks)
        assert len({task.messages[-1]["content"] for task in tasks}) == len(tasks)
    by_name = {made.name: made for made in everything}
    assert by_name["gcd"].task(TRAIN, 3, 5, 2).task_id == "gcd/train/3/5@2"
    assert by_name["acre"].task(TRAIN, 3, 5).task_id == "acre/train/3/5"


def test_train_and_heldout_questions_differ(everything):
    for made in everything:
        for split in SPLITS:
            asked = made.task(split, 0, 0).messages[-1]["content"]
            assert reasoning.split_of(asked) == split, made.name


def test_levels_that_there_are_not_are_refused():
    settled = Reasoning(datasets=(Dataset(name="gcd", settings={"max_numbers": 3}),))
    for made in (settled, Programming()):
        assert made.levels == 1
        assert "@" not in made.task(TRAIN, 0, 0, level=0).task_id
        with pytest.raises(ValueError, match="level=1 must be below the 1 "):
            made.task(TRAIN, 0, 0, level=1)
    with pytest.raises(ValueError, match="level=-1"):
        domain("gcd").task(TRAIN, 0, 0, level=-1)


def test_a_domain_has_the_levels_of_its_longest_dataset():
    made = Reasoning(datasets=(Dataset(name="gcd"), Dataset(name="color_cube_rotation")))
    assert [len(dataset.levels) for dataset in made.datasets] == [4, 4]
    bounded = Dataset(name="color_cube_rotation", max_question_chars=500)
    made = Reasoning(datasets=(Dataset(name="gcd"), bounded))
    assert made.levels == 4 > len(bounded.levels)
    for index in range(20):
        for message in made.task(HELDOUT, 0, index, level=3).messages:
            assert len(message["content"]) <= 500


def test_what_is_left_out_is_logged_in_one_line(caplog):
    caplog.set_level("INFO")
    exclude = [name for name in generators.generator_names() if name > "arc_agi"]
    made = generators.every_generator(max_question_chars=600, exclude=exclude)
    assert [each.name for each in made] == ["ab", "advanced_geometry", "aiw", "arc_1d"]
    (record,) = caplog.records
    assert "acre, arc_agi: at every level most questions are longer" in record.message
    with pytest.raises(ValueError, match=r"exclude names \['nonsense'\]"):
        generators.every_generator(exclude=("nonsense",))


@pytest.mark.parametrize(
    ("text", "sums_only"),
    [
        ("x.__class__", False),
        ("().x", False),
        ("exec(chr(120))", False),
        ("Integral(x**2, x)", False),
        ("expand((x + 1)*(x + 2))", False),
        ("f(x)", False),
        ("lambda: x", False),
        ("'x'", False),
        ("x if x else x", False),
        ("2**3", True),
        ("0x18", True),
        ("1_0 + 2", True),
        ("x", True),
        ("1.5", True),
    ],
)
def test_only_arithmetic_is_evaluated(text, sums_only):
    grader._check_expression("2*(3 + 4) - 5/1", sums_only)
    grader._check_expression("3*X**2.5/2 - log(x + 1)*sin(pi*x) + C", False)
    with pytest.raises((ValueError, SyntaxError)):
        grader._check_expression(text, sums_only)


def test_rules_can_not_be_cheated_or_kept_busy():
    puzzle, sums, integral = map(domain, ("puzzle24", "countdown", "simple_integration"))
    tasks = {made.name: made.task(TRAIN, 0, 0) for made in (puzzle, sums, integral)}
    made_by = tasks[integral.name].payload["rule"]
    made_by = [made_by[key] for key in ("dataset", "settings", "level", "size", "number")]
    known = grader.entry(*made_by)["metadata"]
    cases = []
    for made, answer in (
        (puzzle, "(4 + 4 + 4)*2"),  # would be right whatever the question
        (sums, tasks[sums.name].payload["expected"] + " + 0x0"),
        (integral, f"Integral({known['integrand']}, {known['variable']})"),
        (integral, "9**9**9**9"),
    ):
        cases.append(made.job(tasks[made.name], f"Answer: {answer}", "x"))
    verdicts = graded(cases, replace=("CHECKED_SECONDS = 5", "CHECKED_SECONDS = 1"))
    for verdict in verdicts:
        assert verdict["components"]["correct"] < 0.1, verdict
    assert "other numbers" in verdicts[0]["why"]
    assert "1 s were not enough" in verdicts[3]["why"]


def test_another_package_than_the_tasks_is_no_verdict():
    made = domain("countdown")
    payload = dict(made.job(made.task(TRAIN, 0, 0), "Answer: 1", "x").grading.payload)
    payload["rule"] = payload["rule"] | {"number": payload["rule"]["number"] + 1}
    with pytest.raises(RuntimeError, match="asks another question here"):
        grader.grade({"completion.txt": b"Answer: 1"}, payload)


def test_rules_judge_in_sandboxes_that_are_shown_the_packages():
    if reasoning.site_packages().startswith(("/tmp/", "/dev/")):
        pytest.skip("sandboxes have a /tmp of their own, which hides the packages")
    names = ("countdown", "graph_color", "sudoku", "string_insertion", "time_intervals")
    domains = [domain(name) for name in names]
    write = "open('x', 'w'); open(__import__('sys').argv[1] + '/x', 'w')"
    with Pool(LocalWorkers(2, options=reasoning.shown())) as pool:
        futures = []
        for made in domains:
            task = made.task(TRAIN, 0, 0, made.levels - 1)
            job = made.job(task, made.solution(task), made.name)
            futures.append(pool.submit(job))
        command = ("python", "-c", write, reasoning.site_packages())
        execution = Execution(command=command, files={})
        job = Job(job_id="x", domain="x", execution=execution, grading=job.grading)
        futures.append(pool.submit(job))
        *results, agent = [future.result(timeout=200) for future in futures]
        for result in results:
            assert result.outcome == "ok", result
            assert result.verdict["components"] == {"correct": 1.0, "format": 1.0}
        assert agent.outcome == "policy_fail"
        assert b"Read-only file system" in agent.stderr.tail + agent.stderr.head
    # One that is shown nothing says what is missing, and is no reward of 0.
    with Pool(LocalWorkers(1), max_attempts=1) as pool:
        result = pool.submit(domains[0].job(task, "Answer: 1", "y")).result(timeout=200)
        assert result.outcome == "grader_fail" and "shown" in result.stderr.text()


@pytest.mark.parametrize("shown", ["", "relative", "/", "/etc", "/tmp", "/nowhere"])
def test_folders_that_can_not_be_shown_are_refused(shown):
    with pytest.raises(SandboxUnavailable, match="shown: "):
        LocalBackend(0, shown=[shown])


def _root(domains, make_pool, workers):
    return [made.name for made in domains], workers


def test_gin_makes_the_domains_and_shows_the_packages(tmp_path):
    file = tmp_path / "run.gin"
    kept = ("basic_arithmetic", "gcd", "lcm")
    others = [name for name in generators.generator_names() if name not in kept]
    file.write_text(
        f"""
from __gin__ import dynamic_registration
from jaxpt.domains import reasoning
from jaxpt.domains.reasoning import generators
from sandbox import local_workers
from tests import test_generators

test_generators._root.make_pool = None
test_generators._root.domains = @generators.every_generator()
test_generators._root.workers = @reasoning.shown()
generators.every_generator.max_question_chars = 100
generators.every_generator.exclude = {others}
"""
    )
    names, workers = configure.parse(_root, [file])()
    assert names == ["basic_arithmetic", "lcm"]
    assert workers == reasoning.shown()
