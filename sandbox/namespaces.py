"""The few Linux calls that Python's `os` does not have: unshare, mount, pdeathsig."""

import ctypes
import fcntl
import os
import signal
import socket
import struct

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH, _PR_SET_PDEATHSIG = 2, 1
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def private_mounts_and_network() -> None:
    """Gives this process mounts of its own and a network with nothing in it but `lo`.

    Both end with it. Without root, within a user namespace in which it is root.
    """
    uid, gid = os.getuid(), os.getgid()
    flags = _CLONE_NEWNS | _CLONE_NEWNET | (0 if uid == 0 else _CLONE_NEWUSER)
    _check(_libc.unshare(flags), "unshare")
    if uid != 0:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {uid} 1"),
            ("gid_map", f"0 {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount private")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up = struct.pack("16sh", b"lo", _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, up)


def mount_tmpfs(path: str, *, size: int, uid: int, inodes: int = 4096) -> None:
    """A file system in memory that holds at most `size` bytes, owned by `uid`."""
    options = f"size={size},nr_inodes={inodes},mode=755,uid={uid},gid={uid}"
    _check(
        _libc.mount(
            b"tmpfs", path.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode()
        ),
        f"mount tmpfs of {size} bytes",
    )


def bind(source: str, target: str) -> None:
    flags = _MS_BIND | _MS_REC
    _check(
        _libc.mount(source.encode(), target.encode(), None, flags, None),
        f"bind {source}",
    )


def unmount(path: str) -> None:
    _check(_libc.umount2(path.encode(), _MNT_DETACH), f"unmount {path}")
