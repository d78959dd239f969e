"""Hostile programs cost their own episode, and see and leave nothing."""

import os
import textwrap
from pathlib import Path

import pytest

from sandbox.pool import Pool
from sandbox.protocol import Execution, Grading, Job, Limits

GRADER = """
import json
def grade(artifacts, payload):
    good = json.loads(artifacts["out"]) == payload
    return {"components": {"right": float(good)}, "why": "compared"}
"""
HONEST = "open('out', 'w').write('5')"
QUICK = {"wall_seconds": 30, "cpu_seconds": 1}


def job(name, code, **limits):
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
        grading=Grading(program=GRADER, payload=5, limits=Limits(wall_seconds=5)),
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
