"""Ways out: files, processes, calls, powers, the network."""

import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from sandbox.protocol import Limits
from tests.attacks.arena import PATIENCE, SECRET, alive, job, told


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
    folders = ("/etc/hostname", "/etc", "/var", "/home", "/opt", "/srv", "/sys", "/run")
    machine = {path: (os.stat(path).st_dev, os.stat(path).st_ino) for path in folders}
    result = attack(
        f"""
        import glob, os
        found = []
        for path, number in {machine!r}.items():
            # An image may have such a path as well, but not the machine's.
            if os.path.exists(path):
                here = os.stat(path)
                if (here.st_dev, here.st_ino) == number:
                    found.append(path)
        for path in ("/etc/shadow", "/proc/kcore", "/dev/mem", {str(secret)!r},
                     {str(Path(__file__).resolve())!r}):
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


def test_sandboxes_side_by_side_do_not_see_each_other(pool):
    first = pool.open("attacks", Limits()).result(PATIENCE)
    second = pool.open("attacks", Limits()).result(PATIENCE)
    listen = """python3 -c '
import ctypes, socket, time
libc = ctypes.CDLL(None)
print(libc.shmget(4711, 4096, 0o1666), libc.msgget(4711, 0o1666))
held = [socket.create_server(("127.0.0.1", 4711)), socket.socket(socket.AF_UNIX)]
held[1].bind("\\0jaxpt")
held[1].listen()
open("/dev/shm/mark", "w"), open("/tmp/mark", "w"), open("ready", "w")
time.sleep(999)' & while [ ! -e ready ]; do sleep 0.01; done"""
    look = """python3 -c '
import ctypes, os, socket
libc = ctypes.CDLL(None)
numbers = (libc.shmget(4711, 0, 0), libc.msgget(4711, 0))
found = [number for number in numbers if number >= 0]
internet, local = (socket.AF_INET, ("127.0.0.1", 4711)), (socket.AF_UNIX, "\\0jaxpt")
for family, address in (internet, local):
    try:
        socket.socket(family).connect(address)
        found.append(address)
    except OSError: pass
found += [path for path in ("/dev/shm/mark", "/tmp/mark", "ready") if os.path.exists(path)]
for pid in range(2, 300):
    try:
        os.kill(pid, 0)
        if pid not in (os.getpid(), os.getppid()): found.append(pid)
    except OSError: pass
print(found)'"""
    ran = first.exec(listen).result(PATIENCE)
    assert ran.reason is None, ran
    assert first.exec(look).result(PATIENCE).stdout.text().strip() != "[]"  # it can see
    assert second.exec(look).result(PATIENCE).stdout.text().strip() == "[]"
    for session in (first, second):
        session.close().result(PATIENCE)


def test_processes_outside_get_no_signal(attack):
    with subprocess.Popen(["sleep", "60"]) as outside:
        result = attack(
            f"""
            import os, signal
            reached = []
            for pid in (1, {outside.pid}, {os.getpid()}, {os.getppid()}, -{os.getpgrp()}):
                try:
                    os.kill(pid, 0 if pid == 1 else signal.SIGKILL)
                    reached.append(pid)
                except OSError:
                    pass
            open("out", "w").write(repr(reached))
            """
        )
        assert outside.poll() is None
        outside.kill()
    assert told(result) in ("[]", "[1]")  # its own first process is there to be asked


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "/proc/1/environ", "/proc/self/environ", "/dev/zero", "../x", "."],
)
def test_no_link_leads_out_of_the_workspace(attack, path):
    result = attack(f"import os; os.symlink({path!r}, 'out')")
    assert (result.outcome, result.reason) == ("policy_fail", "artifact_not_regular")


def test_no_name_is_looked_up(attack):
    result = attack(
        """
        import socket
        found = []
        for name in ("example.com", "metadata.google.internal", "host.docker.internal"):
            try:
                found += socket.getaddrinfo(name, 80)
            except OSError:
                pass
        packet = b"\\0\\1\\1\\0\\0\\1" + bytes(6) + b"\\7example\\3com\\0\\0\\1\\0\\1"
        for server in ("8.8.8.8", "169.254.169.254", "127.0.0.53", "172.17.0.1"):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
                asked.settimeout(0.2)
                try:
                    asked.sendto(packet, (server, 53))
                    found.append(asked.recv(512))
                except OSError:
                    pass
        open("out", "w").write(repr(found))
        """
    )
    assert told(result) == "[]"
