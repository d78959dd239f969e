"""Sessions: a shell that stays, files, snapshots, forks, and what happens when they die."""

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sandbox import codec
from sandbox.local_workers import LocalWorkers, WorkerLink
from sandbox.pool import Pool
from sandbox.protocol import Grading, Limits, ProtocolError
from sandbox.session import SessionFailed
from sandbox.sessions import (
    Exec,
    Failed,
    Open,
    Reply,
    Request,
    WriteFiles,
    envelope,
    opened,
)

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 120  # seconds; only a hang takes so long
LIMITS = Limits(memory_bytes=128 << 20, workspace_bytes=16 << 20, file_bytes=16 << 20)
SHOWS = Grading(
    program="def grade(a, p): return {'components': {'x': 1.0}, 'why': repr(a)}",
    payload=None,
    limits=Limits(wall_seconds=30),
)


@pytest.fixture(scope="module")
def pool():
    with Pool(LocalWorkers(2)) as pool:
        yield pool


@pytest.fixture
def session(pool):
    session = pool.open("tests", LIMITS).result(PATIENCE)
    yield session
    session.close().result(PATIENCE)


def done(future):
    return future.result(PATIENCE)


def says(session, script, **more):
    """What the script prints; it must end well."""
    ran = done(session.exec(script, **more))
    assert ran.reason is None, (ran.reason, ran.stderr.text())
    return ran.stdout.text().strip()


def alive(marker):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def eventually(condition):
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)
    return value


def test_the_shell_remembers(session):
    says(session, "mkdir -p a/b; cd a/b; export X=1; Y=2; f() { echo called $1; }")
    assert says(session, "pwd; echo $X $Y; f 3") == "/workspace/a/b\n1 2\ncalled 3"
    assert says(session, "python3 -c 'import os; print(os.environ[\"X\"])'") == "1"


@pytest.mark.parametrize(
    ("script", "code"),
    [("true", 0), ("false", 1), ("exit 7", 7), ("kill -9 $$", 137), ("nosuch", 127)],
)
def test_a_script_has_an_exit_code(session, script, code):
    ran = done(session.exec(script))
    assert ran.exit_code == code
    assert ran.shell_kept == (script not in ("exit 7", "kill -9 $$"))
    assert says(session, "echo again") == "again"


@pytest.mark.parametrize("script", ["if", "echo 'open", "(", "cat <<E\nx", "}"])
def test_what_is_no_script_costs_nothing_else(session, script):
    done(session.exec(script))
    assert says(session, "echo again") == "again"


def test_no_script_can_speak_for_the_shell(session):
    # It can reach the shell's channel, and says nonsense about itself at most.
    done(session.exec("printf '0\\0' >/proc/$PPID/fd/4; printf 'x\\0' >/proc/$$/fd/4"))
    done(session.exec("printf '77\\0\\0junk\\0' >&10; printf '5\\0' >&11"))
    for _ in range(4):
        done(session.exec("true"))
    assert done(session.exec("echo there")).stdout.total_bytes > 0


def test_every_byte_comes_through(session):
    data = bytes(range(256)) * 100 + "é\x1b[31m\r50%\r100%".encode()
    done(session.write_files({"deep/er/data": data}))
    assert done(session.read_files(["deep/er/data"])).contents == {"deep/er/data": data}
    ran = done(session.exec("cat deep/er/data; cat deep/er/data >&2", output_bytes=1 << 20))
    for output in (ran.stdout, ran.stderr):
        assert (output.head + output.tail, output.total_bytes) == (data, len(data))


def test_a_flood_is_cut_and_counted(session):
    ran = done(session.exec("head -c 20000000 /dev/zero; echo end", output_bytes=1000))
    assert (ran.reason, ran.stdout.total_bytes) == (None, 20_000_004)
    assert (len(ran.stdout.head), ran.stdout.tail[-4:]) == (500, b"end\n")


def test_a_timeout_kills_all_that_runs_but_not_the_shell(session):
    marker = f"session-timeout-{os.getpid()}"
    says(session, "cd /tmp; export KEPT=1")
    tree = f"""
        python3 -c 'import time; time.sleep(99)' {marker} &
        setsid python3 -c 'import time; time.sleep(99)' {marker} &
        (python3 -c 'import os, time; os.fork() or os.setsid(); time.sleep(99)' {marker} &)
        python3 -c 'import signal, time
for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)
time.sleep(99)' {marker}
    """
    ran = done(session.exec(tree, wall_seconds=1.0))
    assert (ran.reason, ran.shell_kept) == ("wall_timeout", True)
    assert not alive(marker)
    assert says(session, "pwd; echo $KEPT") == "/tmp\n1"


@pytest.mark.parametrize("script", ["while :; do :; done", "sleep 9 & kill -STOP $$"])
def test_a_stuck_shell_is_replaced(session, script):
    ran = done(session.exec(script, wall_seconds=0.5))
    assert (ran.reason, ran.shell_kept) == ("wall_timeout", False)
    assert says(session, "pwd") == "/workspace"


def test_what_runs_in_the_background_lives_on_until_the_end(pool):
    marker = f"session-background-{os.getpid()}"
    session = done(pool.open("tests", LIMITS))
    says(session, f"python3 -c 'import time; time.sleep(999)' {marker} >/dev/null 2>&1 &")
    says(session, "true")
    eventually(lambda: len(alive(marker)) == 1)
    done(session.close())
    assert not alive(marker)


def test_memory_that_runs_out_is_called_by_its_name(session):
    hog = "python3 -c 'x = bytearray(300 << 20)'"
    assert done(session.exec(hog)).reason == "out_of_memory"
    assert done(session.exec("false")).reason == "nonzero_exit"  # that was another script
    assert says(session, "echo again") == "again"


def test_a_full_workspace_is_an_error_to_whoever_writes(session):
    ran = done(session.exec("head -c 15M /dev/zero >a; head -c 9M /dev/zero >b"))
    assert "No space left" in ran.stderr.text()
    with pytest.raises(SessionFailed) as failure:
        done(session.write_files({"c": bytes(4 << 20)}))
    assert (failure.value.reason, failure.value.is_lost) == ("no_space", False)
    assert says(session, "rm a b; echo again") == "again"
    done(session.write_files({"c": bytes(4 << 20)}))


def test_files_are_read_only_where_they_are_files(session):
    says(
        session,
        "ln -s /etc/passwd link; mkdir folder; mkfifo pipe; ln -s / root; "
        "ln -s /proc/self/fd/0 magic; truncate -s 10G sparse 2>/dev/null; "
        "truncate -s 16M large; echo plain >plain; true",
    )
    paths = ["link", "folder", "pipe", "root/etc/passwd", "magic", "large", "plain", "none"]
    found = done(session.read_files(paths, max_bytes=1 << 20))
    assert found.contents == {"plain": b"plain\n"}
    assert found.unread == {
        "link": "artifact_not_regular",
        "folder": "artifact_not_regular",
        "pipe": "artifact_not_regular",
        "root/etc/passwd": "artifact_not_regular",
        "magic": "artifact_not_regular",
        "large": "artifact_too_large",
        "none": "missing_artifact",
    }


def test_files_are_written_nowhere_else(session):
    says(session, "ln -s /tmp out; ln -s /etc/passwd passwd; mkfifo pipe; true")
    for path in ("out/x", "pipe", "passwd"):
        with contextlib.suppress(SessionFailed):
            done(session.write_files({path: b"planted"}))
    assert says(session, "ls /tmp") == ""
    assert "planted" not in Path("/etc/passwd").read_text()


def test_a_fork_begins_where_it_was_made_and_goes_its_own_way(session):
    says(session, "mkdir d; cd d; echo 1 >common; echo 1 >gone; export X=1")
    fork = done(session.fork())
    assert says(fork, "pwd; echo $X; cat common") == "/workspace/d\n1\n1"
    says(fork, "echo 2 >>common; rm gone; echo new >new")
    says(session, "echo 3 >>common")
    second = done(fork.fork())
    assert says(session, "cat common; ls") == "1\n3\ncommon\ngone"
    assert says(second, "cat common; ls") == "1\n2\ncommon\nnew"
    done(fork.close())
    assert says(second, "cat common") == "1\n2"
    done(second.close())


def test_many_forks_of_one_prepared_state(session):
    says(session, "for i in $(seq 50); do echo $i >file$i; done; head -c 8M /dev/zero >big")
    forks = [done(session.fork()) for _ in range(8)]
    for number, fork in enumerate(forks):
        says(fork, f"echo {number} >file1; rm file2")
    for number, fork in enumerate(forks):
        assert (
            says(fork, "cat file1; ls | wc -l; stat -c %s big") == f"{number}\n50\n8388608"
        )
        # What the fork has from before counts in its quota.
        assert done(fork.exec("head -c 12M /dev/zero >more")).exit_code != 0
        done(fork.close())


@pytest.mark.parametrize("keep", [False, True])
def test_a_snapshot_keeps_processes_or_kills_them(session, keep):
    marker = f"session-snapshot-{os.getpid()}-{keep}"
    name = f"kept-{keep}"
    says(
        session, f"cd /tmp; export X=1; python3 -c 'import time; time.sleep(99)' {marker} &"
    )
    says(session, "cd /workspace; echo before >file")
    eventually(lambda: alive(marker))
    done(session.snapshot(name, keep_processes=keep))
    assert bool(alive(marker)) == keep
    assert says(session, "pwd; echo $X; cat file") == "/workspace\n1\nbefore"
    says(session, "echo after >file")
    assert says(session, "cat file") == "after"


def test_a_port_is_free_again_after_a_snapshot_that_kills(session):
    serve = "python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &"
    fetch = """
        for i in $(seq 100); do
            (echo >/dev/tcp/127.0.0.1/8000) 2>/dev/null && break; sleep 0.1
        done; test $i -lt 100
    """
    says(session, serve + fetch)
    done(session.snapshot("port", durable=False))
    assert done(session.exec("(echo >/dev/tcp/127.0.0.1/8000) 2>/dev/null")).exit_code != 0
    says(session, serve + fetch)


def test_an_episode_survives_its_worker():
    with Pool(LocalWorkers(1)) as pool:
        session = done(pool.open("tests", LIMITS))
        says(session, "mkdir d; cd d; echo turn 1 >file; ln -s file link; export X=1")
        state = {"turn": 1, "messages": [{"role": "user", "content": "é"}]}
        done(session.snapshot("turn 1", state=state))
        says(session, "echo turn 2 >file")
        (worker,) = pool.workers.pids
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(SessionFailed) as lost:
            done(session.exec("cat file"))
        assert (lost.value.reason, lost.value.is_lost) == ("worker_died", True)
        resumed = done(pool.open("tests", LIMITS, snapshot_id="turn 1"))
        assert resumed.state == state
        assert says(resumed, "pwd; echo $X; cat link; stat -c %U file") == (
            "/workspace/d\n1\nturn 1\nsandbox"
        )
        with pytest.raises(SessionFailed, match="snapshot_unknown"):
            done(pool.open("tests", LIMITS, snapshot_id="turn 2"))


def test_grading_kills_first_and_sees_only_what_was_declared(session):
    marker = f"session-graded-{os.getpid()}"
    says(
        session,
        f"echo 5 >out; echo secret >other; mkdir d; echo 6 >d/out; sleep 0.{os.getpid()} & "
        f"python3 -c 'import time; time.sleep(999)' {marker} >/dev/null 2>&1 &",
    )
    eventually(lambda: alive(marker))
    result = done(session.grade(["out", "d/out"], SHOWS))
    assert (result.outcome, result.verdict["why"]) == (
        "ok",
        repr({"out": b"5\n", "d/out": b"6\n"}),
    )
    assert not alive(marker)
    missing = done(session.grade(["none"], SHOWS))
    assert (missing.outcome, missing.reason) == ("policy_fail", "missing_artifact")


def test_a_sandbox_that_died_says_so(pool, session):
    says(session, "echo there >file")
    marker = f"session-died-{os.getpid()}"
    says(session, f"python3 -c 'import time; time.sleep(999)' {marker} >/dev/null 2>&1 &")
    (child,) = eventually(lambda: alive(marker))
    init = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    if Path(f"/proc/{init}/cmdline").read_bytes().startswith(b"bash"):
        init = int(Path(f"/proc/{init}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(init, signal.SIGKILL)
    with pytest.raises(SessionFailed) as failure:
        done(session.exec("cat file"))
    assert failure.value.reason == "sandbox_died"


def test_a_session_that_nobody_uses_is_closed():
    with Pool(LocalWorkers(1), idle_seconds=1.0) as pool:
        forgotten = done(pool.open("tests", LIMITS))
        says(forgotten, "true")
        eventually(lambda: "jaxpt_sandbox_sessions 0.0" in pool.metrics.text())
        with pytest.raises(SessionFailed, match="idle_timeout"):
            done(forgotten.exec("true"))


def test_two_hundred_scripts_at_once_some_of_which_hang(pool):
    sessions = [done(pool.open("tests", LIMITS)) for _ in range(10)]
    futures = {}
    for number in range(200):
        hangs = number % 5 == 0
        script = "sleep 60" if hangs else f"echo {number}"
        session = sessions[number % 10]
        futures[session.exec(script, wall_seconds=0.1 if hangs else 60)] = (number, hangs)
    for future in concurrent.futures.as_completed(futures, PATIENCE):
        number, hangs = futures[future]
        ran = future.result()
        if hangs:
            assert ran.reason == "wall_timeout"
        else:
            assert ran.stdout.text().strip() == str(number)
    for session in sessions:
        done(session.close())


def test_figures_tell_by_domain_and_tool(pool, session):
    says(session, "true", tool="editor")
    done(session.exec("false", tool="editor"))
    done(session.exec("touch out", tool="shell"))
    done(session.grade(["out"], SHOWS))
    text = pool.metrics.text()
    for line in (
        'scripts_total{domain="tests",ending="ok",tool="editor"} 1.0',
        'scripts_total{domain="tests",ending="nonzero_exit",tool="editor"} 1.0',
        'jaxpt_sandbox_memory_bytes_count{domain="tests"}',
        'jaxpt_sandbox_seconds_count{domain="isolation",part="acquire"}',
        "jaxpt_sandbox_workers 2.0",
    ):
        assert line in text
    assert 'outcome="ok",reason="graded"' in text


def test_what_a_script_used_is_told(session):
    busy = """python3 -c '
import time
x = bytearray(60 << 20)
while time.process_time() < 0.3: pass
'; head -c 1M /dev/zero >file"""
    usage = done(session.exec(busy)).usage
    assert 0.2 < usage.cpu_seconds < 30 and usage.wall_seconds > 0.2
    assert usage.workspace_bytes >= 1 << 20
    if os.getuid() == 0:
        assert 60 << 20 < usage.memory_bytes < 200 << 20


def bad_requests():
    yield lambda s: s.exec("a\0b"), "NUL"
    yield lambda s: s.exec("x" * 70_000), "70000 bytes"
    yield lambda s: s.exec("true", wall_seconds=0), "wall_seconds=0"
    yield lambda s: s.exec("true", wall_seconds=float("nan")), "wall_seconds=nan"
    yield lambda s: s.exec("true", output_bytes=-1), "output_bytes=-1"
    for path in ("../x", "/etc/x", "a\nb", "", "x" * 300, "a//b", "\udc80"):
        yield lambda s, path=path: s.write_files({path: b""}), "relative path"
        yield lambda s, path=path: s.read_files([path]), "relative path"


@pytest.mark.parametrize(("ask", "says_what"), list(bad_requests()))
def test_what_can_not_be_asked_is_refused_at_once(session, ask, says_what):
    with pytest.raises(ProtocolError, match=says_what):
        ask(session)
    assert says(session, "echo again") == "again"


def test_limits_above_the_machine_are_refused_with_numbers(pool):
    with pytest.raises(ValueError, match=r"cpus=10000.*more than the"):
        pool.open("tests", Limits(cpus=10000))
    with pytest.raises(ValueError, match=r"memory_bytes=.*more than the"):
        pool.open("tests", Limits(memory_bytes=1 << 50))
    with pytest.raises(SessionFailed, match="no images"):
        done(pool.open("tests", image="other"))


IN_WORKER = """
import asyncio, os, sys
from sandbox.backends.local.backend import LocalBackend
from sandbox.protocol import Limits
from sandbox.sessions import *
from sandbox.snapshots import FolderStore
from sandbox.worker import Worker

async def main():
    backend = LocalBackend(77)
    worker = Worker(backend, FolderStore(sys.argv[1]))
    begin = Open(session_id="s", domain="d", limits=Limits())
    assert await worker.handle("1", begin) == Done()
{check}
    await worker.close()
    await backend.close()

asyncio.run(main())
"""


def in_worker(check, tmp_path):
    """Runs statements with a worker that has the session `s`, which changes its process."""
    script = IN_WORKER.format(check=textwrap.indent(textwrap.dedent(check), "    "))
    command = [sys.executable, "-c", script, str(tmp_path)]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ran.returncode == 0, ran.stderr


def test_a_request_that_comes_twice_is_done_once(tmp_path):
    in_worker(
        """
        append = Exec(session_id="s", script="sleep 0.2; echo x >>file; cat file")
        first, second = await asyncio.gather(
            worker.handle("2", append), worker.handle("2", append)
        )
        later = await worker.handle("2", append)
        assert first == second == later and first.stdout.text() == "x\\n"
        again = await worker.handle("3", append)
        assert again.stdout.text() == "x\\nx\\n"
        """,
        tmp_path,
    )


def test_a_session_is_one_workers(tmp_path):
    in_worker(
        """
        for request in (
            Exec(session_id="none", script="true"),
            WriteFiles(session_id="none", files={}),
        ):
            reply = await worker.handle(repr(request), request)
            assert reply.reason == "session_unknown", reply
        twice = await worker.handle("2", begin)
        assert twice.reason == "bad_request", twice
        """,
        tmp_path,
    )


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"nonsense",
        b"\xff\xfe",
        b'{"id": "1"}',
        b'{"id": "1", "type": "Exec", "body": {}}',
        b'{"id": "1", "type": "Exec", "body": {"session_id": 1, "script": "x"}}',
        b'{"id": "1", "type": "Exec", "body": {"session_id": "s", "script": "x", "y": 1}}',
        b'{"id": "1", "type": "Nothing", "body": {}}',
        b'{"id": 1, "type": "Close", "body": {"session_id": "s"}}',
        b'{"id": "1", "type": "Close", "body": {"session_id": "s"}, "more": 1}',
        b"[" * 100_000,
    ],
)
def test_a_malformed_message_is_answered_and_costs_nothing(tmp_path, line):
    async def main():
        options = {
            "number": 0,
            "snapshots": str(tmp_path),
            "backend": "local",
            "options": {},
        }
        link = WorkerLink(options)
        try:
            await link.start()
            async with asyncio.timeout(PATIENCE):
                await link._lines.send(line)
                while True:
                    message_id, reply = opened(await link._lines.receive(), Reply)
                    if isinstance(reply, Failed):
                        break
                assert reply.reason == "bad_request" and message_id in ("1", "")
                listening = asyncio.create_task(link.listen())
                request = Open(session_id="s", domain="d", limits=LIMITS)
                assert not isinstance(await link.request("2", request), Failed)
                listening.cancel()
        finally:
            link.close()

    asyncio.run(main())


def test_messages_come_through_as_they_are():
    for message in (
        Exec(session_id="s", script="é"),
        WriteFiles(session_id="s", files={"a/b": bytes(range(256))}),
        Open(session_id="s", domain="d", limits=LIMITS, snapshot_id="x"),
    ):
        assert opened(envelope(message, "1"), Request) == ("1", message)
    with pytest.raises(ProtocolError, match="unknown fields"):
        codec.loads(Limits, '{"wall": 1}')
