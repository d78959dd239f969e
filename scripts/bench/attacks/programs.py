"""Hostile programs, and how each is found out: the rows of the containment matrix.

A program prints `THROUGH what` for each thing that it should not have been able to do,
`ABSENT why` if what it attacks is not there, and `TRIED` at its end. What only the host can
see, such as a victim that is dead, `Attack.check` looks for. Programs run as root on the
bare machine where a peer does not isolate: all are bounded, touch only what `host.Host`
made for them, and undo what they did.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

# Of the complaints in field/sandbox.md, those that are no attack and no leak here, and so
# no row: 4 and 5 (start and stop of Docker deployments), 13 to 16 and 26 to 28 (outcomes,
# retries, machines that differ), 17 (half-open sockets), 18 (git histories of data sets),
# 22 (judges that are language models), 29 (renderers).

PRELUDE = """
import ctypes, json, os, resource, signal, socket, struct, subprocess, sys, time
with open("arguments.json") as file:
    given = json.load(file)
libc = ctypes.CDLL(None, use_errno=True)
MARKER, VICTIM = given["marker"], given["victim"]

def through(*what):
    print("THROUGH", *what, flush=True)

def lingering(**how):
    # A process that can be told by its name, for five minutes at most.
    return subprocess.Popen(["bash", "-c", 'exec -a "$0" sleep 300', MARKER],
                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL, **how)

def allowed(what, call, *arguments):
    try:
        returned = call(*arguments)
    except OSError:
        return None
    through(what)
    return returned
"""


@dataclasses.dataclass
class Scene:
    """What a check may look at: `system` and `host` as containment.py has them.

    output: what the program printed. timed_out: whether it was ended by its time limit.
    """

    system: Any
    session: Any
    host: Any
    marker: str
    output: str
    timed_out: bool


def none(scene: Scene) -> str | None:
    """Nothing but what the program says of itself."""
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attack:
    """A row.

    complaints: rows of the table in field/sandbox.md; empty if of the issue's list alone.
    seconds: its time limit. ends: whether it comes to its end within that.
    check: what got through, if anything; called once the program has been ended.
    """

    name: str
    program: str
    complaints: str = ""
    seconds: float = 10.0
    ends: bool = True
    check: Callable[[Scene], str | None] = none


def survivors(scene: Scene) -> str | None:
    """Processes that are alive a second after the end of what started them."""
    deadline = time.monotonic() + 1.0
    while alive := scene.host.alive(scene.marker):
        if time.monotonic() > deadline:
            return f"{len(alive)} processes live on"
        time.sleep(0.05)
    return None


def survivors_of_close(scene: Scene) -> str | None:
    scene.system.close(scene.session)
    return survivors(scene)


def victim_died(scene: Scene) -> str | None:
    return None if scene.host.victim_lives() else "a process of the host's was killed"


def was_reached(scene: Scene) -> str | None:
    time.sleep(0.2)
    return ", ".join(sorted(scene.host.reached)) or None


def file_outside(scene: Scene) -> str | None:
    return ", ".join(str(path) for path in scene.host.planted_outside()) or None


def session_answers(scene: Scene) -> str | None:
    ran = scene.system.exec(scene.session, "echo answer", 5.0).result(15)
    return None if "answer" in ran.output else "the session is of no use any more"


def another_session_answers(scene: Scene) -> str | None:
    session = scene.system.open()
    try:
        ran = scene.system.exec(session, "echo answer", 5.0).result(15)
    finally:
        scene.system.close(session)
    return None if "answer" in ran.output else "no other session can be had"


def link_is_read(scene: Scene) -> str | None:
    data, _ = scene.system.read(scene.session, "out")
    return "a file of the host's was read" if scene.host.secret.encode() in data else None


def link_is_written(scene: Scene) -> str | None:
    scene.system.write(scene.session, "link/planted", b"5")
    return file_outside(scene)


def artifact_is_large(scene: Scene) -> str | None:
    _, size = scene.system.read(scene.session, "out")
    return f"{size} bytes were read into memory" if size >= 300 << 20 else None


def flood_is_kept(scene: Scene) -> str | None:
    if "LAST" not in scene.output:
        return "the end of the output is lost"
    return None if scene.system.kept_bytes <= 12 << 20 else "all of the output is kept"


def bytes_arrive(scene: Scene) -> str | None:
    if "LAST" not in scene.output:
        return "the output after them is lost"
    return session_answers(scene)


def segment_outside(scene: Scene) -> str | None:
    return scene.host.remove_segment()


def seen_by_another(scene: Scene) -> str | None:
    session = scene.system.open()
    try:
        script = f"test -e /tmp/{scene.marker} && echo seen"
        ran = scene.system.exec(session, script, 5.0).result(15)
    finally:
        scene.system.close(session)
    return "another session sees its files" if "seen" in ran.output else None


_SURVIVORS = {
    "a child in the background": "lingering()",
    "a child with setsid": "lingering(start_new_session=True)",
    "a double fork": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        lingering()
    os._exit(0)
""",
    "a child that ignores signals": """
def ignore():
    os.setsid()
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
lingering(preexec_fn=ignore)
""",
}

ATTACKS = [
    *(
        Attack(
            name=f"timeout leaves {name}",
            complaints="1, 31",
            program=f"{code}\ntime.sleep(300)",
            seconds=2.0,
            ends=False,
            check=survivors,
        )
        for name, code in _SURVIVORS.items()
    ),
    *(
        Attack(
            name=f"close leaves {name}",
            complaints="11",
            program=code,
            check=survivors_of_close,
        )
        for name, code in list(_SURVIVORS.items())[1:3]
    ),
    Attack(
        name="a loop without end",
        complaints="10",
        program="""
os.execv("/bin/bash", [MARKER, "-c", "while :; do :; done"])
""",
        seconds=2.0,
        ends=False,
        check=survivors,
    ),
    Attack(
        name="kill of what is above the shell",
        complaints="3",
        program="""
def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
above = parent(os.getppid()) if os.getppid() > 1 else 1
if os.getppid() == given["harness"]:
    above = os.getppid()  # nothing was between
mine = os.readlink("/proc/self/ns/pid") != given["process_namespace"]
if above == given["harness"] or mine:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(above, number)
        except OSError:
            pass
        time.sleep(0.2)
""",
        check=another_session_answers,
    ),
    Attack(
        name="the shell is stopped",
        complaints="3",
        program="""
with open(f"/proc/{os.getppid()}/comm") as file:
    shell = file.read().strip() == "bash" and os.getppid() != given["harness"]
if not shell:
    print("ABSENT it has no shell that stays")
    sys.exit()
os.kill(os.getppid(), signal.SIGSTOP)
time.sleep(300)
""",
        seconds=2.0,
        ends=False,
        check=another_session_answers,
    ),
    Attack(
        name="20 MB of output",
        complaints="8",
        program="""
for _ in range(20):
    sys.stdout.write(("x" * 99 + "\\n") * 10_000)
print("LAST", flush=True)
""",
        check=flood_is_kept,
    ),
    Attack(
        name="output of every byte, and of terminal codes",
        complaints="6",
        program="""
sys.stdout.buffer.write(bytes(range(256)) * 3 + b"\\x1b[2J\\x1b]0;x\\x07\\xf0\\x9f\\n")
print("LAST", flush=True)
""",
        check=bytes_arrive,
    ),
    Attack(
        name="fork bomb (200 processes)",
        complaints="23",
        program="""
children = []
try:
    for _ in range(200):
        if (pid := os.fork()) == 0:
            time.sleep(8)
            os._exit(0)
        children.append(pid)
    through("200 processes")
except OSError:
    pass
for pid in children:
    os.kill(pid, signal.SIGKILL)
""",
    ),
    Attack(
        name="memory bomb (1 GiB in 4 processes)",
        complaints="9, 23",
        program="""
readable, writable = os.pipe()
children = []
for _ in range(4):
    if (pid := os.fork()) == 0:
        blocks = []
        for _ in range(8):
            blocks.append(bytearray(b"x") * (32 << 20))
            os.write(writable, b".")
        time.sleep(8)
        os._exit(0)
    children.append(pid)
os.close(writable)
os.set_blocking(readable, False)
counted, deadline = 0, time.monotonic() + 6
while counted < 32 and time.monotonic() < deadline:
    time.sleep(0.1)
    try:
        said = os.read(readable, 64)
    except BlockingIOError:
        continue
    if not said:
        break
    counted += len(said)
if counted == 32:
    through("1 GiB held at once")
for pid in children:
    os.kill(pid, signal.SIGKILL)
""",
        seconds=20.0,
        check=session_answers,
    ),
    Attack(
        name="descriptor bomb (10,000)",
        complaints="23",
        program="""
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
opened = []
try:
    for _ in range(10_000):
        opened.append(os.open("/dev/null", os.O_RDONLY))
    through("10,000 descriptors")
except OSError:
    pass
for file in opened:
    os.close(file)
""",
    ),
    Attack(
        name="disk bomb (200 MB)",
        complaints="3, 25",
        program="""
import tempfile
written, kept = 0, []
for folder in (".", tempfile.gettempdir(), "/dev/shm"):
    try:
        while written < 200:
            path = f"{folder}/{MARKER}-{written}"
            with open(path, "wb", buffering=0) as file:
                kept.append(path)
                for _ in range(10):
                    if file.write(b"x" * 1_000_000) < 1_000_000:
                        raise OSError("full")
                    written += 1
    except OSError:
        pass
if written >= 200:
    through("200 MB were written")
for path in kept:
    os.remove(path)
""",
        seconds=20.0,
        check=session_answers,
    ),
    Attack(
        name="20,000 files",
        complaints="25",
        program="""
os.mkdir("many")
made = 0
try:
    while made < 20_000:
        os.close(os.open(f"many/{made}", os.O_CREAT | os.O_WRONLY))
        made += 1
    through("20,000 files")
except OSError:
    pass
for number in range(made):
    os.remove(f"many/{number}")
""",
        seconds=20.0,
    ),
    Attack(
        name="sparse artifact of 300 MiB",
        program="""
try:
    with open("out", "wb") as file:
        file.truncate(300 << 20)
except OSError:
    pass
""",
        check=artifact_is_large,
    ),
    Attack(
        name="signal to a process of the host's",
        program="""
for number in (signal.SIGTERM, signal.SIGKILL):
    try:
        os.kill(VICTIM, number)
    except OSError:
        pass
""",
        check=victim_died,
    ),
    Attack(
        name="ptrace of a process of the host's",
        program="""
seize, detach = 0x4206, 17
if libc.ptrace(seize, VICTIM, 0, 0) == 0:
    through("it is traced")
    libc.ptrace(detach, VICTIM, 0, 0)
""",
        check=victim_died,
    ),
    Attack(
        name="memory and environment of processes (/proc)",
        program="""
secret = given["secret"].encode()
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) != os.getpid():
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if secret in file.read(100_000):
                    through("a secret in", f"/proc/{name}/environ")
                    break
        except OSError:
            pass
try:
    os.close(os.open(f"/proc/{VICTIM}/mem", os.O_RDONLY))
    with open(f"/proc/{VICTIM}/cmdline") as file:
        if given["victim_name"] in file.read():
            through("memory of the victim")
except OSError:
    pass
""",
    ),
    Attack(
        name="the harness's environment is inherited",
        program="""
if given["secret"] in os.environ.values():
    through("a secret in its environment")
""",
    ),
    Attack(
        name="descriptors are inherited",
        program="""
mine = {0, 1, 2}
for name in os.listdir("/proc/self/fd"):
    try:
        if int(name) not in mine and "/proc" not in os.readlink(f"/proc/self/fd/{name}"):
            through("descriptor", name, os.readlink(f"/proc/self/fd/{name}"))
    except OSError:
        pass
""",
    ),
    Attack(
        name="kernel settings and memory (/proc, /sys)",
        program="""
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/kcore",
             "/sys/kernel/uevent_helper", "/sys/fs/cgroup/memory/memory.limit_in_bytes",
             "/sys/kernel/mm/transparent_hugepage/enabled", "/dev/mem", "/dev/kmsg"):
    flags = os.O_RDONLY if path in ("/proc/kcore", "/dev/mem") else os.O_WRONLY
    try:
        os.close(os.open(path, flags))  # opened, and left as it is
        through(path)
    except OSError:
        pass
""",
    ),
    Attack(
        name="files of the host's are read",
        program="""
for path in (given["secret_path"], "/etc/shadow"):
    try:
        with open(path) as file:
            if given["secret"] in file.read() or path == "/etc/shadow":
                through(path)
    except OSError:
        pass
""",
    ),
    Attack(
        name="files outside the workspace are written",
        program="""
for folder in given["outside"]:
    try:
        with open(f"{folder}/{MARKER}", "w") as file:
            file.write("5")
    except OSError:
        pass
""",
        check=file_outside,
    ),
    Attack(
        name="/tmp is shared between sessions",
        program="""
with open(f"/tmp/{MARKER}", "w") as file:
    file.write("5")
""",
        check=seen_by_another,
    ),
    Attack(
        name="artifact that is a link out of the workspace",
        complaints="21",
        program='os.symlink(given["secret_path"], "out")',
        check=link_is_read,
    ),
    Attack(
        name="write through a link out of the workspace",
        program='os.symlink(given["outside"][0], "link")',
        check=link_is_written,
    ),
    Attack(
        name="mount",
        program="""
os.mkdir("mounted")
if libc.mount(b"none", b"mounted", b"tmpfs", 0, b"size=1M") == 0:
    through("a mount")
    libc.umount2(b"mounted", 2)
""",
    ),
    Attack(
        name="new user namespace",
        program="""
if os.fork() == 0:
    os._exit(0 if libc.unshare(0x10000000) else 7)
if os.waitstatus_to_exitcode(os.wait()[1]) == 7:
    through("unshare(NEWUSER)")
""",
    ),
    Attack(
        name="capabilities",
        program="""
with open("/proc/self/status") as file:
    for line in file:
        if line.startswith(("CapEff", "CapPrm")) and int(line.split()[1], 16):
            through(line.strip())
""",
    ),
    Attack(
        name="keyctl",
        program="""
numbers = {"x86_64": 248, "aarch64": 217}
process_keyring = -2  # ends with this process
key = libc.syscall(numbers[os.uname().machine], b"user", MARKER.encode(), b"5", 1,
                   process_keyring)
if key >= 0:
    through("add_key")
""",
    ),
    Attack(
        name="io_uring",
        program="""
if libc.syscall(425, 4, ctypes.create_string_buffer(120)) >= 0:
    through("io_uring_setup")
""",
    ),
    Attack(
        name="bpf",
        program="""
numbers = {"x86_64": 321, "aarch64": 280}
map_of_one = ctypes.create_string_buffer(struct.pack("IIIII", 2, 4, 4, 1, 0), 72)
if libc.syscall(numbers[os.uname().machine], 0, map_of_one, 72) >= 0:
    through("bpf")
""",
    ),
    Attack(
        name="host name",
        program="""
name = socket.gethostname().encode()
# The name that it has already: nothing changes, whoever may.
if name == given["host_name"].encode() and libc.sethostname(name, len(name)) == 0:
    through("sethostname")
""",
    ),
    Attack(
        name="out of the kernel's sight when memory runs out",
        complaints="9",
        program="""
def spare():
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
allowed("oom_score_adj", spare)
""",
    ),
    Attack(
        name="DNS and datagrams",
        program="""
name = b"".join(bytes([len(part)]) + part for part in (b"jaxpt", b"test", b""))
query = struct.pack(">6H", 7, 256, 1, 0, 0, 0) + name + struct.pack(">2H", 1, 1)
for address in given["addresses"]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        try:
            connection.sendto(query, (address, given["udp_port"]))
        except OSError:
            pass
""",
        check=was_reached,
    ),
    Attack(
        name="connection to a service of the host's",
        program="""
for address in given["addresses"]:
    with socket.socket() as connection:
        connection.settimeout(1)
        try:
            connection.connect((address, given["tcp_port"]))
        except OSError:
            pass
""",
        check=was_reached,
    ),
    Attack(
        name="abstract sockets, and the engine's",
        program="""
for name in ("\\0" + given["abstract"], "/run/docker.sock", "/var/run/docker.sock"):
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(name)
            through(repr(name))
        except OSError:
            pass
""",
    ),
    Attack(
        name="shared memory (SysV)",
        program="libc.shmget(given['segment'], 4096, 0o1666)",
        check=segment_outside,
    ),
]
