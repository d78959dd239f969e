"""A worker for a pool on another machine.

    python -m sandbox.remote --nats nats://host:4222 --pool NAME

It joins the pool of that name under a new id whenever that pool is started, until it is
ended itself. It refuses to where this machine can't isolate.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from nats.aio.msg import Msg

from sandbox import codec, isolation
from sandbox.items import Resources
from sandbox.local_workers import WorkerLink, machine
from sandbox.nanny import Nanny
from sandbox.protocol import Result
from sandbox.remote.broker import Address, Broker, BrokerUnreachable, log
from sandbox.remote.handover import Handover
from sandbox.remote.snapshots import NatsStore
from sandbox.remote.subjects import PoolBeat, Subjects
from sandbox.remote.worker import Life
from sandbox.sessions import Run
from sandbox.worker import BACKENDS
from sandbox.workers import WorkerLost

_CONNECT_SECONDS = 30.0
_PAUSE_SECONDS = 1.0
_STOP_SECONDS = 5.0  # for a farewell and the end of the sandboxes


async def _serve(arguments: argparse.Namespace, folder: Path) -> None:
    """One life after the other, until it is cancelled. Raises CannotIsolate."""
    subjects = Subjects(arguments.pool)
    address = Address(
        url=arguments.nats, credentials=arguments.creds, tls_ca=arguments.tls_ca
    )
    isolation.check_waivers(tuple(arguments.waive))
    name = f"jaxpt worker of {subjects.pool}"
    while True:
        try:
            broker = await Broker.connect(address, name, seconds=_CONNECT_SECONDS)
        except BrokerUnreachable as error:
            log.warning("%s", error)
            continue
        try:
            while True:
                await _start(broker, subjects, arguments, tempfile.mkdtemp(dir=folder))
                await asyncio.sleep(_PAUSE_SECONDS)
        except BrokerUnreachable as error:
            log.warning("%s", error)
        finally:
            await broker.close()


async def _start(
    broker: Broker, subjects: Subjects, arguments: argparse.Namespace, folder: str
) -> None:
    """A worker process and its life. Raises CannotIsolate, BrokerUnreachable."""
    gpus = len(arguments.options.get("gpus", ()))
    capacity = dataclasses.replace(machine(), gpus=gpus)
    if arguments.cpus:
        capacity = dataclasses.replace(capacity, cpus=arguments.cpus)
    if arguments.memory_gib:
        memory_bytes = int(arguments.memory_gib * 1024**3)
        capacity = dataclasses.replace(capacity, memory_bytes=memory_bytes)
    child = WorkerLink(
        {
            "number": arguments.number,
            "snapshots": folder,
            "backend": arguments.backend,
            "options": arguments.options,
        }
    )
    waived = tuple(arguments.waive)
    try:
        await broker.while_open(_live(broker, subjects, capacity, child, folder, waived))
    except WorkerLost as lost:
        if lost.reason == "sandbox_failed":
            raise isolation.CannotIsolate(str(lost)) from lost
        log.warning("a worker process did not come up: %s", lost)
    finally:
        child.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _live(
    broker: Broker,
    subjects: Subjects,
    capacity: Resources,
    child: WorkerLink,
    folder: str,
    waived: tuple[str, ...],
) -> None:
    """Raises WorkerLost if the child does not come up, CannotIsolate."""
    await child.start()
    listening = asyncio.create_task(child.listen())
    try:
        await _check_isolation(child, waived)
        instance = await _instance(broker, subjects)
        handover = Handover(child, folder, NatsStore(broker, subjects))
        life = Life(broker, subjects, instance, capacity, handover)
        log.warning("worker %s of pool %s begins", life.worker_id, subjects.pool)

        def lose(listening: asyncio.Task[WorkerLost]) -> None:
            if not listening.cancelled():
                life.end(listening.result().reason, str(listening.result()))

        listening.add_done_callback(lose)
        lost = await life.run()
        log.warning("worker %s ends: %s", life.worker_id, lost)
    finally:
        listening.cancel()


async def _check_isolation(child: WorkerLink, waived: tuple[str, ...]) -> None:
    """The pool checks only the first that joins. Raises CannotIsolate, WorkerLost."""
    replies = await asyncio.gather(
        *(child.request(job.job_id, Run(job=job)) for job in isolation.jobs())
    )
    results = [reply for reply in replies if isinstance(reply, Result)]
    if len(results) < len(replies):
        raise WorkerLost("worker_died", f"it answered {replies}")
    if complaint := isolation.complaint(isolation.findings(results), waived):
        raise isolation.CannotIsolate(complaint)


async def _instance(broker: Broker, subjects: Subjects) -> str:
    """Of the pool, once one beats."""
    heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def hear(message: Msg) -> None:
        with contextlib.suppress(ValueError):
            beat = codec.loads(PoolBeat, message.data)
            if not beat.is_leaving and not heard.done():
                heard.set_result(beat.instance)

    subscription = await broker.client.subscribe(subjects.beats("pool"), cb=hear)
    try:
        return await heard
    finally:
        with contextlib.suppress(Exception):
            await subscription.unsubscribe()


async def _run(arguments: argparse.Namespace) -> int:
    nanny = Nanny(containers=arguments.backend == "docker")
    serving = asyncio.create_task(_serve(arguments, Path(nanny.folder)))
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    stopped = asyncio.create_task(stopping.wait())
    while not serving.done() and not stopped.done():
        tasks = (serving, stopped)
        await asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        nanny.check()
    while not serving.done():
        # More than once: the client's library loses a cancellation now and then.
        serving.cancel()
        await asyncio.wait((serving,), timeout=_STOP_SECONDS)
    stopped.cancel()
    nanny.close()
    if not serving.cancelled() and (error := serving.exception()):
        log.error("%s", error, exc_info=None if _is_expected(error) else error)
        return 1
    return 0


def _is_expected(error: BaseException) -> bool:
    return isinstance(error, isolation.CannotIsolate | ValueError)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/launch/worker", description="A sandbox worker for a remote pool."
    )
    parser.add_argument("--nats", required=True, help="nats://[user:password@]host:4222")
    parser.add_argument("--pool", required=True, help="the pool's name")
    parser.add_argument("--cpus", type=float, help="to give away; all, if not given")
    parser.add_argument("--memory-gib", type=float, help="to give away; 80%%, if not given")
    parser.add_argument("--creds", default="", help="path of a .creds file")
    parser.add_argument("--tls-ca", default="", help="path of the broker's CA certificates")
    parser.add_argument("--backend", default="local", choices=sorted(BACKENDS))
    parser.add_argument("--options", type=json.loads, default={}, help="of the backend")
    parser.add_argument("--waive", action="append", default=[], metavar="LAYER")
    parser.add_argument(
        "--number",
        type=int,
        default=1000 + os.getpid() % 100_000,
        help="for the uids of its sandboxes; another for each worker of a machine",
    )
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    return asyncio.run(_run(arguments))


if __name__ == "__main__":
    sys.exit(main())
