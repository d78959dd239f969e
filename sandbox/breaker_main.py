"""Runs inside a sandbox: tries to break each layer, and writes what it could to `found`.

`known`, beside it, says what the machine's namespaces and folders are, and how much is
allowed.
"""

import ctypes
import errno
import json
import os
import resource
import socket
import stat

_NUMBERS = {  # of system calls that must not exist here
    "x86_64": {
        "bpf": 321,
        "io_uring_setup": 425,
        "keyctl": 250,
        "mount": 165,
        "process_vm_readv": 310,
        "ptrace": 101,
        "userfaultfd": 323,
    },
    "aarch64": {
        "bpf": 280,
        "io_uring_setup": 425,
        "keyctl": 219,
        "mount": 40,
        "process_vm_readv": 270,
        "ptrace": 117,
        "userfaultfd": 282,
    },
}
_VARIABLES = {
    "HOME",
    "LANG",
    "LC_CTYPE",
    "PATH",
    "PWD",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHASHSEED",
    "TZ",
}
_MEBIBYTE = 1 << 20

libc = ctypes.CDLL(None, use_errno=True)
broken: dict[str, list[str]] = {}


def breaks(layer: str, what: str, succeeded: object) -> None:
    if succeeded:
        broken.setdefault(layer, []).append(what)


def works(call, *arguments) -> bool:
    try:
        call(*arguments)
    except OSError:
        return False
    return True


def opens(path: str, flags: int = os.O_RDONLY) -> bool:
    try:
        os.close(os.open(path, flags))
    except OSError:
        return False
    return True


def break_namespaces(outside: dict[str, str]) -> None:
    for kind, there in outside.items():
        same = os.readlink(f"/proc/self/ns/{kind}") == there
        breaks(f"namespace.{kind}", "it is the machine's", same)
    for flag in (0x10000000, 0x20000, 0x40000000):
        child = os.fork()  # which the namespace ends with
        if child == 0:
            os._exit(int(libc.unshare(flag) != 0))
        made = os.waitpid(child, 0)[1] == 0
        breaks("further_namespaces", f"unshare({flag:#x})", made)


def break_network() -> None:
    names = [name for _, name in socket.if_nameindex()]
    breaks("network", f"interfaces {names}", names != ["lo"])
    for family, address in (
        (socket.AF_INET, "192.0.2.1"),
        (socket.AF_INET6, "2001:db8::1"),
    ):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                breaks(
                    "network", f"a route to {address}", works(probe.connect, (address, 9))
                )
        except OSError:
            pass  # not even a socket


def break_files(folders: dict[str, list[int]]) -> None:
    for folder in ("/", "/usr", "/usr/lib", "/etc", "/dev"):
        path = os.path.join(folder, "broken")
        breaks("root", f"writes {path}", opens(path, os.O_WRONLY | os.O_CREAT))
    for path, number in folders.items():
        try:
            found = os.stat(path)
        except OSError:
            continue
        breaks("root", f"sees {path}", number == [found.st_dev, found.st_ino])
    for path in ("/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory"):
        breaks("proc", f"writes {path}", opens(path, os.O_WRONLY))
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    breaks("proc", f"sees {len(pids)} processes", len(pids) > 5 or 1 not in pids)
    for name in ("mem", "environ", "root", "fd/0"):
        breaks("proc", f"opens /proc/1/{name}", opens(f"/proc/1/{name}"))


def break_privileges() -> None:
    with open("/proc/self/status") as file:
        status = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        breaks("capabilities", name, int(status[name], 16) != 0)
    breaks("capabilities", "changes its root", works(os.chroot, "."))
    breaks("capabilities", "sets a host name", works(socket.sethostname, "broken"))
    breaks("no_new_privileges", "is not set", status["NoNewPrivs"].strip() != "1")
    for name, number in _NUMBERS[os.uname().machine].items():
        ctypes.set_errno(0)
        libc.syscall(number, 1, 0, 0, 0, 0)
        # The kernel itself would find fault with the arguments, or do it.
        refused = ctypes.get_errno() in (errno.ENOSYS, errno.EPERM)
        breaks("seccomp", f"the kernel answers {name}", not refused)
    erasure = works(os.mknod, "erasure", stat.S_IFCHR | 0o600, 0)
    breaks("landlock", "makes a device file", erasure)


def break_limits(memory_bytes: int, workspace_bytes: int) -> None:
    for name in ("AS", "FSIZE", "CPU", "NOFILE", "CORE"):
        _, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        breaks("limits", f"RLIMIT_{name}", hard < 0)
    try:
        bytearray(memory_bytes)
        breaks("limits", "takes more memory than allowed", True)
    except MemoryError:
        pass
    children = []
    try:
        while len(children) < 100:
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), 19)  # stays, and counts
                os._exit(0)
            children.append(child)
    except OSError:
        pass
    breaks("processes", f"makes {len(children)}", len(children) >= 100)
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    for folder, most in (
        (".", 2 * workspace_bytes),
        ("/tmp", 96 << 20),
        ("/dev/shm", 96 << 20),
    ):
        names = [f"{folder}/filler{number}" for number in range(most // (4 * _MEBIBYTE))]
        written = 0
        try:
            for name in names:
                with open(name, "wb") as file:
                    for _ in range(4):
                        written += file.write(bytes(_MEBIBYTE))
        except OSError:
            pass
        megabytes = written // _MEBIBYTE
        breaks("quota", f"writes {megabytes} MiB into {folder}", written >= most)
        for name in names:
            if os.path.exists(name):
                os.remove(name)


def break_environment() -> None:
    strange = sorted(set(os.environ) - _VARIABLES)
    breaks("environment", f"variables {strange}", strange)
    held = [number for number in range(3, 256) if works(os.fstat, number)]
    breaks("environment", f"descriptors {held}", held)


def main() -> None:
    with open("known") as file:
        known = json.load(file)
    break_environment()
    break_namespaces(known["namespaces"])
    break_network()
    break_files(known["folders"])
    break_privileges()
    break_limits(known["memory_bytes"], known["workspace_bytes"])
    with open("/proc/self/uid_map") as file:
        inside, outside, _ = map(int, file.readline().split())
    owner = outside + os.getuid() - inside
    here = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in known["namespaces"]}
    with open("found", "w") as file:
        json.dump({"broken": broken, "owner": owner, "namespaces": here}, file)


if __name__ == "__main__":
    main()
