"""The Linux calls that Python's `os` does not have, each as one function.

Numbers are those of the kernel's headers; from 424 on they are the same on every
architecture. All raise OSError with the call's name.
"""

import ctypes
import errno
import fcntl
import os
import platform
import signal
import socket
import struct
import time

NEW_TIME, NEW_MOUNT, NEW_CGROUP, NEW_UTS = 0x80, 0x20000, 0x2000000, 0x4000000
NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
_BIND, _RECURSIVE, _PRIVATE, _REMOUNT, _DETACH = 4096, 16384, 1 << 18, 32, 2
_CLONE_PIDFD = 0x1000
_OPEN_TREE, _MOVE_MOUNT, _CLONE3, _OPENAT2, _MOUNT_SETATTR = 428, 429, 435, 437, 442
_AT_RECURSIVE = 0x8000
_AT_FDCWD, _AT_EMPTY_PATH, _OPEN_TREE_CLONE, _MOVE_FROM_EMPTY = -100, 0x1000, 1, 4
# Where these two are not known, they fail as calls that the kernel has not.
_PIVOT_ROOT, _CAPSET = {"x86_64": (155, 126), "aarch64": (41, 91)}.get(
    platform.machine(), (-1, -1)
)
_DEATH_SIGNAL, _DUMPABLE, _SECCOMP, _DROP_BOUND, _NO_NEW_PRIVILEGES = 1, 4, 22, 24, 38
_FILTER, _AMBIENT, _CLEAR_ALL = 2, 47, 4
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_IN_ROOT, _NO_MAGIC_LINKS, _NO_SYMLINKS = 0x10, 0x02, 0x04

# PyDLL keeps Python's lock, which a child born in the middle of a call must own.
_libc = ctypes.PyDLL(None, use_errno=True)


# An int among its arguments is passed as an int of C, which the kernel widens or, for
# flags and lengths, takes as it is.
_syscall = _libc.syscall


def checked(result: int, what: str) -> int:
    """The result of a call; a negative one raises OSError."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments) -> int:
    return checked(_syscall(number, *arguments), what)


def prctl(option: int, *arguments: int) -> int:
    words = [ctypes.c_ulong(word) for word in (*arguments, 0, 0, 0, 0)[:4]]
    return checked(_libc.prctl(option, *words), f"prctl {option}")


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends.

    Raises:
      ProcessLookupError: it has ended already.
    """
    parent = os.getppid()
    prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError(errno.ESRCH, "The parent died.")


def is_alive(pid: int | str) -> bool:
    """Whether there is such a process, and not one that its parent has yet to bury."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def set_dumpable(value: bool) -> None:
    """Whether processes of the same user may look into this one through /proc."""
    prctl(_DUMPABLE, int(value))


def unshare(flags: int) -> None:
    checked(_libc.unshare(flags), "unshare")


def missing_namespaces() -> list[str]:
    """The kinds of which this process, root in its user namespace, can't make one."""
    kinds = {
        "user": NEW_USER,
        "mnt": NEW_MOUNT,
        "pid": NEW_PID,
        "net": NEW_NET,
        "ipc": NEW_IPC,
        "uts": NEW_UTS,
        "cgroup": NEW_CGROUP,
    }
    missing = []
    for name, flag in kinds.items():
        child = os.fork()
        if child == 0:
            os._exit(int(_libc.unshare(flag) != 0))
        if os.waitpid(child, 0)[1] != 0:
            missing.append(name)
    return missing


def clone(flags: int) -> tuple[int, int]:
    """Forks into new namespaces: (pid, pidfd) for the parent, (0, -1) for the child.

    For processes with one thread; handlers registered for forks do not run.
    """
    pidfd = ctypes.c_int(-1)
    address = ctypes.addressof(pidfd)
    arguments = struct.pack(
        "8Q", flags | _CLONE_PIDFD, address, 0, 0, signal.SIGCHLD, 0, 0, 0
    )
    pid = syscall("clone3", _CLONE3, arguments, len(arguments))
    if pid:
        fcntl.fcntl(pidfd.value, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    return pid, pidfd.value if pid else -1


def map_users(inside: int, uid: int, gid: int) -> None:
    """Gives this process's fresh user namespace one user and one group: these."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {uid} 1"),
        ("gid_map", f"{inside} {gid} 1"),
    ):
        write_file(f"/proc/self/{name}", text)


def write_file(path: str, text: str) -> None:
    """Of the kernel's; without the buffers of `open`, which cost more than the rest."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def last_capability() -> int:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        return int(file.read())


def drop_capabilities(last: int) -> None:
    """For good: none is left in any set, and no program can bring one back."""
    for capability in range(last + 1):
        checked(_libc.prctl(_DROP_BOUND, capability, 0, 0, 0), "prctl")
    prctl(_AMBIENT, _CLEAR_ALL)
    header = struct.pack("Ii", 0x20080522, 0)
    syscall("capset", _CAPSET, header, struct.pack("6I", *[0] * 6))
    prctl(_NO_NEW_PRIVILEGES, 1)


def filter_calls(program: bytes) -> None:
    """Binds this process and its children to a filter of system calls (see seccomp.py)."""
    code = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(filter_, len(filter_))
    prctl(_SECCOMP, _FILTER, ctypes.addressof(buffer))


def mount(
    kind: str, target: str, *, flags: int = NO_SUID | NO_DEVICES, options: str = ""
) -> None:
    result = _libc.mount(
        kind.encode(), target.encode(), kind.encode(), flags, options.encode() or None
    )
    checked(result, f"mount {kind} ({options}) on {target}")


def mount_tmpfs(path: str, *, size: int, uid: int = 0, mode: int = 0o755) -> None:
    """A file system in memory that holds at most `size` bytes, owned by `uid`.

    It may hold a file for each 4 KiB of it.
    """
    inodes = max(size // 4096, 256)
    options = f"size={size},nr_inodes={inodes},mode={mode:o},uid={uid},gid={uid}"
    mount("tmpfs", path, options=options)


def make_mounts_private() -> None:
    """No mount made from now on is seen elsewhere; after unshare(NEW_MOUNT)."""
    result = _libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None)
    checked(result, "mount private")


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Shows the tree at `source`, mounts below it included, at `target` as well."""
    flags = _BIND | _RECURSIVE
    result = _libc.mount(source.encode(), target.encode(), None, flags, None)
    checked(result, f"bind {source}")
    if read_only:
        tree = os.open(target, os.O_PATH | os.O_CLOEXEC)
        try:
            set_read_only(tree)
        finally:
            os.close(tree)


def set_read_only(tree: int, *, recursive: bool = True) -> None:
    """Makes a mount read-only, where no program gains privileges, and those below it."""
    attributes = struct.pack("4Q", READ_ONLY | NO_SUID, 0, 0, 0)
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    syscall("mount_setattr", _MOUNT_SETATTR, tree, b"", flags, attributes, len(attributes))


def detached_copy(path: str) -> int:
    """A descriptor of the mount at `path`, which `attach` can put into any namespace."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    return syscall("open_tree", _OPEN_TREE, _AT_FDCWD, path.encode(), flags)


def attach(tree: int, path: str) -> None:
    """Mounts what `detached_copy` gave at `path`."""
    target = path.encode()
    syscall("move_mount", _MOVE_MOUNT, tree, b"", _AT_FDCWD, target, _MOVE_FROM_EMPTY)


def unmount(path: str) -> None:
    checked(_libc.umount2(path.encode(), _DETACH), f"unmount {path}")


def become_root_folder(folder: str) -> None:
    """Makes `folder`, a mount, the root, and lets go of everything outside of it."""
    os.chdir(folder)
    syscall("pivot_root", _PIVOT_ROOT, b".", b".")
    unmount(".")
    os.chdir("/")


def open_beneath(
    folder: int, path: str, flags: int, *, mode: int = 0o644, follow_links: bool = True
) -> int:
    """Opens `path` with the folder as its root, where nothing leads out of it.

    Links are followed inside that root, or none at all; those that /proc makes up never.
    """
    mode = mode if flags & os.O_CREAT else 0
    resolve = _IN_ROOT | (_NO_MAGIC_LINKS if follow_links else _NO_SYMLINKS)
    how = struct.pack("3Q", flags | os.O_CLOEXEC, mode, resolve)
    return syscall("openat2", _OPENAT2, folder, os.fsencode(path), how, len(how))


def start_clocks() -> None:
    """For children of this process, the clocks that count from boot begin now."""
    unshare(NEW_TIME)
    clocks = (("monotonic", time.CLOCK_MONOTONIC), ("boottime", time.CLOCK_BOOTTIME))
    offsets = [f"{name} {-int(time.clock_gettime(clock))} 0" for name, clock in clocks]
    write_file("/proc/self/timens_offsets", "\n".join(offsets))


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up = struct.pack("16sh", b"lo", _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, up)
