"""What attacks may reach on the host, all of it made for them, and whether they did."""

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_USR = "/usr"  # a folder that only root may write, on any machine


class Host:
    """A victim, a secret and services to be reached; a context manager.

    secret: also in the environment of whatever is given `environment`.
    reached: which of the services were, since `clear`.
    """

    def __init__(self):
        self.token = secrets.token_hex(8)
        self.secret = f"secret-{self.token}"
        self.environment = {"JAXPT_CONTAINMENT": self.secret}
        self.folder = Path(tempfile.mkdtemp(prefix="jaxpt-containment-"))
        self.folder.chmod(0o777)
        self._secret_path = self.folder / "secret"
        self._secret_path.write_text(self.secret)
        self._segment = secrets.randbelow(1 << 30) + 1
        self.reached: set[str] = set()
        self._victim: subprocess.Popen | None = None
        self._sockets = [
            socket.create_server(("0.0.0.0", 0)),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            socket.socket(socket.AF_UNIX),
        ]
        _, udp, abstract = self._sockets
        udp.bind(("0.0.0.0", 0))
        abstract.bind(f"\0{self.token}")
        abstract.listen()
        for listen in (self._accept, self._receive):
            threading.Thread(target=listen, daemon=True).start()

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *exc_info) -> None:
        for any_socket in self._sockets:
            any_socket.close()
        if self._victim is not None:
            self._victim.kill()
            self._victim.wait()
        for path in (*self.planted_outside(), self._secret_path):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._sockets[0].accept()[0].close()
                self.reached.add("a TCP service was reached")

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._sockets[1].recvfrom(1 << 12)
                self.reached.add("a query by UDP arrived")

    def arguments(self, marker: str, harness: int) -> dict[str, Any]:
        """What a program is told; `harness` is the process that its sandbox is made by."""
        if not self.victim_lives():
            command = ["bash", "-c", 'exec -a "$0" sleep 3600', f"victim-{self.token}"]
            self._victim = subprocess.Popen(command, env=os.environ | self.environment)
            while f"victim-{self.token}" not in _words(self._victim.pid):
                time.sleep(0.01)
        self.reached.clear()
        return {
            "marker": marker,
            "victim": self._victim.pid,
            "victim_name": f"victim-{self.token}",
            "harness": harness,
            "process_namespace": os.readlink("/proc/self/ns/pid"),
            "secret": self.secret,
            "secret_path": str(self._secret_path),
            "outside": [str(self.folder), _USR],
            "addresses": sorted({"127.0.0.1", *_addresses()}),
            "tcp_port": self._sockets[0].getsockname()[1],
            "udp_port": self._sockets[1].getsockname()[1],
            "abstract": self.token,
            "segment": self._segment,
            "host_name": socket.gethostname(),
        }

    def victim_lives(self) -> bool:
        return self._victim is not None and self._victim.poll() is None

    def planted_outside(self) -> list[Path]:
        """Files that are where no sandbox may write."""
        found = [path for path in self.folder.iterdir() if path != self._secret_path]
        return found + list(Path(_USR).glob(f"*{self.token}*"))

    def remove_segment(self) -> str | None:
        """Of shared memory; says so if it was there."""
        libc = ctypes.CDLL(None, use_errno=True)
        segment = libc.shmget(self._segment, 0, 0)
        if segment < 0:
            return None
        libc.shmctl(segment, 0, None)
        return "the host sees its segment"

    def alive(self, marker: str) -> list[int]:
        """Processes of the machine with this word among their arguments."""
        return [pid for pid in _pids() if marker in _words(pid)]

    def clear(self, *, but: set[int]) -> None:
        """Ends what attacks have left, and removes their files.

        but: harnesses, which have the secret in their environment as well.
        """
        spared = {os.getpid(), *but}
        if self._victim is not None:
            spared.add(self._victim.pid)
        for pid in _pids():
            if pid in spared:
                continue
            with contextlib.suppress(OSError):
                mine = self.secret.encode() in Path(f"/proc/{pid}/environ").read_bytes()
                if mine or any(self.token in word for word in _words(pid)):
                    os.kill(pid, signal.SIGKILL)
        for path in (*self.planted_outside(), *Path("/tmp").glob(f"*{self.token}*")):
            with contextlib.suppress(OSError):
                path.unlink()
        for path in Path("/dev/shm").glob(f"*{self.token}*"):
            with contextlib.suppress(OSError):
                path.unlink()
        self.remove_segment()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _words(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
        return data.decode(errors="replace").split("\0")
    return []


def _addresses() -> list[str]:
    """This machine's own, in the networks that it is in."""
    with contextlib.suppress(OSError):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            any_socket.connect(("192.0.2.1", 9))  # nothing is sent
            return [any_socket.getsockname()[0]]
    return []
