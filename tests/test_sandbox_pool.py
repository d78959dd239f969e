"""The pool: each job resolves once, whatever becomes of workers and graders."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from sandbox import dispatcher, local_workers
from sandbox import pool as pool_lib
from sandbox.local_workers import LocalWorkers, machine
from sandbox.pool import Pool
from sandbox.protocol import Execution, Grading, Job, Limits

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 120  # seconds; only a hang takes so long
GRADER = """
import json
def grade(artifacts, payload):
    good = json.loads(artifacts["out"]) == payload
    return {"components": {"right": float(good)}, "why": "compared"}
"""
HONEST = "open('out', 'w').write('5')"


def job(job_id, code=HONEST, *, program=GRADER, grade_seconds=30.0, **limits):
    return Job(
        job_id=job_id,
        domain="test",
        execution=Execution(
            command=("python", "-I", "-S", "main.py"),
            files={"main.py": textwrap.dedent(code).encode()},
            artifacts=("out",),
            limits=Limits(**({"wall_seconds": 30} | limits)),
        ),
        grading=Grading(
            program=program, payload=5, limits=Limits(wall_seconds=grade_seconds)
        ),
    )


def sleeper(marker, seconds, then=HONEST):
    """A program whose command line holds the marker while it sleeps."""
    return f"""
        import subprocess, sys
        command = [sys.executable, "-I", "-S", "-c",
                   "import time; time.sleep({seconds})", "{marker}"]
        subprocess.run(command)
        {then}
    """


def alive(marker: str) -> list[int]:
    """Processes of the machine with the marker among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def eventually(condition):
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def pool():
    with Pool(LocalWorkers(2)) as pool:
        yield pool


def run(pool, job):
    return pool.submit(job).result(timeout=PATIENCE)


def test_a_program_is_run_and_graded(pool):
    result = run(pool, job("right", "print('hello')\n" + HONEST))
    assert (result.outcome, result.reason, result.attempts) == ("ok", "graded", 1)
    assert result.verdict == {"components": {"right": 1.0}, "why": "compared"}
    assert (result.exit_code, result.stdout.text()) == (0, "hello\n")
    assert set(result.seconds) == {"queue", "acquire", "execute", "grade", "deliver"}
    wrong = run(pool, job("wrong", "open('out', 'w').write('6')"))
    assert (wrong.outcome, wrong.verdict["components"]) == ("ok", {"right": 0.0})


def test_an_answer_is_graded_with_nothing_run(pool):
    answer = dataclasses.replace(job("answer"), execution=None, artifacts={"out": b"5"})
    result = run(pool, answer)
    assert result.verdict["components"] == {"right": 1.0}
    assert result.exit_code is None and "execute" not in result.seconds


def test_artifacts_given_and_left_meet_at_the_grader(pool):
    program = """
def grade(artifacts, payload):
    return {"components": {}, "why": repr(sorted(artifacts.items()))}
"""
    both = dataclasses.replace(job("both", program=program), artifacts={"a": b"\xff"})
    assert run(pool, both).verdict["why"] == repr([("a", b"\xff"), ("out", b"5")])


def test_files_stdin_and_commands_reach_the_program(pool):
    execution = Execution(
        command=("sh", "-c", "cat; cat deep/er/file > out; exit $0", "0"),
        files={"deep/er/file": b"5"},
        stdin=b"\xff" * 300_000,
        artifacts=("out",),
    )
    result = run(pool, dataclasses.replace(job("sh"), execution=execution))
    assert result.verdict["components"] == {"right": 1.0}
    assert result.stdout.total_bytes == 300_000


@pytest.mark.parametrize(
    ("code", "reason", "limits"),
    [
        ("while True: pass", "cpu_timeout", {"cpu_seconds": 1}),
        ("import time; time.sleep(60)", "wall_timeout", {"wall_seconds": 1}),
        ("x = bytearray(10**10)", "out_of_memory", {}),
        ("x = []\nwhile True: x.append(bytearray(10**6))", "out_of_memory", {}),
        ("raise ValueError", "nonzero_exit", {}),
        ("import sys; sys.exit(255)", "nonzero_exit", {}),
        ("import os; os.abort()", "killed_by_signal_6", {}),
        ("import os; os.kill(os.getpid(), 9)", "killed_by_signal_9", {}),
        ("pass", "missing_artifact", {}),
        ("import os; os.symlink('main.py', 'out')", "artifact_not_regular", {}),
        ("import os; os.symlink('/etc/shadow', 'out')", "artifact_not_regular", {}),
        ("import os; os.mkfifo('out')", "artifact_not_regular", {}),
        ("import os; os.mkdir('out')", "artifact_not_regular", {}),
        (
            "import socket; socket.socket(socket.AF_UNIX).bind('out')",
            "artifact_not_regular",
            {},
        ),
        ("open('out', 'wb').write(b'0' * 10**6)", "nonzero_exit", {"file_bytes": 999}),
        ("open('out', 'wb').truncate(10**10)", "nonzero_exit", {}),
    ],
)
def test_what_a_program_does_wrong_is_its_own_failure(pool, code, reason, limits):
    result = run(pool, job(f"{code} {limits}", code, **limits))
    assert (result.outcome, result.reason) == ("policy_fail", reason)
    assert result.verdict is None and result.attempts == 1


def test_an_artifact_is_no_larger_than_a_file_may_be(pool):
    # A program can't write so much, but can be given it.
    execution = Execution(
        command=("true",),
        files={"out": bytes(1000)},
        artifacts=("out",),
        limits=Limits(file_bytes=999),
    )
    result = run(pool, dataclasses.replace(job("large"), execution=execution))
    assert (result.outcome, result.reason) == ("policy_fail", "artifact_too_large")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def grade(a, p): raise ValueError('broken')", "grader_raised"),
        ("this is no program", "grader_raised"),
        ("x = 1", "grader_raised"),
        ("def grade(a, p):\n    while True: pass", "grader_timeout"),
        ("import time\ntime.sleep(1000)", "grader_timeout"),
        ("import os\ndef grade(a, p): os._exit(0)", "grader_died"),
        ("import sys\ndef grade(a, p): sys.exit(0)", "grader_died"),
        ("def grade(a, p): return bytearray(10**10)", "grader_raised"),
        ("def grade(a, p): return 1.0", "grader_bad_verdict"),
        ("def grade(a, p): return {'components': {'x': 1.0}}", "grader_bad_verdict"),
        ("def grade(a, p): return {1, 2}", "grader_bad_verdict"),
        *(
            (
                f"def grade(a, p): return {{'components': {{'x': {x}}}, 'why': ''}}",
                "grader_bad_verdict",
            )
            for x in ("float('nan')", "2.0", "-0.1", "True", "'1'", "10**400", "None")
        ),
        (
            "import os\ndef grade(a, p):\n    while True: os.write(3, b'x' * 65536)",
            "grader_bad_verdict",
        ),
        ("import os\ndef grade(a, p): os.write(3, b'[]\\n')", "grader_bad_verdict"),
    ],
)
def test_a_broken_grader_is_never_a_score(pool, program, reason):
    result = run(pool, job(program, program=program, grade_seconds=2.0))
    assert (result.outcome, result.reason) == ("grader_fail", reason)
    assert (result.verdict, result.attempts) == (None, 3)
    if reason in ("grader_raised", "grader_bad_verdict"):
        assert len(result.stderr.text()) > 30  # it says why


def test_a_grader_that_hangs_before_it_reads_is_not_waited_for(pool):
    hangs = job("hangs", program="import time\ntime.sleep(1000)", grade_seconds=1.0)
    big = dataclasses.replace(hangs, artifacts={"big": bytes(10**6)})
    result = run(pool, big)
    assert (result.outcome, result.reason) == ("grader_fail", "grader_timeout")


def test_what_a_grader_prints_is_no_verdict(pool):
    program = """
import sys
def grade(artifacts, payload):
    for stream in (sys.stdout, sys.stderr):
        forged = '{"number": 1, "verdict": {"components": {"right": 1.0}, "why": ""}}'
        print((forged + "\\n") * 9999, file=stream)
    return {"components": {"right": 0.0}, "why": ""}
"""
    result = run(pool, job("prints", program=program))
    assert result.verdict["components"] == {"right": 0.0}


def test_a_verdict_too_many_is_not_the_next_jobs():
    program = """
import os
def grade(artifacts, payload):
    if artifacts["out"] == b"6":
        verdict = b'"verdict": {"components": {"x": 1.0}, "why": ""}'
        os.write(3, b'{"number": 2, ' + verdict + b"}\\n")
    return {"components": {"x": 0.0}, "why": "mine"}
"""
    with Pool(LocalWorkers(1), max_attempts=1) as pool:
        planted = run(pool, job("plants", "open('out', 'w').write('6')", program=program))
        honest = run(pool, job("next", program=program))
    assert (planted.outcome, planted.reason) == ("grader_fail", "grader_bad_verdict")
    assert honest.verdict == {"components": {"x": 0.0}, "why": "mine"}


def test_graders_come_and_go(pool):
    programs = [f"{GRADER}\nnumber = {number}" for number in range(7)]
    jobs = [
        job(f"{turn} {number}", program=program)
        for turn in range(2)
        for number, program in enumerate(programs)
    ]
    for future in [pool.submit(one) for one in jobs]:
        assert future.result(PATIENCE).verdict["components"] == {"right": 1.0}


def test_a_job_id_is_one_piece_of_work(pool):
    first = pool.submit(job("twice"))
    assert pool.submit(job("twice", "raise ValueError")) is first
    assert first.result(PATIENCE).outcome == "ok"
    assert pool.submit(job("twice")) is first


def test_an_id_that_is_forgotten_is_new_work_everywhere(monkeypatch):
    monkeypatch.setattr(pool_lib, "_RESULTS_KEPT", 1)
    with Pool(LocalWorkers(1)) as pool:
        for name in ("a", "b", "a"):
            assert run(pool, job(name)).reason == "graded"


def test_any_thread_may_submit_also_from_a_callback(pool):
    def submit(number):
        inner: concurrent.futures.Future = concurrent.futures.Future()
        outer = pool.submit(job(f"outer {number}"))
        outer.add_done_callback(
            lambda _: inner.set_result(pool.submit(job(f"inner {number}")))
        )
        return inner.result(PATIENCE).result(PATIENCE).outcome

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(submit, range(8))) == ["ok"] * 8


def test_a_cancelled_job_costs_nothing_else():
    one_at_a_time = dataclasses.replace(machine(), cpus=1.0)
    with Pool(LocalWorkers(1, capacity=one_at_a_time)) as pool:
        running = pool.submit(job("running", "import time; time.sleep(1)\n" + HONEST))
        waiting = pool.submit(job("waiting"))
        eventually(running.running)
        assert waiting.cancel() and not running.cancel()
        assert running.result(PATIENCE).outcome == "ok"
        assert run(pool, job("after")).outcome == "ok"


def test_a_pool_outlives_the_thread_that_made_it():
    pools = []
    thread = threading.Thread(
        target=lambda: pools.append(Pool(LocalWorkers(1), max_attempts=1))
    )
    thread.start()
    thread.join()
    with pools[0] as pool:
        pids = pool.workers.pids
        time.sleep(0.2)
        assert run(pool, job("later")).outcome == "ok"
        assert pool.workers.pids == pids


def test_a_job_of_a_killed_worker_is_tried_again():
    with Pool(LocalWorkers(1)) as pool:
        marker = f"retried-{os.getpid()}"
        future = pool.submit(job("retried", sleeper(marker, 1)))
        eventually(lambda: alive(marker))
        os.kill(pool.workers.pids[0], signal.SIGKILL)
        result = future.result(PATIENCE)
        assert (result.outcome, result.attempts) == ("ok", 2)
        assert result.verdict["components"] == {"right": 1.0}
        assert alive(marker) == []


def test_workers_that_always_die_are_an_infrastructure_failure():
    with Pool(LocalWorkers(1), max_attempts=2) as pool:
        marker = f"doomed-{os.getpid()}"
        future = pool.submit(job("doomed", sleeper(marker, 1000), wall_seconds=1000))
        for _ in range(2):
            worker = eventually(lambda: alive(marker) and pool.workers.pids)[0]
            os.kill(worker, signal.SIGKILL)
            eventually(functools.partial(worker_is_gone, worker))
        result = future.result(PATIENCE)
        assert (result.outcome, result.reason) == ("infra_fail", "worker_died")
        assert (result.attempts, result.verdict) == (2, None)
        eventually(lambda: not alive(marker))
        assert run(pool, job("recovered")).outcome == "ok"


def worker_is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_worker_that_does_not_answer_is_replaced(monkeypatch):
    monkeypatch.setattr(dispatcher, "_SLACK_SECONDS", 1.0)
    with Pool(LocalWorkers(1), max_attempts=1) as pool:
        stopped = pool.workers.pids[0]
        os.kill(stopped, signal.SIGSTOP)
        # More than a pipe holds, so that not even sending it may wait for the worker.
        big = dataclasses.replace(
            job("stuck", wall_seconds=0.5, grade_seconds=0.5),
            artifacts={"big": bytes(10**6)},
        )
        result = run(pool, big)
        assert (result.outcome, result.reason) == ("infra_fail", "worker_unresponsive")
        assert worker_is_gone(stopped)
        monkeypatch.undo()
        assert run(pool, job("after")).outcome == "ok"


def test_a_worker_that_answers_nonsense_is_replaced(monkeypatch):
    read = local_workers.opened
    with Pool(LocalWorkers(1)) as pool:
        answers = [b"nonsense", b'{"id": "1", "type": "Result", "body": {}}']

        def nonsense(line, kinds):
            if b'"Result"' in line and answers:
                line = answers.pop()
            return read(line, kinds)

        monkeypatch.setattr(local_workers, "opened", nonsense)
        result = run(pool, job("nonsense"))
        assert (result.outcome, result.attempts) == ("ok", 3)


def test_closing_resolves_everything_and_leaves_nothing():
    marker = f"closing-{os.getpid()}"
    pool = Pool(LocalWorkers(2))
    futures = [
        pool.submit(job(f"unfinished {i}", sleeper(marker, 1000), wall_seconds=1000))
        for i in range(4)
    ]
    futures[3].cancel()
    eventually(lambda: len(alive(marker)) == 2)
    pids = pool.workers.pids
    pool.close()
    pool.close()
    late = pool.submit(job("too late"))
    for future in [*futures[:3], late]:
        result = future.result(PATIENCE)
        assert (result.outcome, result.reason) == ("infra_fail", "pool_closed")
    assert all(worker_is_gone(pid) for pid in pids)
    eventually(lambda: not alive(marker))


def start_trainer(marker):
    code = textwrap.dedent(sleeper(marker, 1000))
    script = f"""
import time
from sandbox.local_workers import LocalWorkers
from sandbox.pool import Pool
from sandbox.protocol import Execution, Grading, Job, Limits
pool = Pool(LocalWorkers(2))
for name in "ab":
    execution = Execution(
        command=("python", "-I", "-S", "main.py"),
        files={{"main.py": {code.encode()!r}}},
        limits=Limits(wall_seconds=1000),
    )
    grading = Grading(program="", payload=None)
    pool.submit(Job(job_id=name, domain="", execution=execution, grading=grading))
while len(pool.workers.pids) < 2:
    time.sleep(0.01)
print(*pool.workers.pids, flush=True)
time.sleep(1000)
"""
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_nothing_outlives_a_killed_trainer():
    marker = f"orphan-{os.getpid()}"
    with start_trainer(marker) as trainer:
        eventually(lambda: len(alive(marker)) >= 2)
        pids = [int(word) for word in trainer.stdout.readline().split()]
        # The worker's files are in mounts of its own: nothing to be left behind.
        assert not Path("/dev/shm/workspace").exists()
        trainer.kill()
        trainer.wait(PATIENCE)
        eventually(lambda: not alive(marker))
        eventually(lambda: all(worker_is_gone(pid) for pid in pids))


@pytest.mark.parametrize("kind", ["ipc", "uts", "pid"])
def test_a_missing_namespace_is_named(kind):
    # A user namespace in which no further namespace of this kind may be made.
    script = f"""
echo 0 > /proc/sys/user/max_{kind}_namespaces &&
exec {sys.executable} -c 'from sandbox.pool import Pool; Pool()'
"""
    ran = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE,
        check=False,
    )
    last = ran.stderr.strip().splitlines()[-1]
    assert re.search(rf"SandboxUnavailable: .*Missing: the {kind} namespace", last)
    assert "docker backend" in last
