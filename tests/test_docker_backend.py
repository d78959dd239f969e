"""Sandboxes in containers: what the protocol promises, and what contains them.

Without a Docker engine, or an image for it, all of these are skipped, with the reason.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sandbox.backends.backend import SandboxDied, SandboxFailed, SandboxUnavailable
from sandbox.backends.docker import engine as engine_lib
from sandbox.backends.docker.backend import DockerBackend
from sandbox.grading import Grader
from sandbox.local_workers import LocalWorkers, machine
from sandbox.protocol import Limits
from sandbox.sessions import Close, Done, Fork, Open
from sandbox.snapshots import FolderStore
from sandbox.worker import Worker

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 60.0  # seconds; only a hang takes so long
LIMITS = Limits(wall_seconds=PATIENCE, cpu_seconds=30)
QUICK = Limits(wall_seconds=0.6, cpu_seconds=30)


@pytest.fixture(scope="module", params=["runc", "runsc"])
def loop_and_backend(request):
    with asyncio.Runner() as runner:

        async def make():
            return DockerBackend(7, runtime=request.param)

        try:
            backend = runner.run(make())
        except SandboxUnavailable as error:
            pytest.skip(f"no Docker sandboxes by {request.param}: {error}")
        yield runner, backend, request.param
        runner.run(backend.close())


@pytest.fixture
def runtime(loop_and_backend):
    return loop_and_backend[2]


@pytest.fixture
def inside(loop_and_backend):
    """Runs an async function with the backend and one open sandbox of it."""
    runner, backend, _ = loop_and_backend

    def inside(work, limits=LIMITS):
        async def run():
            sandbox = await backend.open(limits)
            try:
                return await work(backend, sandbox)
            finally:
                await sandbox.close()

        return runner.run(run())

    return inside


def long(number: int) -> str:
    """Seconds to sleep that no other test asks for, in no other process either."""
    return f"{number}.{os.getpid()}"


def alive(marker: str) -> list[str]:
    """Processes of the machine with the marker among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


async def said(sandbox, script, limits=LIMITS):
    """What a script prints, which must end well."""
    ran = await sandbox.exec(script, limits=limits)
    assert ran.reason is None, (ran.reason, ran.stderr.text())
    return ran.stdout.text().strip()


async def python(sandbox, code, limits=LIMITS):
    return await sandbox.run(("python", "-c", textwrap.dedent(code)), limits=limits)


def test_a_command_gives_its_streams_and_its_end(inside):
    async def work(backend, sandbox):
        code = "import sys; d = sys.stdin.buffer.read(); sys.stdout.buffer.write(d[::-1])"
        ran = await sandbox.run(("python", "-c", code), limits=LIMITS, stdin=b"\0\xff" * 9)
        assert (ran.reason, ran.exit_code) == (None, 0)
        assert ran.stdout.head == b"\xff\0" * 9
        assert 0 < ran.usage.cpu_seconds < 10 < ran.usage.memory_bytes
        ran = await python(sandbox, "import sys; sys.exit('why')")
        assert (ran.reason, ran.exit_code) == ("nonzero_exit", 1)
        assert ran.stderr.text() == "why\n"
        ran = await python(sandbox, "import os; os.kill(os.getpid(), 11)")
        assert ran.reason == "killed_by_signal_11"
        ran = await sandbox.run(("no-such-program",), limits=LIMITS)
        assert (ran.exit_code, ran.reason) == (127, "nonzero_exit")
        ran = await python(sandbox, "print('x' * 100_000)", Limits(output_bytes=100))
        assert (len(ran.stdout.head), len(ran.stdout.tail)) == (50, 50)
        assert ran.stdout.total_bytes == 100_001

    inside(work)


def test_a_shell_keeps_folder_variables_and_functions(inside):
    async def work(backend, sandbox):
        await said(sandbox, "mkdir a && cd a && export B=5 && c() { echo $B$1; }")
        assert await said(sandbox, "pwd; c 6") == "/workspace/a\n56"
        ran = await sandbox.exec("echo no >&2; false", limits=LIMITS)
        assert (ran.exit_code, ran.stderr.text(), ran.shell_kept) == (1, "no\n", True)
        ran = await sandbox.exec("exit 3", limits=LIMITS)
        assert (ran.exit_code, ran.shell_kept) == (3, False)
        assert await said(sandbox, "echo ${B:-none}") == "none"
        # What says that a script has ended is out of a script's reach.
        assert await said(sandbox, "echo 1 >&4; echo done") == "done"

    inside(work)


def test_time_that_is_up_leaves_nothing_alive_but_the_shell(inside, runtime):
    async def work(backend, sandbox):
        nap = long(7777)
        await said(sandbox, "export KEPT=1")
        script = f"""
            setsid sleep {nap} &
            (setsid setsid sleep {nap} &)
            python -c 'import os, time; os.fork() or os.setsid(); time.sleep(99)' {nap} &
            sleep {nap}
        """
        ran = await sandbox.exec(script, limits=QUICK)
        assert (ran.reason, ran.shell_kept) == ("wall_timeout", True)
        # The first process, the shell, and this look's own.
        count = await said(sandbox, "echo /proc/[0-9]* | wc -w")
        assert int(count) <= 5
        assert await said(sandbox, "echo $KEPT") == "1"
        ran = await sandbox.exec("while true; do :; done", limits=QUICK)
        assert (ran.reason, ran.shell_kept) == ("wall_timeout", False)
        ran = await sandbox.exec(f"sleep {nap}; sleep {nap}; sleep {nap}", limits=QUICK)
        assert ran.reason == "wall_timeout"
        assert await said(sandbox, "echo again") == "again"
        ran = await python(sandbox, "print(1, flush=True)\nwhile True: pass", QUICK)
        assert (ran.reason, ran.exit_code) == ("wall_timeout", None)
        assert ran.stdout.text() == "1\n"
        if runtime == "runc":
            assert not alive(nap)

    try:
        inside(work)
    except SandboxDied as death:
        if runtime == "runc":
            raise
        # Of a release of 2022; the container is gone, which is told as what it is.
        pytest.skip(f"gVisor lost its container under load, as it sometimes does: {death}")


def test_what_runs_in_the_background_lives_until_stop(inside, runtime):
    async def work(backend, sandbox):
        await said(sandbox, f"sleep {long(8888)} & echo $! >pid")
        assert await said(sandbox, "kill -0 $(cat pid) && echo alive") == "alive"
        if runtime == "runc":
            assert alive(long(8888))
        await sandbox.stop()
        assert not alive(long(8888))
        assert (await sandbox.read_files(("pid",), max_bytes=9))["pid"].strip().isdigit()
        assert await said(sandbox, "cat pid && pwd")

    inside(work)


def test_files_are_binary_safe_and_no_link_is_followed(inside, runtime):
    async def work(backend, sandbox):
        data = bytes(range(256)) * 64
        name = "deep/er/ü \\ '\""
        await sandbox.write_files({name: data, "plain": b""})
        script = """
            ln -s /etc/passwd out; ln -s / root; mkfifo pipe; mkdir folder
            find deep -type f -printf '%u %s'
        """
        assert await said(sandbox, script) == f"sandbox {len(data)}"
        paths = (name, "plain", "out", "root/etc/passwd", "pipe", "folder", "none")
        for _ in range(2):
            found = await sandbox.read_files(paths, max_bytes=len(data))
            if runtime == "runsc":  # a pipe is in its kernel, and not among the files
                assert found.pop("pipe") == "missing_artifact"
                found["pipe"] = "artifact_not_regular"
            assert found == {
                name: data,
                "plain": b"",
                "none": "missing_artifact",
                **dict.fromkeys(paths[2:6], "artifact_not_regular"),
            }
            await sandbox.stop()  # and the same of what a dead one left
        found = await sandbox.read_files((name,), max_bytes=9)
        assert found[name] == "artifact_too_large"

    inside(work)


def test_limits_bind(inside, runtime):
    limits = Limits(
        wall_seconds=PATIENCE,
        cpu_seconds=1,
        memory_bytes=128 << 20,
        workspace_bytes=8 << 20,
    )

    async def work(backend, sandbox):
        ran = await python(sandbox, "b'x' * (1 << 30)", limits)
        assert ran.reason == "out_of_memory"
        # Many that each keep to their own limit.
        bomb = """
            import os, time
            for _ in range(8):
                if os.fork() == 0:
                    held = bytearray(os.urandom(1 << 20) * 90)
                    time.sleep(30)
            for _ in range(8):
                if os.waitstatus_to_exitcode(os.wait()[1]): raise SystemExit(1)
        """
        ran = await python(sandbox, bomb, limits)
        assert ran.reason == "out_of_memory"
        await sandbox.stop()  # or those that are left would be in the way
        ran = await python(sandbox, "while True: pass", limits)
        assert ran.reason == "cpu_timeout"
        fill = "with open('f', 'wb', 0) as f:\n while f.write(bytes(1 << 20)): pass"
        ran = await python(sandbox, fill, limits)
        assert ran.reason == "nonzero_exit" and "Errno 28" in ran.stderr.text()
        with pytest.raises(OSError, match="No space"):
            await sandbox.write_files({"g": bytes(9 << 20)})
        await said(sandbox, "rm -f f g && echo 1 >h")
        ran = await python(sandbox, fill.replace("'f'", "'/tmp/f'"), limits)
        assert ran.reason == "nonzero_exit"  # a limit on a file, or on /tmp
        bomb = """
            import os, time
            children = 0
            try:
                while children < 200:
                    if os.fork() == 0: time.sleep(30); os._exit(0)
                    children += 1
            except OSError: pass
            print(children)
        """
        ran = await python(sandbox, bomb, limits)
        assert int(ran.stdout.text()) < limits.processes
        await sandbox.stop()
        assert await said(sandbox, "cat h") == "1"

    inside(work, limits)


def test_a_fork_bomb_is_over_with_its_time(inside, runtime):
    async def work(backend, sandbox):
        ran = await sandbox.exec("f() { f | f & }; f; sleep " + long(9999), limits=QUICK)
        assert ran.reason in ("wall_timeout", "nonzero_exit"), ran
        await sandbox.stop()
        assert not alive(long(9999))
        assert await said(sandbox, "echo fine") == "fine"

    inside(work)


def test_nothing_of_the_machine_is_in_reach(inside, runtime):
    code = """
        import ctypes, os, signal, socket
        libc = ctypes.CDLL(None, use_errno=True)
        status = open("/proc/self/status").read()
        for kind in ("Eff", "Prm", "Bnd"):
            assert f"Cap{kind}:\\t0000000000000000" in status
        assert os.getuid() >= 1000 and os.getpid() > 1
        assert [name for _, name in socket.if_nameindex()] == ["lo"]
        for address in (("192.0.2.1", 80), ("8.8.8.8", 53)):
            try: socket.create_connection(address, 2)
            except OSError: pass
            else: raise SystemExit("connected")
        for path in ("/x", "/usr/x", "/etc/x", "/jaxpt/x"):
            try: open(path, "w")
            except OSError: pass
            else: raise SystemExit(path)
        for name, *arguments in (
            ("unshare", 0x10000000), ("ptrace", 16, 1, 0, 0), ("ptrace", 0, 0, 0, 0),
            ("mount", 0, b"/tmp", b"tmpfs", 0, 0),
            ("syscall", 425, 8, 0), ("syscall", 321, 0, 0, 0), ("syscall", 250, 0, 0),
        ):
            assert getattr(libc, name)(*arguments) < 0, name
        try: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)
        except OSError: pass
        else: raise SystemExit("AF_ALG")
        for path in ("/proc/1/mem", "/proc/kcore", "/sys/kernel/uevent_seqnum", *PRIVATE):
            try: opened = open(path, "rb").read(1)
            except OSError: pass
            else: assert not opened, path
        assert not os.path.exists("/var/run/docker.sock")
        assert socket.gethostname() == "sandbox"
        assert sorted(os.environ) == sorted(
            "PATH HOME LANG TZ PYTHONHASHSEED PYTHONDONTWRITEBYTECODE".split()
        ), os.environ
        import resource
        for attack in (
            lambda: os.kill(1, 9), lambda: os.kill(1, 19), lambda: os.kill(-1, 0),
            lambda: libc.syscall(62, ctypes.c_long(1 << 32 | 1), 9),
            lambda: signal.pidfd_send_signal(os.pidfd_open(1), 9),
            lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)),
            lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
        ):
            try: attack()
            except OSError: pass
    """

    async def work(backend, sandbox):
        # gVisor of 2022 shows these to everyone; nothing that counts depends on them.
        private = ("/proc/1/environ", "/proc/1/fd/0") if runtime == "runc" else ()
        ran = await python(sandbox, textwrap.dedent(code).replace("PRIVATE", repr(private)))
        assert ran.reason is None, ran.stderr.text()
        assert await said(sandbox, "echo the first process is fine")

    inside(work)


@pytest.mark.parametrize("keep_processes", [True, False])
def test_a_snapshot_is_the_start_of_any_number(inside, keep_processes):
    async def work(backend, sandbox):
        await said(sandbox, "mkdir d && cd d && export V='a b' && echo 1 >f; ln -s f l")
        await said(sandbox, "sleep 100 & echo $! >../pid")
        snapshot = await sandbox.snapshot(keep_processes=keep_processes)
        lives = await sandbox.exec("kill -0 $(cat ../pid)", limits=LIMITS)
        assert (lives.exit_code == 0) == keep_processes
        assert (
            await said(sandbox, "pwd; echo $V; echo 2 >f; cat l") == "/workspace/d\na b\n2"
        )
        archive = await backend.pack(snapshot)
        for start in (snapshot, await backend.unpack(archive, LIMITS), snapshot):
            fork = await backend.open(LIMITS, snapshot=start)
            try:
                here = await said(fork, "pwd; echo $V; cat l; echo 3 >f")
                assert here == "/workspace/d\na b\n1"
            finally:
                await fork.close()
        assert await said(sandbox, "cat l") == "2"

    inside(work)


def test_a_grader_says_its_verdict_where_nobody_else_can(loop_and_backend):
    runner, backend, _ = loop_and_backend
    program = textwrap.dedent("""
        import os, sys
        print('{"number": 1, "verdict": {}}')
        def grade(artifacts, payload):
            os.write(1, b'{"number": 1}\\n')
            why = f"{os.getuid()} {os.access('.', os.W_OK)}"
            if payload == "die": os._exit(0)
            return {"components": {"right": float(artifacts["a"] == b"\\0")}, "why": why}
    """)

    async def work():
        grader = Grader(await backend.start_grader(program, LIMITS))
        try:
            for data, right in ((b"\0", 1.0), (b"\0" * (3 << 20), 0.0)):
                verdict = await grader.grade({"a": data}, None, PATIENCE)
                assert verdict["components"] == {"right": right}
                assert verdict["why"] == f"{backend.uids['grader']} False"
            assert backend.uids["grader"] != backend.uids["agent"]
            with pytest.raises(Exception, match="grader_died"):
                await grader.grade({"a": b""}, "die", PATIENCE)
        finally:
            await grader.close()

    runner.run(work())


def test_a_container_that_dies_is_known_by_it(inside, loop_and_backend):
    async def work(backend, sandbox):
        await said(sandbox, "echo 1 >f")
        backend.engine.api.kill(sandbox._container.identity)
        with pytest.raises(SandboxDied) as death:
            await sandbox.exec("echo", limits=LIMITS)
        assert death.value.reason == "sandbox_died"
        assert await said(sandbox, "cat f") == "1"  # the workspace outlives it

    inside(work)


def test_what_is_cancelled_is_ended(inside):
    async def work(backend, sandbox):
        for call in (
            lambda: sandbox.exec(f"sleep {long(6666)}", limits=LIMITS),
            lambda: sandbox.run(("sleep", long(6666)), limits=LIMITS),
            lambda: sandbox.exec(f"sleep {long(6666)}", limits=LIMITS),
        ):
            for seconds in (0.01, 0.5):
                task = asyncio.create_task(call())
                await asyncio.sleep(seconds)
                task.cancel()
                await asyncio.wait([task])
        assert await said(sandbox, "echo fine") == "fine"
        assert not alive(long(6666))

    inside(work)


def test_each_sandbox_has_gpus_of_its_own_while_there_are_some(
    loop_and_backend, tmp_path, monkeypatch
):
    runner, plain, runtime = loop_and_backend
    wanted = Limits(gpus=1)
    asked = []  # of the engine, as that has understood it
    create = engine_lib.Engine._create

    def created(engine, name, labels, arguments):
        made = create(engine, name, labels, arguments)
        asked.append(engine.api.inspect_container(made)["HostConfig"]["DeviceRequests"])
        return made

    monkeypatch.setattr(engine_lib.Engine, "_create", created)

    async def work():
        with pytest.raises(SandboxFailed, match="0 left of 0"):
            await plain.open(wanted)
        if runtime == "runsc":
            with pytest.raises(SandboxUnavailable, match="gives no GPUs"):
                DockerBackend(9, runtime=runtime, gpus=("none-0",))
            return
        backend = DockerBackend(9, gpus=("none-0", "none-1"))
        first, second = [await backend.open(wanted) for _ in range(2)]
        with pytest.raises(SandboxFailed, match="0 left of 2"):
            await backend.open(wanted)
        with pytest.raises(SandboxFailed, match="grader"):
            await backend.start_grader("", wanted)
        without = await backend.open(LIMITS)
        await said(without, "echo fine")
        for sandbox in (first, second):
            with pytest.raises(SandboxFailed):  # there is no such GPU on any machine
                await sandbox.exec("true", limits=wanted)
        assert asked[0] is None
        assert [request["DeviceIDs"] for (request,) in asked[1:]] == [
            ["none-0"],
            ["none-1"],
        ]
        for sandbox in (second, second, without):
            await sandbox.close()
        third = await backend.open(wanted)
        with pytest.raises(SandboxFailed, match="0 left"):
            await backend.open(wanted)
        for sandbox in (first, third):
            await sandbox.close()

        # A fork has no reservation of its own, so it would take what others were promised.
        worker = Worker(backend, FolderStore(str(tmp_path)))
        opening = Open(session_id="a", domain="", limits=wanted)
        assert await worker.handle("1", opening) == Done()
        fork = Fork(session_id="a", new_session_id="b")
        assert (await worker.handle("2", fork)).reason == "bad_request"
        assert await worker.handle("3", Close(session_id="a")) == Done()
        assert sorted(backend._free_gpus) == ["none-0", "none-1"]
        await worker.close()
        await backend.close()

    runner.run(work())


def test_workers_share_the_gpus_and_say_so():
    workers = LocalWorkers(2, backend="docker", gpus=("a", "b", "c", "d"))
    assert workers.largest.gpus == 2
    given = [workers.made_by(number)["options"]["gpus"] for number in range(2)]
    assert sorted(given) == [("a", "c"), ("b", "d")]
    with pytest.raises(ValueError, match="evenly"):
        LocalWorkers(2, gpus=("a",))
    with pytest.raises(ValueError, match="gpus=1"):
        LocalWorkers(1, capacity=machine(), gpus=("a",))


def test_an_image_that_is_not_there_is_an_error(inside):
    async def work(backend, sandbox):
        with pytest.raises(SandboxFailed, match="sandbox/images/build nothing"):
            await backend.open(LIMITS, image="jaxpt-sandbox:nothing")
        with pytest.raises(SandboxUnavailable, match="sandbox/images/build nothing"):
            DockerBackend(8, image="jaxpt-sandbox:nothing")

    inside(work)


def test_the_image_has_what_tasks_ask_for(inside):
    async def work(backend, sandbox):
        script = """
            python --version && pytest --version && ruff --version && git --version
            echo 'int main() { return 0; }' >a.cc && g++ a.cc -o a && ./a && make --version
            git init -q . && git config user.name a && git config user.email a@b
            git commit -q --allow-empty -m a
            echo 'def test(): assert 1 + 1 == 2' >test_a.py && pytest -q -p no:cacheprovider
        """
        limits = Limits(
            wall_seconds=PATIENCE, cpu_seconds=60, memory_bytes=1 << 30, processes=64
        )
        assert "1 passed" in await said(sandbox, "set -e\n" + script, limits)

    inside(work, Limits(memory_bytes=1 << 30, processes=64))


RENDER = """
import bpy
scene = bpy.context.scene
scene.render.engine = "CYCLES"
scene.cycles.device = "CPU"
scene.cycles.samples = 2
scene.render.resolution_x = scene.render.resolution_y = 64
scene.render.filepath = "/workspace/out.png"
bpy.ops.render.render(write_still=True)
"""
SOLID = """
import cadquery, trimesh
solid = cadquery.Workplane("XY").box(2, 3, 4).faces(">Z").hole(1)
cadquery.exporters.export(solid, "out.stl")
mesh = trimesh.load("out.stl")
print(round(solid.val().Volume(), 2), mesh.is_watertight, abs(mesh.volume - 20.86) < 0.1)
"""
LETTER = """
from reportlab.pdfgen import canvas
page = canvas.Canvas("out.pdf")
page.drawString(72, 72, "read me back")
page.save()
"""
GAME = """
extends SceneTree
func _init():
    print(Vector2(3, 4).length())
    quit()
"""


@pytest.mark.parametrize(
    ("image", "program", "command", "output"),
    [
        (
            "blender",
            RENDER,
            "python program >&2; file -b out.png",
            "PNG image data, 64 x 64",
        ),
        ("cad", SOLID, "python program", "20.86 True True"),
        ("documents", LETTER, "python program && pdftotext out.pdf -", "read me back"),
        ("godot", GAME, "mv program a.gd && godot3-server -s a.gd", "\n5"),
    ],
    ids=["blender", "cad", "documents", "godot"],
)
def test_an_image_does_what_it_is_for(
    inside, loop_and_backend, image, program, command, output
):
    name = f"jaxpt-sandbox:{image}"
    try:
        loop_and_backend[1].engine.check_image(name)
    except SandboxFailed as error:
        pytest.skip(f"{error}")
    limits = Limits(
        wall_seconds=2 * PATIENCE, cpu_seconds=60, memory_bytes=4 << 30, processes=64
    )

    async def work(backend, _):
        sandbox = await backend.open(limits, image=name)
        try:
            await sandbox.write_files({"program": program.encode()})
            assert output in await said(sandbox, command, limits)
            if image == "blender":
                found = await sandbox.read_files(("out.png",), max_bytes=1 << 20)
                assert found["out.png"].startswith(b"\x89PNG\r\n")
        finally:
            await sandbox.close()

    inside(work)


def test_nothing_is_left(loop_and_backend):
    runner, backend, runtime = loop_and_backend

    async def work():
        other = DockerBackend(9, runtime=runtime)
        folder = other._folder
        sandboxes = [await other.open(LIMITS) for _ in range(2)]
        await asyncio.gather(*(said(sandbox, "echo 1 >f") for sandbox in sandboxes))
        assert folder in Path("/proc/self/mountinfo").read_text()
        for sandbox in sandboxes:
            await sandbox.close()
        await other.close()
        assert not os.path.exists(folder)
        assert folder not in Path("/proc/self/mountinfo").read_text()
        names = [c["Names"][0] for c in backend.engine.api.containers(all=True)]
        assert not [name for name in names if f"-{os.getpid()}-" in name]

    runner.run(work())


def test_what_a_dead_worker_left_is_removed(loop_and_backend):
    _, backend, runtime = loop_and_backend
    nap = long(5555)
    script = f"""
import asyncio, os
from sandbox.backends.docker.backend import DockerBackend
from sandbox.protocol import Limits

async def leave():
    sandbox = await DockerBackend(10, runtime={runtime!r}).open(Limits())
    await sandbox.exec("sleep {nap} &", limits=Limits())
    os._exit(0)

print(os.getpid(), flush=True)
asyncio.run(leave())
"""
    command = [sys.executable, "-c", script]
    left = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    child = int(left.stdout)
    deadline = time.monotonic() + PATIENCE
    while alive(nap):  # even before anyone comes to clean up
        assert time.monotonic() < deadline
        time.sleep(0.05)
    backend.engine.remove_those_of_the_dead()
    assert not list(Path(engine_lib.FOLDER).glob(f"{child}-*"))
    names = [c["Names"][0] for c in backend.engine.api.containers(all=True)]
    assert not [name for name in names if f"-{child}-" in name]
