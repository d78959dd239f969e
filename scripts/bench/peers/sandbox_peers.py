"""The sandboxes that jaxpt's are compared with, each in a Python environment of its own.

    with Driver(PEERS["swe-rex local"]) as driver:
        print(driver.ask("acquire", count=10))

The environments are made once, under .cache/bench, as those of `grpo_step.py` are. Nothing
here imports a peer: see `sandbox_driver.py` for the other end of the pipe.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[2] / ".cache" / "bench"
IMAGE = "jaxpt-sandbox:base"
_STARTUP_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer's driver, and what its environment holds; None: this interpreter's.

    environment: its folder's name. with_dependencies: whether what they ask for is added.
    """

    version: str
    script: str
    arguments: tuple[str, ...] = ()
    environment: str = ""
    requirements: tuple[str, ...] | None = None
    with_dependencies: bool = True


# pytest is there for the verifiers that containment.py runs in a peer's sandbox.
_SWE_REX = ("swe-rex==1.4.0", "pytest==9.2.0")
_INSPECT = ("inspect-ai==0.3.285", "pytest==9.2.0")
PEERS = {
    "swe-rex local": Peer(
        version="swe-rex 1.4.0, LocalRuntime",
        script="sandbox_swerex.py",
        environment="swe-rex",
        requirements=_SWE_REX,
    ),
    "inspect_ai local": Peer(
        version="inspect_ai 0.3.285, local",
        script="sandbox_inspect.py",
        arguments=("local",),
        environment="inspect_ai",
        requirements=_INSPECT,
    ),
    "inspect_ai docker": Peer(
        version="inspect_ai 0.3.285, docker",
        script="sandbox_inspect.py",
        arguments=("docker", IMAGE),
        environment="inspect_ai",
        requirements=_INSPECT,
    ),
    "docker exec": Peer(
        version=f"docker exec, {IMAGE}",
        script="sandbox_plain.py",
        arguments=("docker", IMAGE),
    ),
    "subprocess": Peer(
        version="plain subprocess", script="sandbox_plain.py", arguments=("subprocess",)
    ),
}
EVALPLUS = Peer(
    version="evalplus 0.3.1",
    script="sandbox_evalplus.py",
    environment="evalplus",
    # All that its grader imports; the whole of what it asks for has 500 MB more.
    requirements=("evalplus==0.3.1", "numpy", "psutil", "appdirs", "tempdir"),
    with_dependencies=False,
)


class PeerUnavailable(RuntimeError):
    """A peer that can't be installed, or can't run here; the message says why."""


class PeerFailed(RuntimeError):
    """A peer did not do a request: it raised, died (`is_dead`) or did not answer."""

    def __init__(self, message: str, *, is_dead: bool = False):
        super().__init__(message)
        self.is_dead = is_dead


def interpreter(peer: Peer) -> Path:
    """The peer's Python; its environment is made if it is not there.

    Raises:
      PeerUnavailable: it can't be installed.
    """
    if peer.requirements is None:
        return Path(sys.executable)
    folder = ENVIRONMENTS / peer.environment
    python, stamp = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join(peer.requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"Installing {', '.join(peer.requirements)} (once) ...", file=sys.stderr)
        uv = str(Path(sys.executable).with_name("uv"))
        make = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]
        install = [uv, "pip", "install", "--quiet", "--python", str(python)]
        if not peer.with_dependencies:
            install.append("--no-deps")
        for command in (make, [*install, *peer.requirements]):
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                said = getattr(error, "stderr", "") or str(error)
                raise PeerUnavailable(f"not installed: {said.strip()[-400:]}") from error
        stamp.write_text(wanted)
    return python


class Driver:
    """A peer's driver process; a context manager, ended with all that it started.

    environment: more variables for it, which its sandboxes may inherit.
    """

    def __init__(self, peer: Peer, *, environment: dict[str, str] | None = None):
        python = interpreter(peer)
        path = f"{python.parent}:{os.environ.get('PATH', os.defpath)}"
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [python, HERE / peer.script, *peer.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=os.environ | {"PATH": path} | (environment or {}),
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._waiting: dict[int, Future] = {}
        self._asked = 0
        self._ready: Future = Future()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            hello = self._ready.result(_STARTUP_SECONDS)
        except (TimeoutError, PeerFailed) as error:
            self.close()
            raise PeerUnavailable(str(error) or "it did not start") from error
        if "unavailable" in hello:
            self.close()
            raise PeerUnavailable(hello["unavailable"])

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            reply = json.loads(line)
            number = reply.pop("number", None)
            with self._lock:
                waiter = self._waiting.pop(number, None) if number else self._ready
            if waiter is None or waiter.done():
                continue
            if "failed" in reply:
                waiter.set_exception(PeerFailed(reply["failed"]))
            else:
                waiter.set_result(reply)
        died = PeerFailed(f"The driver ended: {self._last_words()}", is_dead=True)
        with self._lock:
            waiters = [*self._waiting.values(), self._ready]
            self._waiting.clear()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(died)

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read()[-1000:].strip()

    def submit(self, do: str, **request: Any) -> Future:
        """The reply to come; it raises PeerFailed."""
        future: Future = Future()
        with self._lock:
            self._asked += 1
            number = self._asked
            self._waiting[number] = future
        try:
            assert self._process.stdin
            line = json.dumps({"number": number, "do": do, **request})
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            self._waiting.pop(number, None)
            if not future.done():
                future.set_exception(PeerFailed("The driver is gone.", is_dead=True))
        return future

    def ask(self, do: str, *, within: float = 600.0, **request: Any) -> dict[str, Any]:
        """The reply. Raises PeerFailed, or TimeoutError if none comes in time."""
        return self.submit(do, **request).result(within)

    def close(self) -> None:
        """Ends the driver and what is in its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                stream.close()
        with contextlib.suppress(ValueError):
            self._said.close()
