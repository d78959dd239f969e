"""The columns of the containment matrix: sandboxes that can be opened, used and closed."""

import base64
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from attacks import cheats
from attacks.cheats import Cheat
from attacks.host import Host
from peers.sandbox_peers import EVALPLUS, Driver, Peer, PeerFailed

from sandbox.local_workers import LocalWorkers
from sandbox.pool import Pool
from sandbox.protocol import Execution, Grading, Job, Limits
from sandbox.session import Session, SessionFailed

_ROOT = Path(__file__).resolve().parents[3]
_PROGRAMMING = _ROOT / "jaxpt" / "domains" / "programming"
_LATE_SECONDS = 1.5  # of a late writer, to have written over a verdict


class Refused(RuntimeError):
    """The system said no, and is ready for more."""


class Died(RuntimeError):
    """The process that makes the sandboxes is gone."""


@dataclasses.dataclass(frozen=True)
class Ran:
    output: str
    timed_out: bool


class System(Protocol):
    """A session is whatever `open` gives; calls raise Refused, Died or TimeoutError."""

    kept_bytes: int  # of the output of what ran last

    @property
    def harness(self) -> int: ...  # the process that a sandbox is made by
    def open(self) -> Any: ...
    def exec(self, session: Any, script: str, seconds: float) -> "Future[Ran]": ...
    def write(self, session: Any, path: str, data: bytes) -> None: ...
    def read(self, session: Any, path: str) -> tuple[bytes, int]: ...  # and its size
    def close(self, session: Any) -> None: ...
    def restart(self) -> None:
        """If it does not answer, or is gone."""
        ...

    def leave_and_kill(self, script: str) -> None:
        """Runs a script in another instance of it, which is then killed by SIGKILL."""
        ...

    def score(self, cheat: Cheat) -> float | None:
        """The reward that a solution gets; None if such a cheat has no place in it."""
        ...

    def stop(self) -> None: ...


class Ours:
    """jaxpt's pool with one of its backends.

    waive: layers of isolation that this machine need not have; see `Pool`.
    """

    def __init__(self, host: Host, backend: str, waive: Sequence[str] = ()):
        self._host = host
        self._waive = tuple(waive)
        self._backend = backend
        self._jobs = 0
        self.kept_bytes = 0
        self._start()

    def _start(self) -> None:
        os.environ.update(self._host.environment)
        try:
            self._workers = LocalWorkers(2, backend=self._backend)
            self._pool = Pool(self._workers, waive=self._waive)
        finally:
            for name in self._host.environment:
                del os.environ[name]

    @property
    def harness(self) -> int:
        return os.getpid()

    def open(self) -> Session:
        with _ours():
            return self._pool.open("containment").result(60)

    def exec(self, session: Session, script: str, seconds: float) -> "Future[Ran]":
        ran: Future[Ran] = Future()

        def done(future: Future) -> None:
            try:
                found = future.result()
            except SessionFailed as error:
                ran.set_exception(Refused(str(error)))
                return
            streams = (found.stdout, found.stderr)
            self.kept_bytes = sum(len(s.head) + len(s.tail) for s in streams)
            text = "".join(stream.text() for stream in streams)
            ran.set_result(Ran(text, found.reason == "wall_timeout"))

        asked = session.exec(script, wall_seconds=seconds, output_bytes=64 << 10)
        asked.add_done_callback(done)
        return ran

    def write(self, session: Session, path: str, data: bytes) -> None:
        with _ours():
            session.write_files({path: data}).result(30)

    def read(self, session: Session, path: str) -> tuple[bytes, int]:
        with _ours():
            found = session.read_files([path]).result(30)
        if path not in found.contents:
            raise Refused(found.unread[path])
        return found.contents[path], len(found.contents[path])

    def close(self, session: Session) -> None:
        with _ours():
            session.close().result(30)

    def restart(self) -> None:
        self._pool.close()
        self._start()

    def leave_and_kill(self, script: str) -> None:
        program = f"""
import sys, time
sys.path.insert(0, {str(_ROOT)!r})
from sandbox.local_workers import LocalWorkers
from sandbox.pool import Pool
with Pool(LocalWorkers(1, backend={self._backend!r}), waive={self._waive!r}) as pool:
    session = pool.open("containment").result(60)
    session.exec({script!r}).result(60)
    print("ready", flush=True)
    time.sleep(300)
"""
        controller = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        try:
            if controller.stdout.readline() != "ready\n":
                raise Refused("the controller did not come up")
        finally:
            controller.kill()
            controller.wait()
            controller.stdout.close()

    def score(self, cheat: Cheat) -> float | None:
        session = self.open()
        try:
            return self._score(session, cheat)
        finally:
            self.close(session)

    def _score(self, session: Session, cheat: Cheat) -> float:
        _plant(self, session, cheat)
        if cheat.background:
            return self._score_late(session)
        # What the agent declared crosses; the rest of its workspace stays behind.
        source, _ = self.read(session, "solution.py")
        result = self._submit(
            Execution(
                command=("python", "-I", "-S", "harness.py"),
                files={
                    "solution.py": source,
                    "harness.py": (_PROGRAMMING / "harness.py").read_bytes(),
                    "inputs.txt": repr(list(cheats.INPUTS)).encode(),
                },
                artifacts=("outputs.json",),
                limits=Limits(wall_seconds=15, cpu_seconds=2),
            ),
            Grading(
                program=(_PROGRAMMING / "grader.py").read_text(),
                payload={
                    "inputs": list(cheats.INPUTS),
                    "expected": list(cheats.EXPECTED),
                },
            ),
        )
        if result.outcome == "policy_fail":
            return 0.0
        if result.outcome != "ok" or result.verdict is None:
            raise Refused(f"{result.outcome}: {result.reason}")
        return result.verdict["components"]["tests"]

    def _score_late(self, session: Session) -> float:
        program = """
def grade(artifacts, payload):
    said = artifacts["reward.txt"].strip()
    return {"components": {"tests": float(said == b"1")}, "why": ""}
"""
        self.write(session, "reward.txt", b"0\n")
        with _ours():
            grading = Grading(program=program, payload=None)
            result = session.grade(["reward.txt"], grading).result(60)
        time.sleep(_LATE_SECONDS)
        left, _ = self.read(session, "reward.txt")
        verdict = result.verdict or {"components": {"tests": 0.0}}
        # Its first write may have come before grading: then the file itself must rest.
        self.write(session, "reward.txt", b"0\n")
        time.sleep(_LATE_SECONDS)
        late = self.read(session, "reward.txt")[0] != b"0\n"
        before = verdict["components"]["tests"] != float(left.strip() == b"1")
        return float(late or before)

    def _submit(self, execution: Execution, grading: Grading) -> Any:
        self._jobs += 1
        job = Job(
            job_id=f"containment-{self._jobs}",
            domain="containment",
            execution=execution,
            grading=grading,
        )
        return self._pool.submit(job).result(90)

    def hang_a_grader(self) -> str | None:
        """What a grader that never ends does to the pool; None if nothing."""
        program = "def grade(artifacts, payload):\n    while True:\n        pass\n"
        execution = Execution(
            command=("python", "-c", "open('out', 'w').write('5')"),
            files={},
            artifacts=("out",),
        )
        limits = Limits(wall_seconds=1)
        grading = Grading(program=program, payload=None, limits=limits)
        result = self._submit(execution, grading)
        good = (result.outcome, result.reason) == ("grader_fail", "grader_timeout")
        return None if good else f"{result.outcome}: {result.reason}"

    def survives_snapshot(self, session: Session) -> None:
        """Takes one, which is to end the session's processes."""
        with _ours():
            session.snapshot(session.session_id, durable=False).result(60)

    def stop(self) -> None:
        self._pool.close()


@contextlib.contextmanager
def _ours():
    try:
        yield
    except SessionFailed as error:
        raise Refused(str(error)) from error


class Theirs:
    """A peer's sandboxes, by its driver."""

    def __init__(self, host: Host, peer: Peer):
        self._host = host
        self._peer = peer
        self.kept_bytes = 0
        self._driver = Driver(peer, environment=host.environment)

    @property
    def harness(self) -> int:
        return self._driver.pid

    def _ask(self, do: str, *, within: float = 30.0, **request: Any) -> dict[str, Any]:
        try:
            return self._driver.ask(do, within=within, **request)
        except PeerFailed as error:
            raise (Died if error.is_dead else Refused)(str(error)) from error

    def open(self) -> int:
        return self._ask("open")["session"]

    def exec(self, session: int, script: str, seconds: float) -> "Future[Ran]":
        ran: Future[Ran] = Future()

        def done(future: Future) -> None:
            try:
                found = future.result()
            except PeerFailed as error:
                ran.set_exception((Died if error.is_dead else Refused)(str(error)))
                return
            self.kept_bytes = found["kept_bytes"]
            ran.set_result(Ran(found["output"], found["timed_out"]))

        asked = self._driver.submit("exec", session=session, script=script, seconds=seconds)
        asked.add_done_callback(done)
        return ran

    def write(self, session: int, path: str, data: bytes) -> None:
        encoded = base64.b64encode(data).decode()
        self._ask("write", session=session, path=path, data=encoded)

    def read(self, session: int, path: str) -> tuple[bytes, int]:
        found = self._ask("read", session=session, path=path)
        return base64.b64decode(found["data"]), found["total_bytes"]

    def close(self, session: int) -> None:
        self._ask("close", session=session)

    def restart(self) -> None:
        self.stop()
        self._driver = Driver(self._peer, environment=self._host.environment)

    def leave_and_kill(self, script: str) -> None:
        other = Driver(self._peer, environment=self._host.environment)
        try:
            session = other.ask("open", within=30.0)["session"]
            other.ask("exec", within=30.0, session=session, script=script, seconds=10.0)
            os.kill(other.pid, signal.SIGKILL)
        finally:
            other.close()

    def score(self, cheat: Cheat) -> float | None:
        session = self.open()
        try:
            _plant(self, session, cheat)
            self.write(session, "test_solution.py", cheats.VERIFIER.encode())
            script = "python3 -m pytest -q test_solution.py && echo 1 > reward.txt"
            if cheat.background:
                # The kindest form: the verifier writes its verdict whatever it is.
                script += " || echo 0 > reward.txt"
            self.exec(session, script, 12.0).result(40)
            if cheat.background:
                time.sleep(_LATE_SECONDS)
            try:
                return float(self.read(session, "reward.txt")[0].strip() == b"1")
            except Refused:
                return 0.0
        finally:
            self.close(session)

    def stop(self) -> None:
        self._driver.close()


class EvalPlus:
    """evalplus's grader: it has no sessions, only scores."""

    def __init__(self):
        self._driver = Driver(EVALPLUS)

    @property
    def harness(self) -> int:
        return self._driver.pid

    def score(self, cheat: Cheat) -> float | None:
        if cheat.planted or cheat.background:
            return None
        reply = self._driver.ask(
            "grade",
            within=60.0,
            code=cheat.solution,
            inputs=list(cheats.INPUTS),
            expected=[float(y) for y in cheats.EXPECTED]
            if cheat.tolerance
            else list(cheats.EXPECTED),
            entry_point="f",
            tolerance=cheat.tolerance,
        )
        return reply["score"]

    def restart(self) -> None:
        self.stop()
        self._driver = Driver(EVALPLUS)

    def stop(self) -> None:
        self._driver.close()


def _plant(system: System, session: Any, cheat: Cheat) -> None:
    """What an agent does in its session before it says that it is done."""
    files = {"solution.py": cheat.solution, **cheat.planted}
    folders = sorted({path.rpartition("/")[0] for path in files if "/" in path})
    for folder in folders:
        system.exec(session, f"mkdir -p {folder}", 10.0).result(30)
    for path, text in files.items():
        system.write(session, path, text.encode())
    if cheat.background:
        system.write(session, "late.sh", cheat.background.encode())
        script = "setsid bash late.sh >/dev/null 2>&1 </dev/null &"
        system.exec(session, script, 10.0).result(30)


def arguments_file(arguments: dict[str, Any]) -> bytes:
    return json.dumps(arguments).encode()
