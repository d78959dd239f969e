"""The pool and its local backend: honest work is graded, all else costs only itself."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.pool import Pool
from sandbox.protocol import (
    Execution,
    Grading,
    Job,
    Limits,
    Output,
    ProtocolError,
    Result,
)

GRADER = """
import json
def grade(artifacts, payload):
    good = json.loads(artifacts["out"]) == payload
    return {"components": {"right": float(good)}, "why": "compared"}
"""
HONEST = "open('out', 'w').write('5')"
QUICK = {"wall_seconds": 30, "cpu_seconds": 1}


def job(name, code, *, program=GRADER, **limits):
    source = code if isinstance(code, bytes) else textwrap.dedent(code).encode()
    return Job(
        job_id=name,
        domain="test",
        execution=Execution(
            command=("python", "-I", "-S", "main.py"),
            files={"main.py": source},
            artifacts=("out",),
            limits=Limits(**(QUICK | limits)),
        ),
        grading=Grading(program=program, payload=5, limits=Limits(wall_seconds=5)),
    )


@pytest.fixture(scope="module")
def pool():
    with Pool(num_workers=2) as pool:
        yield pool


def run(pool, name, code, **more):
    result = pool.submit(job(name, code, **more)).result(timeout=120)
    # Whatever it was, the next one is not affected.
    honest = pool.submit(job(f"after {name}", HONEST)).result(timeout=120)
    assert (honest.outcome, honest.verdict["components"]) == ("ok", {"right": 1.0})
    return result


def alive(marker: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_honest_work_is_graded(pool):
    result = run(pool, "honest", "print('hello')\n" + HONEST)
    assert (result.outcome, result.reason, result.attempts) == ("ok", "graded", 1)
    assert result.verdict == {"components": {"right": 1.0}, "why": "compared"}
    assert result.stdout.text() == "hello\n"
    assert set(result.seconds) == {"queue", "execute", "grade"}
    wrong = run(pool, "wrong", "open('out', 'w').write('6')")
    assert (wrong.outcome, wrong.verdict["components"]) == ("ok", {"right": 0.0})


def test_an_answer_is_graded_without_an_execution(pool):
    answer = Job(
        job_id="answer",
        domain="test",
        execution=None,
        grading=Grading(program=GRADER, payload=5),
        artifacts={"out": b"5"},
    )
    result = pool.submit(answer).result(timeout=120)
    assert result.outcome == "ok" and "execute" not in result.seconds


ATTACKS = {
    "while_true": ("while True: pass", "cpu_timeout", {}),
    "sleep": ("import time; time.sleep(60)", "wall_timeout", {"wall_seconds": 1}),
    "memory": ("x = bytearray(10**10)", "out_of_memory", {}),
    "fork_bomb": (
        """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        "wall_timeout",
        {"wall_seconds": 2},
    ),
    "exit_0_without_work": ("import os; os._exit(0)", "missing_artifact", {}),
    "raise": ("raise ValueError('no')", "nonzero_exit", {}),
    "kill_itself": ("import os; os.kill(os.getpid(), 9)", "killed_by_signal_9", {}),
    "symlink": ("import os; os.symlink('/etc/shadow', 'out')", None, {}),
    "fifo": ("import os; os.mkfifo('out')", "artifact_not_regular", {}),
    "directory": ("import os; os.mkdir('out')", "artifact_not_regular", {}),
    "big_file": ("open('out', 'wb').write(b'0' * 2**26)", None, {}),
    "sparse_file": ("open('out', 'wb').truncate(10**10)", None, {}),
    "disk": (
        """
        for i in range(1000):
            open(f"{i}", "wb").write(b"0" * 10**6)
        """,
        "nonzero_exit",
        {"workspace_bytes": 8 << 20},
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_its_own_episode(pool, name):
    code, reason, limits = ATTACKS[name]
    result = run(pool, name, code, **limits)
    assert result.outcome == "policy_fail" and result.verdict is None
    assert reason is None or result.reason == reason
    assert result.attempts == 1  # it is the program's doing, so it is not tried again


def test_a_flood_of_output_keeps_head_and_tail(pool):
    result = run(
        pool,
        "flood",
        """
        import sys
        sys.stdout.write("first")
        for _ in range(100):
            sys.stdout.write("x" * 10**6)
        sys.stdout.write("last")
        open("out", "w").write("5")
        """,
        cpu_seconds=20,
    )
    assert result.outcome == "ok" and result.stdout.total_bytes == 10**8 + 9
    assert result.stdout.head.startswith(b"first")
    assert result.stdout.tail.endswith(b"last")
    assert len(result.stdout.text()) < 20_000


def test_bytes_that_are_no_text(pool):
    code = b"import sys\nsys.stdout.buffer.write(bytes(range(256)))\n"
    result = run(pool, "bytes", code + HONEST.encode())
    assert result.stdout.head + result.stdout.tail == bytes(range(256))
    assert run(pool, "not utf-8", b"\xff\xfe\x00").reason == "nonzero_exit"


def test_kill_all_reaches_nobody_else(pool):
    pids = pool.worker_pids
    result = run(pool, "kill all", "import os\ntry: os.kill(-1, 9)\nfinally: " + HONEST)
    assert result.outcome == "policy_fail"
    assert pool.worker_pids == pids


@pytest.mark.parametrize("how", ["child", "setsid", "double_fork", "ignoring_term"])
@pytest.mark.parametrize("ending", ["exit", "timeout"])
def test_nothing_of_a_program_is_left(pool, how, ending):
    marker = f"survivor-{how}-{ending}-{os.getpid()}"
    code = f"""
        import os, signal, sys, time
        def survive():
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c",
                     "import time; time.sleep(1000)", "{marker}"])
        if os.fork() == 0:
            if "{how}" == "setsid":
                os.setsid()
            if "{how}" == "double_fork" and os.fork():
                os._exit(0)
            if "{how}" == "ignoring_term":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            survive()
        time.sleep(0.2)
        open("out", "w").write("5")
        if "{ending}" == "timeout":
            time.sleep(1000)
    """
    result = run(pool, marker, code, wall_seconds=2 if ending == "timeout" else 30)
    assert result.outcome == ("policy_fail" if ending == "timeout" else "ok")
    assert alive(marker) == []


def test_what_a_program_sees(pool):
    # Each line that prints is a hole.
    result = run(
        pool,
        "look around",
        """
        import os, socket
        for path in ("/root", "/home", "/etc/shadow", "/etc/passwd", "/var", "/mnt"):
            if os.path.exists(path) and os.access(path, os.R_OK) and path != "/root":
                print("sees", path)
        for path in ("/usr/x", "/x", "/bin/x", "/dev/x", "/proc/sys/kernel/hostname"):
            try:
                open(path, "w")
                print("writes", path)
            except OSError:
                pass
        if len([p for p in os.listdir("/proc") if p.isdigit()]) > 6:
            print("sees processes")
        if [name for _, name in socket.if_nameindex()] != ["lo"]:
            print("sees interfaces")
        for address in (("10.0.0.1", 80), ("127.0.0.1", 22)):
            try:
                socket.create_connection(address, 0.5)
                print("connects")
            except OSError:
                pass
        if os.getuid() == 0 and open("/proc/self/uid_map").read().split()[2] != "1":
            print("is root")
        if any(int(l.split()[1], 16) for l in open("/proc/self/status")
               if l.startswith(("CapEff", "CapPrm", "CapBnd"))):
            print("has capabilities")
        if set(os.environ) - {"PATH", "HOME", "LANG", "TZ", "PYTHONHASHSEED",
                              "PYTHONDONTWRITEBYTECODE", "PWD"}:
            print("sees", dict(os.environ))
        open("out", "w").write("5")
        """,
    )
    assert result.outcome == "ok", result.stderr.text()
    assert result.stdout.text() == ""


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def grade(a, p): raise ValueError('broken')", "grader_raised"),
        ("def grade(a, p):\n    while True: pass", "grader_timeout"),
        ("import os\ndef grade(a, p): os._exit(0)", "grader_died"),
        ("def grade(a, p): return 1.0", "grader_bad_verdict"),
        (
            "def grade(a, p): return {'components': {'x': 2.0}, 'why': ''}",
            "grader_bad_verdict",
        ),
        (
            "def grade(a, p): return {'components': {'x': float('nan')}, 'why': ''}",
            "grader_bad_verdict",
        ),
        ("syntax error", "grader_raised"),
    ],
)
def test_a_broken_grader_is_never_a_score(pool, program, reason):
    limits = {"program": program}
    result = run(pool, f"grader {program}", HONEST, **limits)
    assert (result.outcome, result.reason) == ("grader_fail", reason)
    assert result.verdict is None and result.attempts == 3


def test_the_same_job_id_is_the_same_work(pool):
    first = pool.submit(job("twice", HONEST))
    assert pool.submit(job("twice", "raise ValueError")) is first


def test_a_worker_killed_during_a_job_is_replaced_and_the_job_tried_again():
    with Pool(num_workers=1) as pool:
        slow = job("slow", "import time; time.sleep(1)\n" + HONEST)
        future = pool.submit(slow)
        time.sleep(0.4)
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        result = future.result(timeout=120)
        assert (result.outcome, result.attempts) == ("ok", 2)


def test_workers_that_always_die_are_an_infrastructure_failure():
    with Pool(num_workers=1, max_attempts=2) as pool:
        future = pool.submit(job("doomed", "import time; time.sleep(20)"))
        deadline = time.monotonic() + 60
        while not future.done() and time.monotonic() < deadline:
            for pid in pool.worker_pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        result = future.result(timeout=60)
        assert (result.outcome, result.reason) == ("infra_fail", "worker_died")
        assert result.attempts == 2 and result.verdict is None


def test_closing_resolves_everything():
    pool = Pool(num_workers=1)
    futures = [
        pool.submit(job(f"unfinished {i}", "import time; time.sleep(60)")) for i in range(3)
    ]
    time.sleep(0.3)
    pool.close()
    futures.append(pool.submit(job("too late", HONEST)))
    for future in futures:
        assert future.result(timeout=10).reason == "pool_closed"


def test_nothing_is_left_when_the_trainer_is_killed():
    marker = f"orphan-{os.getpid()}"
    script = f"""
import time
from tests.test_sandbox import Pool, job
code = '''
import os, sys
os.execv(sys.executable, [sys.executable, "-I", "-S", "-c",
         "import time; time.sleep(1000)", "{marker}"])
'''
pool = Pool(num_workers=1)
pool.submit(job("orphan", code, wall_seconds=100))
print("up", flush=True)
time.sleep(1000)
"""
    root = Path(__file__).resolve().parent.parent
    trainer = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert trainer.stdout.readline() == b"up\n"
    deadline = time.monotonic() + 30
    while not (found := [p for p in alive(marker) if p != str(trainer.pid)]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    while alive(marker):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_records_round_trip_through_json():
    work = job("round trip", HONEST)
    assert Job.from_json(work.to_json()) == work
    result = Result(
        job_id="x",
        outcome="ok",
        reason="graded",
        verdict={"components": {"a": 0.5}, "why": "é"},
        exit_code=0,
        stdout=Output(head=b"\xff", tail=b"", total_bytes=1),
        seconds={"queue": 0.5},
    )
    assert Result.from_json(result.to_json()) == result


@given(content=st.binary(max_size=200), name=st.text(max_size=8))
def test_any_bytes_and_names_travel(content, name):
    work = Job(
        job_id=f"j{name}",
        domain=name,
        execution=None,
        grading=Grading(program="", payload={name: [1, None, 2.5]}),
        artifacts={"a": content},
    )
    assert Job.from_json(work.to_json()) == work


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "Job must be an object"),
        ('{"job_id": "a"}', "missing"),
        ('{"job_id": "a", "surprise": 1}', "surprise"),
        ('{"job_id": 1}', "Job.job_id must be"),
    ],
)
def test_malformed_records_are_named(text, message):
    with pytest.raises(ProtocolError, match=message):
        Job.from_json(text)


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../../x", "a\nb", "x" * 300, "a//b"]
)
def test_paths_stay_inside_the_workspace(path):
    with pytest.raises(ProtocolError, match=r"Execution\.files"):
        Execution(command=("true",), files={path: b""})


@pytest.mark.parametrize("limits", [{"cpu_seconds": 0}, {"wall_seconds": float("inf")}])
def test_limits_must_limit(limits):
    with pytest.raises(ProtocolError, match=f"Limits.{next(iter(limits))}"):
        Limits(**limits)
