"""Workers over NATS: what dies, restarts, comes twice or is malformed changes no result."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

import pytest

pytest.importorskip("nats", reason="nats-py is not installed (extra `remote`)")

from sandbox import codec
from sandbox.backends.backend import SandboxUnavailable
from sandbox.items import Resources
from sandbox.pool import Pool
from sandbox.protocol import Execution, Grading, Job, Limits
from sandbox.remote import subjects as subjects_lib
from sandbox.remote.broker import Address, Broker
from sandbox.remote.mail import Letter, Mail
from sandbox.remote.payloads import Reference
from sandbox.remote.puller import Puller
from sandbox.remote.subjects import PoolBeat, Subjects, WorkerBeat, key_of
from sandbox.remote.workers import RemoteWorkers
from sandbox.session import SessionFailed
from sandbox.sessions import (
    Exec,
    Failed,
    Open,
    ProtocolError,
    ReadFiles,
    Reply,
    envelope,
    opened,
)

ROOT = Path(__file__).resolve().parent.parent
SERVER = shutil.which("nats-server", path=f"{os.environ.get('PATH')}:/usr/sbin")
pytestmark = pytest.mark.skipif(
    SERVER is None, reason="no nats-server: apt-get install nats-server"
)
PATIENCE = 60  # seconds; only a hang takes so long
LARGEST = Resources(cpus=64, memory_bytes=1 << 40, disk_bytes=0)
GRADER = """
import json
def grade(artifacts, payload):
    good = json.loads(artifacts["out"]) == payload
    return {"components": {"right": float(good)}, "why": "compared"}
"""
HONEST = "open('out', 'w').write('5')"
SLOW = f"import time; time.sleep(1.5); {HONEST}"


def job(job_id, code=HONEST):
    return Job(
        job_id=job_id,
        domain="test",
        execution=Execution(
            command=("python", "-I", "-S", "main.py"),
            files={"main.py": code.encode()},
            artifacts=("out",),
            limits=Limits(wall_seconds=30, cpus=0.1, memory_bytes=64 << 20),
        ),
        grading=Grading(program=GRADER, payload=5, limits=Limits(wall_seconds=30)),
    )


class Nats:
    """A server with a store that outlives it, and a password."""

    def __init__(self, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"nats://jaxpt:secret@127.0.0.1:{port}"
        self._command = [ROOT / "scripts/launch/nats", "--store", str(folder)]
        self._command += ["--port", str(port), "--", "--user", "jaxpt", "--pass", "secret"]
        self.start()

    def start(self):
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)

    def kill(self):
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory):
    server = Nats(tmp_path_factory.mktemp("nats"))
    yield server
    server.kill()


@pytest.fixture
def name():
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start_worker(nats_server, name):
    """Starts another worker of the test's pool at each call."""
    workers = []

    def start():
        command = [ROOT / "scripts/launch/worker", "--nats", nats_server.url]
        worker = subprocess.Popen([*command, "--pool", name])
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGCONT)
        worker.terminate()
    for worker in workers:
        try:
            worker.wait(PATIENCE)
        finally:
            worker.kill()


@contextlib.contextmanager
def make_pool(server, name, **options):
    settings = {"silence_seconds": 2.0} | options
    with Pool(RemoteWorkers(server.url, name, largest=LARGEST, **settings)) as pool:
        yield pool


def num_workers(pool):
    return len(pool.workers.worker_ids)


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_jobs_sessions_and_large_files(nats_server, name, start_worker):
    start_worker()
    with make_pool(nats_server, name) as pool:
        result = pool.submit(job("one")).result(PATIENCE)
        assert (result.outcome, result.attempts) == ("ok", 1)
        assert result.verdict["components"] == {"right": 1.0}
        session = pool.open("test").result(PATIENCE)
        large = os.urandom(5 << 20)
        session.write_files({"folder/large": large}).result(PATIENCE)
        ran = session.exec("cd folder; stat -c %s large").result(PATIENCE)
        assert ran.stdout.text() == f"{5 << 20}\n"
        assert session.exec("pwd").result(PATIENCE).stdout.text().endswith("/folder\n")
        files = session.read_files(["folder/large"]).result(PATIENCE)
        assert files.contents["folder/large"] == large
        with pytest.raises(SessionFailed) as refused:
            session.write_files({"large": bytes(200 << 20)}).result(PATIENCE)
        assert refused.value.reason == "bad_request" and not refused.value.is_lost
        assert session.exec("echo on").result(PATIENCE).stdout.text() == "on\n"
        session.close().result(PATIENCE)
    assert left_on(nats_server, name) == []


def left_on(server, name):
    """Subjects of a pool under which the broker keeps anything, but for dead letters."""

    async def look():
        broker = await Broker.connect(Address(url=server.url), "test", seconds=PATIENCE)
        found = []
        for stream in (
            subjects_lib.REQUESTS,
            subjects_lib.REPLIES,
            subjects_lib.PAYLOADS,
        ):
            found += await broker.subjects(stream, f"jaxpt.{name}.>")
        await broker.close()
        return found

    return asyncio.run(look())


def test_a_session_goes_on_elsewhere_when_its_worker_is_killed(
    nats_server, name, start_worker
):
    first = start_worker()
    with make_pool(nats_server, name) as pool:
        session = pool.open("test").result(PATIENCE)
        session.exec("echo before > file; export WORD=kept").result(PATIENCE)
        state = {"turns": ["é", 2]}
        session.snapshot("turn 2\n", state=state).result(PATIENCE)
        session.exec("echo after > file").result(PATIENCE)
        start_worker()
        until(lambda: num_workers(pool) == 2)
        first.kill()
        first.wait()
        with pytest.raises(SessionFailed) as lost:
            session.exec("sleep 20").result(PATIENCE)
        assert lost.value.is_lost and lost.value.reason == "worker_unresponsive"
        again = pool.open("test", snapshot_id="turn 2\n").result(PATIENCE)
        assert again.state == state
        ran = again.exec("cat file").result(PATIENCE)
        assert ran.stdout.text() == "before\n"
        with pytest.raises(SessionFailed, match="snapshot_unknown"):
            pool.open("test", snapshot_id="never taken").result(PATIENCE)


def test_jobs_of_a_killed_worker_are_done_by_another(nats_server, name, start_worker):
    first = start_worker()
    with make_pool(nats_server, name) as pool:
        futures = [pool.submit(job(f"slow{n}", SLOW)) for n in range(4)]
        until(lambda: all(future.running() for future in futures))
        start_worker()
        time.sleep(0.3)
        first.kill()
        first.wait()
        results = [future.result(PATIENCE) for future in futures]
        assert [result.outcome for result in results] == ["ok"] * 4
        assert [result.attempts for result in results] == [2] * 4


def test_a_broker_that_restarts_loses_and_doubles_nothing(nats_server, name, start_worker):
    start_worker()
    with make_pool(nats_server, name) as pool:
        session = pool.open("test").result(PATIENCE)
        jobs = [pool.submit(job(f"during{n}", SLOW)) for n in range(12)]
        lines = [session.exec(f"echo {n} >> log; sleep 0.1") for n in range(40)]
        for _ in range(2):
            time.sleep(0.7)
            nats_server.kill()
            jobs += [pool.submit(job(f"away{len(jobs)}"))]
            # Longer than a worker may be silent while the broker is there.
            time.sleep(3.0)
            nats_server.start()
        results = [future.result(PATIENCE) for future in jobs]
        assert [result.outcome for result in results] == ["ok"] * 14
        assert [result.attempts for result in results] == [1] * 14
        for line in lines:
            assert line.result(PATIENCE).exit_code == 0
        log = session.read_files(["log"]).result(PATIENCE).contents["log"]
        assert log.decode().split() == [str(n) for n in range(40)]
        assert num_workers(pool) == 1


def test_a_worker_that_was_given_up_comes_back_as_another(nats_server, name, start_worker):
    worker = start_worker()
    with make_pool(nats_server, name) as pool:
        (before,) = pool.workers.worker_ids
        session = pool.open("test").result(PATIENCE)
        future = pool.submit(job("stopped", SLOW))
        until(future.running)
        time.sleep(0.2)
        os.kill(worker.pid, signal.SIGSTOP)
        until(lambda: num_workers(pool) == 0)
        with pytest.raises(SessionFailed) as lost:
            session.exec("true").result(PATIENCE)
        assert lost.value.is_lost
        os.kill(worker.pid, signal.SIGCONT)
        result = future.result(PATIENCE)
        assert (result.outcome, result.attempts) == ("ok", 2)
        assert pool.workers.worker_ids != [before]


def test_a_worker_serves_the_next_instance_of_its_pool(nats_server, name, start_worker):
    start_worker()
    for number in range(2):
        with make_pool(nats_server, name) as pool:
            snapshot_id = "kept" if number else ""
            session = pool.open("test", snapshot_id=snapshot_id).result(PATIENCE)
            session.exec(f"echo {number} >> log").result(PATIENCE)
            session.snapshot("kept").result(PATIENCE)
    with make_pool(nats_server, name) as pool:
        session = pool.open("test", snapshot_id="kept").result(PATIENCE)
        assert session.exec("cat log").result(PATIENCE).stdout.text() == "0\n1\n"


def test_without_a_broker_or_a_worker_a_pool_says_so(nats_server, name):
    for url, why in (
        (nats_server.url, "no worker joined"),
        ("nats://[::1]:9", "No broker"),
    ):
        workers = RemoteWorkers(url, name, largest=LARGEST, join_seconds=1.0)
        with pytest.raises(SandboxUnavailable, match=why):
            Pool(workers, max_attempts=1)


class FakePool:
    """Speaks with one worker, message by message."""

    @classmethod
    async def connect(cls, server, name):
        self = cls()
        self.broker = await Broker.connect(
            Address(url=server.url), "fake pool", seconds=PATIENCE
        )
        self.subjects = Subjects(name)
        self.mail = Mail(self.broker, self.subjects)
        self.instance = uuid.uuid4().hex
        self.replies = {}  # by key, each as often as it came
        self.worker_id = ""
        subject = self.subjects.replies(self.instance)
        puller = Puller(
            self.broker,
            subjects_lib.REPLIES,
            f"pool_{self.instance}",
            subject,
            lambda message: self.tasks.append(asyncio.create_task(self.keep(message))),
            ack_seconds=5,
        )
        await self.broker.client.subscribe(self.subjects.beats("worker"), cb=self.hear)
        self.tasks = [asyncio.create_task(puller.run()), asyncio.create_task(self.beat())]
        await self.wait(lambda: self.worker_id)
        return self

    async def beat(self):
        while True:
            beat = codec.dumps(PoolBeat(instance=self.instance)).encode()
            await self.broker.announce(self.subjects.beats("pool"), beat)
            await asyncio.sleep(0.3)

    async def hear(self, message):
        beat = codec.loads(WorkerBeat, message.data)
        if beat.instance == self.instance:
            assert not beat.leaving
            self.worker_id = beat.worker_id

    async def keep(self, message):
        _, key = self.mail.address(message)
        _, reply = opened(await self.mail.read("replies", message), Reply)
        self.replies.setdefault(key, []).append(reply)
        await message.ack()

    async def wait(self, condition):
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.02)

    async def letter(self, request_id, request) -> Letter:
        data = envelope(request, request_id)
        subject = self.subjects.requests(self.worker_id)
        return await self.mail.write(
            "requests", subject, self.worker_id, key_of(request_id), data
        )

    async def ask(self, request_id, request):
        await self.mail.post(await self.letter(request_id, request))
        return await self.reply(request_id)

    async def reply(self, request_id):
        key = key_of(request_id)
        await self.wait(lambda: key in self.replies)
        return self.replies[key][-1]

    async def dead(self):
        """Headers of the last dead letter."""
        stream = self.broker.stream
        message = await stream.get_last_msg(subjects_lib.DEAD, self.subjects.dead())
        return message.headers

    async def requests_left(self):
        info = await self.broker.stream.stream_info(
            subjects_lib.REQUESTS, subjects_filter=self.subjects.requests("*")
        )
        return sum((info.state.subjects or {}).values())

    async def close(self):
        for task in self.tasks:
            task.cancel()
        beat = PoolBeat(instance=self.instance, is_leaving=True)
        await self.broker.announce(self.subjects.beats("pool"), codec.dumps(beat).encode())
        await self.broker.close()


def with_fake_pool(nats_server, name, scenario):
    async def main():
        pool = await FakePool.connect(nats_server, name)
        try:
            await scenario(pool)
        finally:
            await pool.close()

    asyncio.run(main())


def test_what_is_delivered_again_is_not_done_again(nats_server, name, start_worker):
    async def scenario(pool):
        await pool.ask("open", Open(session_id="s", domain="test"))
        script = Exec(session_id="s", script="echo x >> log; sleep 1.5")
        letter = await pool.letter("exec", script)
        # Without its id the broker takes it for another message each time.
        headers = {key: value for key, value in letter.headers.items() if key[0] == "J"}
        again = Letter(letter.subject, letter.body, headers)
        for _ in range(5):
            await pool.mail.post(again)
            await asyncio.sleep(0.1)
        assert (await pool.reply("exec")).exit_code == 0
        await pool.mail.post(again)
        files = await pool.ask("read", ReadFiles(session_id="s", paths=("log",)))
        assert files.contents["log"] == b"x\n"
        await asyncio.sleep(0.2)
        # Nor is its reply there twice, and every copy is acknowledged.
        assert len(pool.replies[key_of("exec")]) == 1
        assert await pool.requests_left() == 0

    start_worker()
    with_fake_pool(nats_server, name, scenario)


def test_a_request_that_can_never_be_done_ends_as_a_dead_letter(
    nats_server, name, start_worker
):
    async def scenario(pool):
        letter = await pool.letter("poison", Open(session_id="s", domain="test"))
        letter.headers["Jaxpt-Payload"] = str(Reference(1000, 1000, "0" * 64))
        await pool.mail.post(letter)
        reply = await pool.reply("poison")
        assert isinstance(reply, Failed) and reply.reason == "max_deliveries"
        headers = await pool.dead()
        assert headers["Jaxpt-Reason"] == "max_deliveries"
        assert headers["Jaxpt-Key"] == key_of("poison")
        assert not isinstance(
            await pool.ask("next", Open(session_id="s", domain="test")), Failed
        )
        assert await pool.requests_left() == 0

    start_worker()
    with_fake_pool(nats_server, name, scenario)


def test_a_worker_survives_malformed_messages(nats_server, name, start_worker):
    async def scenario(pool):
        client, subjects = pool.broker.client, pool.subjects
        inbox = subjects.requests(pool.worker_id)
        for garbage in (b"", b"{", b"\xff\0", b"[" * 100_000, b'{"id": 1}'):
            await client.publish(inbox, garbage)
            await client.publish(subjects.beats("pool"), garbage)
        letter = await pool.letter("nonsense", Open(session_id="s", domain="test"))
        await pool.mail.post(Letter(letter.subject, b'{"id": "nonsense"}', letter.headers))
        reply = await pool.reply("nonsense")
        assert isinstance(reply, Failed) and reply.reason == "bad_request"
        letter = await pool.letter("reference", Open(session_id="s", domain="test"))
        letter.headers["Jaxpt-Payload"] = "9999999999 1 x"
        await pool.mail.post(letter)
        assert (await pool.reply("reference")).reason == "bad_request"
        assert (await pool.dead())["Jaxpt-Reason"] == "malformed"
        assert not isinstance(
            await pool.ask("next", Open(session_id="s", domain="test")), Failed
        )
        assert await pool.requests_left() == 0

    start_worker()
    with_fake_pool(nats_server, name, scenario)


def test_a_pool_survives_malformed_messages(nats_server, name, start_worker):
    async def send(instance):
        broker = await Broker.connect(
            Address(url=nats_server.url), "test", seconds=PATIENCE
        )
        subjects = Subjects(name)
        for garbage in (b"", b"{", b"\xff\0", b'{"worker_id": "*.>", "instance": ""}'):
            for subject in (
                subjects.beats("worker"),
                subjects.beats("pool"),
                subjects.beats("nobody"),
                subjects.replies(instance),
            ):
                await broker.client.publish(subject, garbage)
        stranger = Mail(broker, subjects)
        key = key_of("x")
        letter = await stranger.write(
            "replies", subjects.replies(instance), uuid.uuid4().hex, key, b"?" * 600_000
        )
        await stranger.post(letter)
        await broker.close()

    start_worker()
    workers = RemoteWorkers(nats_server.url, name, largest=LARGEST, silence_seconds=2.0)
    with Pool(workers) as pool:
        asyncio.run(send(pool.workers.instance))
        assert pool.submit(job("after")).result(PATIENCE).outcome == "ok"
        until(lambda: left_on(nats_server, name) == [])
        assert num_workers(pool) == 1


def test_names_and_references_are_checked():
    for bad in ("", "a.b", "a b", "*", "x" * 65, "a\n"):
        with pytest.raises(ValueError, match="must have 1 to 64"):
            Subjects(bad)
    for bad in (
        "",
        "1 2",
        "1 0 " + "0" * 64,
        "1 2 " + "0" * 64,
        "9999999999 1 " + "0" * 64,
    ):
        with pytest.raises(ProtocolError):
            Reference.parse(bad)
    good = Reference(10, 4, "ab" * 32)
    assert Reference.parse(str(good)) == good
