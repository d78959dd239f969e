"""The programming domain: splits apart, solutions right, graders not fooled."""

import itertools
import json
import os
import random
import subprocess
import sys

import pytest

from jaxpt.domains.domain import HELDOUT, TRAIN
from jaxpt.domains.programming import Programming, compose
from jaxpt.domains.programming.catalogue import OPERATIONS
from jaxpt.domains.programming.grader import grade
from jaxpt.domains.programming.slips import Slips
from sandbox.local_workers import LocalWorkers
from sandbox.pool import Pool
from sandbox.protocol import Job

DOMAIN = Programming()
LONG = Programming(max_steps=3)


def tasks(split, count, domain=LONG, seed=0):
    return [domain.task(split, seed, index) for index in range(count)]


def test_no_function_behaves_the_same_in_both_splits():
    chooser = random.Random(0)
    seen = {
        split: {compose.draw(chooser, split, 2, 3)[1] for _ in range(1500)}
        for split in (TRAIN, HELDOUT)
    }
    assert not seen[TRAIN] & seen[HELDOUT]
    assert len(seen[HELDOUT]) > 500


def test_training_never_draws_a_reserved_composition():
    chooser = random.Random(1)
    for split, reserved in ((TRAIN, False), (HELDOUT, True)):
        for _ in range(500):
            program, _ = compose.draw(chooser, split, 2, 3)
            names = [step.operation.name for step in program]
            pairs = [compose.is_reserved(a, b) for a, b in itertools.pairwise(names)]
            assert any(pairs) == reserved


def test_the_space_has_more_than_ten_thousand_functions():
    found = set()
    for program in compose.all_programs(2):
        signature = compose.behaviour(program)
        if compose.split_of(program, signature) == TRAIN and not compose.is_trivial(
            signature
        ):
            found.add(signature)
        if len(found) >= 10_000:
            return
    pytest.fail(f"only {len(found)} different functions")


@pytest.mark.parametrize("name", OPERATIONS)
def test_code_and_meaning_of_every_operation_agree(name):
    operation = OPERATIONS[name]
    chooser = random.Random(name)
    for constants in itertools.islice(itertools.product(*operation.constants), 200):
        program = (compose.Step(operation, constants),)
        space = {}
        exec(Slips().solution(chooser, program), space)
        for index in chooser.sample(range(len(compose.PROBES[operation.takes])), 8):
            want = compose.run(program, compose.probe(operation.takes, index))
            got = space["f"](compose.probe(operation.takes, index))
            assert got == want and type(got) is type(want)
    assert len(operation.phrasings) >= 2 or "if" in name


def test_tasks_are_the_same_in_every_process():
    code = (
        "from jaxpt.domains.programming import Programming as P; import json;"
        "print(json.dumps([P().task(s, 3, i).payload for s in ('train', 'heldout')"
        " for i in range(5)]))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_hidden_tests_are_hidden_and_different():
    for task in tasks("train", 200):
        text = task.messages[0]["content"]
        inputs = task.payload["inputs"]
        assert len(inputs) == len(task.payload["expected"]) == 8
        assert len({repr(x) for x in inputs}) == 8
        assert not any(f"f({x!r})" in text for x in inputs)
        job = DOMAIN.job(task, "", "x")
        assert not any(
            repr(task.payload["expected"]).encode() in content
            for content in job.execution.files.values()
        )


def test_solutions_pass_and_anything_else_does_not():
    always_equal = (
        "class E(int):\n def __eq__(s, o): return True\n def __hash__(s): return 0\n"
        "def f(x): return E(0)\n"
    )
    forged = (
        "open('outputs.json', 'w').write('[' + '{\"value\":0},' * 7 + '{\"value\":0}]')"
    )
    cheats = {
        "empty": "",
        "no function": "x = 1",
        "always equal": always_equal,
        "identity": "def f(x):\n    return x\n",
        "exit": "import os\nos._exit(0)",
        "forged": f"{forged}\nimport os\nos._exit(0)",
        "raise": "def f(x): raise SystemExit(0)",
        "frames": (
            "import sys\ndef f(x):\n    frame = sys._getframe()\n"
            "    while frame:\n        if 'expected' in frame.f_locals:\n"
            "            return frame.f_locals['expected']\n        frame = frame.f_back\n"
        ),
        "surrogate": "def f(x): return '\ud800'",
        "nul": "def f(x):\n    return x\0",
        "bytes": "def f(x): return b'x'",
        "longer than the workspace": "#" * (8 << 20),
        "huge": "def f(x): return [0] * 10**5",
    }
    with Pool(LocalWorkers(2)) as pool:
        futures = {}
        for task in [*tasks("train", 12), *tasks("heldout", 12)]:
            name = task.task_id
            job = LONG.job(task, LONG.solution(task), f"solution/{name}")
            assert Job.from_json(job.to_json()) == job
            futures[job.job_id] = pool.submit(job)
        task = tasks("train", 1)[0]
        for name, code in cheats.items():
            futures[name] = pool.submit(DOMAIN.job(task, code, name))
        for name, future in futures.items():
            result = future.result(timeout=120)
            if name.startswith("solution/"):
                assert result.verdict["components"] == {"tests": 1.0, "fraction": 1.0}
            elif result.verdict is not None:
                assert result.verdict["components"]["tests"] == 0.0, name
                assert result.verdict["why"]
            else:
                assert result.outcome == "policy_fail", name


def test_slips_are_made_as_often_as_asked_and_leave_the_tasks_alone():
    count = 400
    slips = Slips(prints=0.5, misnames=0.2)
    right, wrong = (
        tasks("train", count, domain)
        for domain in (Programming(max_steps=2), Programming(max_steps=2, slips=slips))
    )
    made = dict.fromkeys(("prints", "misnames"), 0)
    for good, bad in zip(right, wrong):
        assert good.messages == bad.messages
        assert good.payload["expected"] == bad.payload["expected"]
        solution = bad.payload["solution"]
        made["prints"] += "print(x)" in solution
        made["misnames"] += "def f(x):" not in solution
        mended = solution.replace("print(x)", "return x").replace("def solve", "def f")
        assert mended == good.payload["solution"]
    for name, seen in made.items():
        assert abs(seen / count - getattr(slips, name)) < 0.08, (name, seen)
    with pytest.raises(ValueError, match=r"Slips\.misnames=1\.5"):
        Slips(misnames=1.5)


@pytest.mark.parametrize(
    ("outputs", "passed"),
    [
        ([{"value": 1}, {"value": [1, "a"]}], 2),
        ([{"value": True}, {"value": [1, "a"]}], 1),
        ([{"value": 1.0}, {"value": [True, "a"]}], 0),
        ([{"error": "no"}, {"value": [1, "a"]}], 1),
        ([{"value": 1}], 0),
        ({"value": 1}, 0),
        ([1, 2], 0),
    ],
)
def test_the_grader_is_strict_about_types(outputs, passed):
    payload = {"inputs": [0, 1], "expected": [1, [1, "a"]]}
    verdict = grade({"outputs.json": json.dumps(outputs).encode()}, payload)
    assert verdict["components"] == {
        "tests": float(passed == 2),
        "fraction": passed / 2,
    }


def test_the_grader_reads_only_json():
    payload = {"inputs": [0], "expected": [0]}
    assert grade({"outputs.json": b"__import__('os')"}, payload)["components"] == {
        "tests": 0.0,
        "fraction": 0.0,
    }


@pytest.mark.parametrize("steps", [(1, 2), (3, 2), (2, 9)])
def test_impossible_lengths_are_refused(steps):
    with pytest.raises(ValueError, match=f"min_steps={steps[0]}"):
        Programming(min_steps=steps[0], max_steps=steps[1])


def test_the_domain_loads_no_jax():
    code = "import sys, jaxpt.domains.programming; print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert out.stdout.strip() == b"False"
