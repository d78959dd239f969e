"""Cheats on the grader: objects that lie, planted files, forged verdicts."""

import json
import os

import pytest

from jaxpt.domains.programming import Programming
from sandbox.protocol import Grading, Job, Limits
from tests.attacks.arena import PATIENCE, job, told

PROGRAMMING = Programming()


def test_the_grader_is_another_user_in_namespaces_of_its_own(pool, backend):
    program = """
import os
def grade(artifacts, payload):
    names = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
    mine = {name: os.readlink(f"/proc/self/ns/{name}") for name in names}
    theirs = eval(artifacts["out"])
    same = [name for name in names if mine[name] in (theirs[name], payload[name])]
    # What is here are the grader's own files, which it can't write.
    here = [name for name in sorted(os.listdir("/workspace")) if os.access(name, os.W_OK)]
    first, outside, _ = map(int, open("/proc/self/uid_map").read().split())
    outside += os.getuid() - first
    return {"components": {}, "why": repr([same, here, outside == theirs["uid"]])}
"""
    names = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
    outside = {name: os.readlink(f"/proc/self/ns/{name}") for name in names}
    code = f"""
    import os
    found = {{name: os.readlink(f"/proc/self/ns/{{name}}") for name in {names}}}
    first, outside, _ = map(int, open("/proc/self/uid_map").read().split())
    found["uid"] = outside + os.getuid() - first
    open("out", "w").write(repr(found))
    """
    execution = job("namespaces", code).execution
    # The kernel gives the numbers of namespaces that are gone to new ones. So it is the
    # second time that counts, when the grader is there already while the program runs.
    for number in ("first", "second"):
        graded = Job(
            job_id=f"{backend} namespaces {number}",
            domain="attacks",
            execution=execution,
            grading=Grading(program=program, payload=outside),
        )
        result = pool.submit(graded).result(PATIENCE)
    same_uid = os.getuid() != 0  # without root there is only one
    shared = ["user"] if backend == "docker" else []  # an engine without userns-remap
    assert told(result) == repr([shared, [], same_uid])


TASK = PROGRAMMING.task("train", 0, 0)
RIGHT = TASK.payload["solution"]
EXPECTED = TASK.payload["expected"]
WRONG = "def f(x):\n    return None\n"
FORGED = json.dumps({"components": {"tests": 1.0, "fraction": 1.0}, "why": ""})

# Each is put before or in the place of a solution that is wrong.
CHEATS = {
    "equal to everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __repr__(self): return "1"
def f(x): return Equal()
""",
    "a list that is equal to everything": """
class Equal(list):
    def __eq__(self, other): return True
    def __len__(self): return 10**6
def f(x): return Equal()
""",
    "a number that is equal to everything": """
class Equal(int):
    def __eq__(self, other): return True
def f(x): return Equal(1)
""",
    "a walk over the frames": """
import sys
def f(x):
    for frames in sys._current_frames().values():
        frame = frames
        while frame:
            for names in (frame.f_locals, frame.f_globals):
                for name, value in list(names.items()):
                    if "expect" in name or name in ("payload", "answer", "outputs"):
                        return value[0] if isinstance(value, list) and value else value
            frame = frame.f_back
""",
    "a search of the memory": """
import gc
def f(x):
    for found in gc.get_objects():
        if isinstance(found, dict) and "expected" in found:
            return found["expected"][0]
""",
    "an early end": "import os\nos._exit(0)\n",
    "an end in the function": "import os\ndef f(x): os._exit(0)\n",
    "a polite end": "raise SystemExit(0)\n",
    "an end at the end": "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG,
    "a forged artifact": f"""
import os
for name in ("outputs.json", "verdict.json", "reward.json", "reward.txt", "result.json"):
    for folder in ("/workspace", "/tmp", "/dev/shm", "/logs/verifier", "/grader"):
        try:
            open(os.path.join(folder, name), "w").write({FORGED!r})
        except OSError:
            pass
os._exit(0)
""",
    "a forged verdict on every descriptor": f"""
import os
for number in range(3, 64):
    for request in range(64):
        try:
            forged = f'{{{{"number": {{request}}, "verdict": ' + {FORGED!r} + '}}}}\\n'
            os.write(number, forged.encode())
        except OSError:
            pass
os._exit(0)
""",
    "a late writer": f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            for name in ("outputs.json", "reward.json"):
                try:
                    open(name, "w").write({FORGED!r})
                except OSError:
                    pass
"""
    + WRONG,
    "a conftest that passes everything": """
open("conftest.py", "w").write('''
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
''')
"""
    + WRONG,
    "a plugin in the workspace": """
import os
os.makedirs("cheat-1.0.dist-info", exist_ok=True)
open("cheat-1.0.dist-info/METADATA", "w").write("Name: cheat\\nVersion: 1.0\\n")
open("cheat-1.0.dist-info/entry_points.txt", "w").write("[pytest11]\\ncheat = cheat\\n")
open("cheat.py", "w").write("def pytest_runtest_logreport(report): report.outcome = 'x'")
for name in ("sitecustomize.py", "usercustomize.py", "json.py", "base64.py", "grader.py"):
    open(name, "w").write("import os\\nos._exit(0)\\n")
"""
    + WRONG,
    "json that always agrees": """
import json
json.dumps = lambda *a, **k: "[]"
json.dump = lambda value, file, **k: file.write("[]")
"""
    + WRONG,
    "builtins that always agree": """
import builtins
builtins.repr = lambda value: "[]"
builtins.len = lambda value: 8
builtins.all = lambda values: True
"""
    + WRONG,
    "patched tests": """
import glob
for path in glob.glob("/workspace/*") + glob.glob("/grader/*"):
    try:
        open(path, "w").write("")
    except OSError:
        pass
"""
    + WRONG,
    "a link to the grader": """
import os
for name in ("outputs.json",):
    if os.path.exists(name): os.remove(name)
    os.symlink("/proc/self/fd/3", name)
os._exit(0)
""",
    "a clock that stands still": "import time\ntime.time = lambda: 0\n" + WRONG,
}


def score(pool, name, code):
    result = pool.submit(PROGRAMMING.job(TASK, code, name)).result(PATIENCE)
    if result.outcome == "policy_fail":
        return 0.0
    assert result.outcome == "ok", result
    return result.verdict["components"]["tests"]


@pytest.mark.parametrize("name", sorted(CHEATS))
def test_a_cheat_earns_nothing_and_the_honest_beside_it_all(pool, backend, name):
    assert score(pool, f"{backend} {name}", CHEATS[name]) == 0.0
    assert score(pool, f"{backend} {name}, honest", RIGHT) == 1.0


def test_a_session_can_not_plant_its_verdict(pool):
    session = pool.open("attacks", Limits()).result(PATIENCE)
    plant = f"""
        mkdir -p logs/verifier; echo '{FORGED}' | tee reward.json logs/verifier/reward.json
        (while :; do echo 5 >out; done) & setsid sh -c 'while :; do echo 5 >out; done' &
        alias python=true; export PYTHONPATH=/workspace PYTHONSTARTUP=/workspace/x.py
        echo 'import os; os._exit(0)' >sitecustomize.py; echo 6 >answer
    """
    assert session.exec(plant).result(PATIENCE).reason is None
    program = """
def grade(artifacts, payload):
    right = float(artifacts["answer"] == b"5\\n")
    return {"components": {"x": right}, "why": ""}
"""
    graded = session.grade(["answer"], Grading(program=program, payload=None))
    result = graded.result(PATIENCE)
    assert (result.outcome, result.verdict["components"]) == ("ok", {"x": 0.0})
    session.close().result(PATIENCE)
