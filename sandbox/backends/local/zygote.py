"""The zygote: makes the root folder of all sandboxes, and forks slots when asked.

Started by the backend with the number of a socket; it never sees a job's data, since
whatever it holds in memory its forks hold too. It is the first process of a process
namespace, so that the kernel ends all that came of it when it ends.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback

from sandbox import linux
from sandbox.backends.local import init, messages

# Imported before any fork: what programs and test runners ask for most.
_PRELOADED = """
    abc bisect collections contextlib copy dataclasses enum functools heapq io itertools
    json linecache math operator os.path random re string struct textwrap types typing
""".split()  # noqa: SIM905
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_ETC = {
    "passwd": "sandbox:x:1000:1000:sandbox:/workspace:/bin/bash\n",
    "group": "sandbox:x:1000:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_FROM_ETC = ("alternatives", "ld.so.cache", "fonts")


def main() -> None:
    linux.die_with_parent()
    worker = socket.socket(fileno=int(sys.argv[1]))
    config, _ = messages.receive(worker)
    linux.unshare(linux.NEW_PID | linux.NEW_MOUNT | linux.NEW_IPC | linux.NEW_UTS)
    if child := os.fork():
        # The namespace's first process has to be a child; this one only ties it to the
        # worker.
        worker.close()
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status) % 256)
    linux.die_with_parent()
    try:
        settings = init.Settings(
            uids=config["uids"],
            filter=bytes.fromhex(config["filter"]),
            last_capability=linux.last_capability(),
            python=sys.executable,
            tmp_bytes=config["tmp_bytes"],
        )
        _make_root(config)
        _import()
    except Exception:
        messages.send(worker, {"failed": traceback.format_exc()})
        return
    messages.send(worker, {"ready": True})
    with contextlib.suppress(EOFError):
        _serve(worker, settings)


def _import() -> None:
    """Ends as an interpreter that programs can be forked from."""
    for name in ("PYTHONPATH", "LC_CTYPE"):
        os.environ.pop(name, None)
    for name in _PRELOADED:
        importlib.import_module(name)
    sys.path[:] = [path for path in sys.path if not os.path.exists(f"{path}/sandbox")]
    # Programs see nothing of this package, which goes on without its names.
    for name in [name for name in sys.modules if name.partition(".")[0] == "sandbox"]:
        del sys.modules[name]
    # An interpreter that collects garbage writes into every object, and so into pages that
    # its forks could share.
    gc.collect()
    gc.freeze()


def _make_root(config: dict) -> None:
    root = config["root"]
    linux.make_mounts_private()
    linux.mount_tmpfs(root, size=1 << 20)
    for folder in ("usr", "etc", "dev", "dev/shm", "dev/pts", "proc", "tmp", "workspace"):
        os.mkdir(f"{root}/{folder}")
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            _show(f"/{name}", root)
    for path in ("/usr", *config["shown"]):
        _show(path, root)
    for name in _FROM_ETC:
        if os.path.exists(f"/etc/{name}"):
            _show(f"/etc/{name}", root)
    for name, text in _ETC.items():
        with open(f"{root}/etc/{name}", "w") as file:
            file.write(text)
    for name in _DEVICES:
        with open(f"{root}/dev/{name}", "w"):
            linux.bind(f"/dev/{name}", f"{root}/dev/{name}")
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ):
        os.symlink(target, f"{root}/dev/{name}")
    # A user namespace may mount a /proc only where it sees a whole one already.
    linux.bind("/proc", f"{root}/proc")
    linux.become_root_folder(root)
    top = os.open("/", os.O_PATH)
    linux.set_read_only(top, recursive=False)
    os.close(top)


def _show(path: str, root: str) -> None:
    """Makes a path of the machine readable at the same path in the root."""
    target = root + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        with open(target, "w"):
            pass
    linux.bind(path, target, read_only=True)


def _serve(worker: socket.socket, settings: init.Settings) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # slots are not waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        _, descriptors = messages.receive(worker)
        if os.fork() == 0:
            worker.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            slot, *groups = descriptors
            with socket.socket(fileno=slot) as connection:
                _run_slot(connection, groups, settings)
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _run_slot(worker: socket.socket, groups: list[int], settings: init.Settings) -> None:
    """One sandbox after the other, in these control groups and one empty network."""
    try:
        for group in groups:
            os.write(group, b"0")
            os.close(group)
        linux.unshare(linux.NEW_NET)
        linux.bring_up_loopback()
        linux.start_clocks()
    except OSError:
        messages.send(worker, {"failed": traceback.format_exc()})
        return
    # Nothing of a sandbox is left when the next one begins, so they may share a network,
    # the costliest of all namespaces.
    flags = linux.NEW_MOUNT | linux.NEW_PID | linux.NEW_IPC
    flags |= linux.NEW_UTS | linux.NEW_CGROUP
    while True:
        try:
            _, (control,) = messages.receive(worker)
        except EOFError:
            return
        try:
            pid, pidfd = linux.clone(flags)
        except OSError:
            messages.send(worker, {"failed": traceback.format_exc()})
            os.close(control)
            continue
        if pid == 0:
            worker.close()
            init.main(socket.socket(fileno=control), settings)
            os._exit(0)
        os.close(control)
        messages.send(worker, {"started": True}, [pidfd])
        # While the sandbox lives nothing more is asked of this slot, but the worker may let
        # go of it.
        waiting = select.poll()
        waiting.register(pidfd, select.POLLIN)
        waiting.register(worker, select.POLLIN)
        ready = [descriptor for descriptor, _ in waiting.poll()]
        if pidfd not in ready:
            return
        os.close(pidfd)
        os.waitpid(pid, 0)
