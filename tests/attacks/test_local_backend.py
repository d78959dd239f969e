"""Hostile programs in a local sandbox: each costs its own episode and nothing else.

Beside each attack an honest job runs in the same pool, and must be graded as ever.
"""

import contextlib
import os
import signal
import socket
import textwrap
import time
from pathlib import Path

import pytest

from sandbox import cgroups
from sandbox.local_workers import LocalWorkers
from sandbox.pool import Pool
from sandbox.protocol import Execution, Grading, Job, Limits

PATIENCE = 120  # seconds; only a hang takes so long
SECRET = "correct-horse-battery"
GRADER = """
def grade(artifacts, payload):
    return {
        "components": {"right": float(artifacts["out"] == payload.encode())},
        "why": artifacts["out"].decode(errors="replace"),
    }
"""
HONEST = "open('out', 'w').write('5')"


def job(job_id, code, **limits):
    source = code if isinstance(code, bytes) else textwrap.dedent(code).encode()
    return Job(
        job_id=job_id,
        domain="attacks",
        execution=Execution(
            command=("python", "-I", "-S", "main.py"),
            files={"main.py": source},
            artifacts=("out",),
            limits=Limits(**({"wall_seconds": 30} | limits)),
        ),
        grading=Grading(program=GRADER, payload="5", limits=Limits(wall_seconds=30)),
    )


def alive(marker: str) -> list[str]:
    """Processes of the machine with the marker among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


@pytest.fixture(scope="module")
def pool():
    os.environ["JAXPT_TEST_SECRET"] = SECRET
    with Pool(LocalWorkers(2)) as pool:
        del os.environ["JAXPT_TEST_SECRET"]
        yield pool


@pytest.fixture
def attack(pool, request):
    """Runs a hostile program beside an honest one and returns what came of it."""

    def attack(code, **limits):
        name = request.node.name
        pids = pool.workers.pids
        hostile = pool.submit(job(f"{name} hostile", code, **limits))
        beside = pool.submit(job(f"{name} beside", HONEST))
        result = hostile.result(PATIENCE)
        after = pool.submit(job(f"{name} after", HONEST))
        for honest in (beside.result(PATIENCE), after.result(PATIENCE)):
            assert (honest.outcome, honest.attempts) == ("ok", 1)
            assert honest.verdict["components"] == {"right": 1.0}
        # It was the program's doing, so it is not tried again, and no worker suffered.
        assert result.attempts == 1
        assert set(pids) <= set(pool.workers.pids)
        return result

    return attack


def told(result) -> str:
    """What the program wrote down for us; it must have come to its end."""
    assert result.outcome == "ok", result
    return result.verdict["why"]


@pytest.mark.parametrize(
    ("code", "reasons", "limits"),
    [
        ("while True: pass", {"cpu_timeout"}, {"cpu_seconds": 1}),
        (
            "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
            "while True: pass",
            {"killed_by_signal_9"},
            {"cpu_seconds": 1},
        ),
        (
            "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
            {"wall_timeout", "cpu_timeout"},
            {"wall_seconds": 2},
        ),
        (
            "import os\nwhile os.fork() == 0: pass",  # each child forks and lives on
            {"missing_artifact", "nonzero_exit"},
            {},
        ),
        ("import os; os.kill(-1, 9)", {"nonzero_exit"}, {}),  # there is nobody
        ("import os; os._exit(0)", {"missing_artifact"}, {}),
        (b"\xff\xfe\x00\x80", {"nonzero_exit"}, {}),
        (b"", {"missing_artifact"}, {}),
        (
            "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
            {"killed_by_signal_11", "out_of_memory", "cpu_timeout"},
            {},
        ),
    ],
)
def test_a_program_that_only_breaks(attack, code, reasons, limits):
    result = attack(code, **limits)
    assert result.outcome == "policy_fail" and result.reason in reasons


def test_a_flood_of_output_keeps_head_and_tail(attack):
    result = attack(
        """
        import os
        os.write(1, b"first")
        block = b"x" * 10**6
        for _ in range(100):
            for stream in (1, 2):
                left = memoryview(block)
                while left:
                    left = left[os.write(stream, left):]
        os.write(1, b"last")
        open("out", "w").write("5")
        """,
        output_bytes=1000,
    )
    assert result.outcome == "ok"
    assert result.stdout.total_bytes == 10**8 + 9
    assert result.stderr.total_bytes == 10**8
    assert result.stdout.head == b"first" + b"x" * 495
    assert result.stdout.tail == b"x" * 496 + b"last"


def test_a_flood_without_end_is_cut_off(attack):
    result = attack("while True: print('x' * 10**5)", wall_seconds=1, cpu_seconds=30)
    assert result.reason == "wall_timeout"
    assert len(result.stdout.text()) < 17_000 < result.stdout.total_bytes


def test_output_of_any_bytes(attack):
    code = b"import sys\nsys.stdout.buffer.write(bytes(range(256)))\n"
    result = attack(code + HONEST.encode())
    assert result.stdout.head == bytes(range(256))
    assert "\ufffd" in result.stdout.text()


@pytest.mark.parametrize("how", ["child", "setsid", "double_fork", "ignores_signals"])
@pytest.mark.parametrize("ending", ["exits", "is_killed"])
def test_nothing_of_a_program_is_left(attack, how, ending):
    marker = f"survivor-{how}-{ending}-{os.getpid()}"
    result = attack(
        f"""
        import os, signal, sys, time
        ready, up = os.pipe()
        if os.fork() == 0:
            if "{how}" == "setsid":
                os.setsid()
            if "{how}" == "double_fork" and os.fork():
                os._exit(0)
            if "{how}" == "ignores_signals":
                for number in range(1, 32):
                    if number not in (signal.SIGKILL, signal.SIGSTOP):
                        signal.signal(number, signal.SIG_IGN)
            os.write(up, b".")
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c",
                     "import time; time.sleep(1000)", "{marker}"])
        os.read(ready, 1)
        open("out", "w").write("5")
        if "{ending}" == "is_killed":
            time.sleep(1000)
        """,
        wall_seconds=2 if ending == "is_killed" else 30,
    )
    assert alive(marker) == []
    assert result.reason == ("graded" if ending == "exits" else "wall_timeout")


def test_a_late_writer_is_too_late(attack):
    result = attack(
        """
        import os, time
        ready, up = os.pipe()
        if os.fork() == 0:
            os.setsid()
            file = open("out", "r+b", buffering=0)
            os.write(up, b".")
            time.sleep(0.05)
            while True:
                file.seek(0)
                file.write(b"5")
        open("out", "w").write("6")
        os._exit(0)
        """
    )
    # Whichever came first: the main program's end is the end of its children.
    assert result.reason == "graded"
    assert result.verdict["components"] == {"right": 0.0}


def test_processes_are_counted_over_the_whole_tree(attack):
    result = attack(
        """
        import os, time
        made = 0
        try:
            while made < 500:
                if os.fork() == 0:
                    time.sleep(1000)
                made += 1
        except OSError:
            pass
        open("out", "w").write(str(made))
        """,
        processes=8,
    )
    assert 4 <= int(told(result)) <= 8


def test_memory_runs_out_for_each_process(attack):
    result = attack("x = bytearray(300 << 20)", memory_bytes=200 << 20)
    assert result.reason == "out_of_memory"


needs_groups = pytest.mark.skipif(
    not any(
        "memory" in found.controllers and os.access(found.folder, os.W_OK)
        for found in cgroups.hierarchies()
    ),
    reason="memory cannot be bounded by control groups here",
)


@needs_groups
def test_memory_runs_out_for_all_processes_together(attack):
    result = attack(
        """
        import os, time
        children = []
        for _ in range(6):
            if (pid := os.fork()) == 0:
                block = bytearray(100 << 20)
                time.sleep(30)
                os._exit(0)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in children[:1]]
        raise SystemExit(f"ended with {codes}")
        """,
        memory_bytes=200 << 20,
    )
    assert (result.outcome, result.reason) == ("policy_fail", "out_of_memory"), result


@needs_groups
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_no_group_outlives_its_pool(how):
    def groups():
        return {
            group
            for hierarchy in cgroups.hierarchies()
            for group in hierarchy.folder.glob("jaxpt-sandbox-*")
        }

    with Pool(LocalWorkers(1)) as pool:
        (pid,) = pool.workers.pids
        own = {group for group in groups() if f"-{pid}-" in group.name}
        assert own
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
            assert pool.submit(job("after", HONEST)).result(PATIENCE).outcome == "ok"
            assert not own & groups()
    assert not own & groups()


def test_the_disk_is_bounded_wherever_one_can_write(attack):
    mib = 1 << 20
    result = attack(
        """
        import os
        total = 0
        for folder in ("/workspace", "/tmp", "/dev/shm", "/dev", "/", "/usr", "/proc"):
            for number in range(1000):
                try:
                    with open(f"{folder}/{number}", "wb") as file:
                        for _ in range(15):
                            total += file.write(bytes(1 << 20))
                            file.flush()
                except OSError:
                    break
        for number in range(1000):
            try:
                os.remove(f"/workspace/{number}")
            except OSError:
                break
        open("out", "w").write(str(total))
        """,
        workspace_bytes=32 * mib,
        cpu_seconds=20,
    )
    assert 20 * mib < int(told(result)) <= (32 + 16 + 16 + 7) * mib


def test_files_without_number_end(attack):
    result = attack(
        """
        made = 0
        try:
            while made < 100_000:
                open(f"file {made}", "w").close()
                made += 1
        except OSError:
            pass
        import os
        os.remove("file 0")
        open("out", "w").write(str(made))
        """,
        cpu_seconds=20,
    )
    assert int(told(result)) < 20_000  # one for each 4 KiB of the workspace


def test_no_memory_can_be_mounted(attack):
    result = attack(
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        new_user, new_mount = 0x10000000, 0x20000
        found = [
            libc.unshare(new_user | new_mount), libc.unshare(new_user),
            libc.unshare(new_mount),
            libc.mount(b"none", b"/tmp", b"tmpfs", 0, b"size=1G"),
        ]
        open("out", "w").write(str(found))
        """
    )
    assert told(result) == "[-1, -1, -1, -1]"


def test_there_is_no_network(attack):
    with socket.create_server(("127.0.0.1", 0)) as server:
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0jaxpt-{os.getpid()}")
        abstract.listen()
        with abstract:
            result = attack(
                f"""
                import socket
                found = [name for _, name in socket.if_nameindex() if name != "lo"]
                targets = [
                    (socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
                    (socket.AF_INET, ("192.0.2.1", 80)),
                    (socket.AF_INET6, ("::1", {server.getsockname()[1]})),
                    (socket.AF_UNIX, "\\0jaxpt-{os.getpid()}"),
                ]
                for family, address in targets:
                    connection = socket.socket(family)
                    connection.settimeout(1)
                    try:
                        connection.connect(address)
                        found.append(address)
                    except OSError:
                        pass
                open("out", "w").write(repr(found))
                """
            )
    assert told(result) == "[]"


def test_the_hosts_files_and_secrets_are_out_of_sight(attack, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    result = attack(
        f"""
        import glob, os
        found = []
        for path in ("/etc/shadow", "/etc/hostname", "/proc/kcore", "/dev/mem",
                     "/var", "/home", "/opt", "/srv", "/sys", "/run",
                     {str(secret)!r}, {str(Path(__file__).resolve())!r}):
            if os.access(path, os.R_OK):
                found.append(path)
        try:
            # A folder on the way to Python may be there, but with nothing else in it.
            found += [path for path in os.listdir("/root") if path != ".pyenv"]
        except OSError:
            pass
        for path in glob.glob("/proc/[0-9]*/*"):
            if path.endswith(("/environ", "/cmdline", "/mem")):
                try:
                    with open(path, "rb") as file:
                        if b"horse" + b"-battery" in file.read(10**6):
                            found.append(path)
                except OSError:
                    pass
        known = ("PATH", "HOME", "LANG", "TZ", "PYTHONHASHSEED", "PWD",
                 "PYTHONDONTWRITEBYTECODE")
        found += [name for name in os.environ if name not in known]
        found += [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 3]  # its own
        open("out", "w").write(repr(found))
        """
    )
    assert told(result) == "[]"


def test_nothing_outside_the_workspace_can_be_changed(attack):
    result = attack(
        """
        import os, sys
        found = []
        for folder in ("/", "/usr", "/usr/bin", "/bin/", "/lib/", "/dev", "/proc/sys",
                       "/proc/sys/kernel", sys.prefix, "/grader", "/etc"):
            path = f"{folder}/planted"
            try:
                open(path, "w").close()
                found.append(path)
            except OSError:
                pass
        for path in ("/proc/sys/kernel/hostname", "/proc/sysrq-trigger",
                     "/proc/self/uid_map", "/proc/self/gid_map", os.__file__,
                     sys.executable):
            try:
                with open(path, "w") as file:
                    file.write("0")
                found.append(path)
            except OSError:
                pass
        open("out", "w").write(repr(found))
        """
    )
    assert told(result) == "[]"


def test_it_has_no_powers_and_sees_only_itself(attack):
    result = attack(
        """
        import os
        found = []
        for line in open("/proc/self/status"):
            name, _, value = line.partition(":")
            if name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
                if int(value, 16):
                    found.append(line)
            if name == "NoNewPrivs" and value.strip() != "1":
                found.append(line)
            if name == "Groups" and set(value.split()) - {str(os.getgid())}:
                found.append(line)
        if len([pid for pid in os.listdir("/proc") if pid.isdigit()]) > 3:
            found.append("processes")
        calls = (lambda: os.setuid(0), lambda: os.chroot("/tmp"), lambda: os.nice(-5))
        for call in calls:
            try:
                call()
                found.append("call")
            except OSError:
                pass
        open("out", "w").write(repr(found))
        """
    )
    assert told(result) == "[]"


def test_calls_that_act_on_the_machine_do_not_exist(attack):
    result = attack(
        """
        import ctypes, errno, platform, socket
        libc = ctypes.CDLL(None, use_errno=True)
        found = []
        def refused(name, returned):
            if returned != -1 or ctypes.get_errno() != errno.ENOSYS:
                found.append((name, returned, ctypes.get_errno()))
        refused("ptrace", libc.ptrace(0, 0, 0, 0))
        refused("unshare", libc.unshare(0x10000000))
        refused("setns", libc.setns(0, 0))
        refused("mount", libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
        refused("umount", libc.umount2(b"/tmp", 0))
        refused("personality", libc.personality(0))
        numbers = {
            "pivot_root": 155, "keyctl": 250, "add_key": 248, "request_key": 249,
            "perf_event_open": 298, "open_by_handle_at": 304, "process_vm_readv": 310,
            "process_vm_writev": 311, "kcmp": 312, "bpf": 321, "userfaultfd": 323,
            "init_module": 175, "kexec_load": 246, "io_uring_setup": 425,
            "open_tree": 428, "move_mount": 429, "fsopen": 430, "clone3": 435,
            "pidfd_getfd": 438, "mount_setattr": 442, "a later kernel's": 600,
        }
        if platform.machine() == "x86_64":
            for name, number in numbers.items():
                refused(name, libc.syscall(number, 0, 0, 0, 0, 0, 0))
            for flag in (17, 25, 26, 27, 28, 29, 30):  # SIGCHLD with a new namespace
                returned = libc.syscall(56, 17 | 1 << flag, 0, 0, 0, 0)
                if returned == 0:
                    libc._exit(0)
                refused(f"clone with {flag}", returned)
        for family in (socket.AF_PACKET, socket.AF_VSOCK, socket.AF_ALG):
            refused(family.name, libc.socket(family, socket.SOCK_RAW, 0))
        open("out", "w").write(repr(found))
        """,
        processes=32,
    )
    assert told(result) == "[]"


def test_what_honest_programs_do_is_not_refused(attack):
    result = attack(
        """
        import os, socket, subprocess, tempfile, threading
        ran = []
        thread = threading.Thread(target=lambda: ran.append("thread"))
        thread.start()
        thread.join()
        ran.append(subprocess.run(["sh", "-c", "echo sh | cat"], capture_output=True,
                                  text=True, check=True).stdout.strip())
        a, b = socket.socketpair()
        a.send(b"pair")
        ran.append(b.recv(9).decode())
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        client.send(b"loopback")
        ran.append(server.accept()[0].recv(9).decode())
        with tempfile.NamedTemporaryFile("w+") as file:
            file.write("file")
            file.seek(0)
            ran.append(file.read())
        if os.fork() == 0:
            os._exit(7)
        ran.append(os.waitstatus_to_exitcode(os.wait()[1]))
        open("out", "w").write(repr(ran))
        """
    )
    assert told(result) == repr(["thread", "sh", "pair", "loopback", "file", 7])


def test_each_worker_has_users_of_its_own(pool):
    if os.getuid() != 0:
        pytest.skip("only root can give its sandboxes other users")
    marker = f"whoami-{os.getpid()}"
    code = f"""
    import os, sys
    command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"]
    os.execv(sys.executable, [*command, "{marker}"])
    """
    futures = [pool.submit(job(f"{marker} {n}", code, wall_seconds=2)) for n in "ab"]
    users: set[int] = set()
    while not all(future.done() for future in futures):
        for pid in alive(marker):
            with contextlib.suppress(OSError):
                # Not of the folder in /proc: that is root's where it can't be dumped.
                status = Path(f"/proc/{pid}/status").read_text()
                line = status[status.index("Uid:") :].splitlines()[0]
                users |= {int(word) for word in line.split()[1:]}
        time.sleep(0.02)
    assert len(users) == 2 and 0 not in users


def test_out_of_memory_the_kernel_takes_the_sandbox_first(attack):
    result = attack(
        "open('out', 'w').write(open('/proc/self/oom_score_adj').read().strip())"
    )
    assert told(result) == "1000"
    assert Path("/proc/self/oom_score_adj").read_text().strip() != "1000"


def test_the_grader_is_another_user_in_namespaces_of_its_own():
    program = """
import os
def grade(artifacts, payload):
    names = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
    mine = {name: os.readlink(f"/proc/self/ns/{name}") for name in names}
    theirs = eval(artifacts["out"])
    same = [name for name in names if mine[name] in (theirs[name], payload[name])]
    # What is here are the grader's own files, which it can't write.
    here = [name for name in sorted(os.listdir("/workspace")) if os.access(name, os.W_OK)]
    outside = open("/proc/self/uid_map").read().split()[1]
    return {"components": {}, "why": repr([same, here, outside == theirs["uid"]])}
"""
    names = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
    outside = {name: os.readlink(f"/proc/self/ns/{name}") for name in names}
    code = f"""
    import os
    found = {{name: os.readlink(f"/proc/self/ns/{{name}}") for name in {names}}}
    found["uid"] = open("/proc/self/uid_map").read().split()[1]
    open("out", "w").write(repr(found))
    """
    execution = job("namespaces", code).execution
    # The kernel gives the numbers of namespaces that are gone to new ones. So it is the
    # second time that counts, when the grader is there already while the program runs.
    with Pool(LocalWorkers(1)) as pool:
        for number in ("first", "second"):
            graded = Job(
                job_id=number,
                domain="attacks",
                execution=execution,
                grading=Grading(program=program, payload=outside),
            )
            result = pool.submit(graded).result(PATIENCE)
    same_uid = os.getuid() != 0  # without root there is only one
    assert told(result) == repr([[], [], same_uid])


def test_one_episode_leaves_nothing_to_the_next(pool):
    leave = """
    import os
    found = [f"{folder}/mark" for folder in ("/workspace", "/tmp", "/dev/shm")
             if os.path.exists(f"{folder}/mark")]
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        open(f"{folder}/mark", "w").close()
    open("out", "w").write(repr(found))
    """
    futures = [pool.submit(job(f"leave {number}", leave)) for number in range(4)]
    assert [told(future.result(PATIENCE)) for future in futures] == ["[]"] * 4


def test_its_first_process_is_safe_from_it(attack):
    result = attack(
        """
        import os, signal
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGINT):
            try:
                os.kill(1, number)
            except OSError:
                pass
        open("out", "w").write("5")
        """
    )
    assert result.reason == "graded"


def test_many_hostile_programs_at_once_delay_nobody_for_long(pool):
    started = time.monotonic()
    attacks = [
        pool.submit(job(f"crowd {i}", "import time; time.sleep(60)", wall_seconds=0.2))
        for i in range(10)
    ]
    honest = [pool.submit(job(f"crowd honest {i}", HONEST)) for i in range(10)]
    assert {future.result(PATIENCE).reason for future in attacks} == {"wall_timeout"}
    assert {future.result(PATIENCE).outcome for future in honest} == {"ok"}
    assert time.monotonic() - started < 60  # one sleep; they were all cut short
