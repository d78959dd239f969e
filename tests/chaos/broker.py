"""Kills the broker and the workers of a remote pool at random while episodes run.

    python tests/chaos/broker.py --seconds 120

Jobs go on over outages of up to two seconds; sessions end well, with each command done
once, or are reported lost. Exits with 1 if a job did not resolve once and right, or a
session did a command twice.
"""

import argparse
import collections
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from sandbox.pool import Pool
from sandbox.remote.workers import RemoteWorkers
from sandbox.session import SessionFailed
from tests import test_remote

TURNS = 10
PATIENCE = 120


def start_worker(server, pool):
    script = test_remote.ROOT / "scripts/launch/worker"
    command = [script, "--nats", server.url, "--pool", pool]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def one_session(pool):
    """How a session of some turns went: `good`, `lost: REASON`, or what it did wrong."""
    try:
        session = pool.open("chaos").result(PATIENCE)
        for turn in range(TURNS):
            session.exec(f"echo {turn} >>log; sleep 0.1").result(PATIENCE)
        found = session.read_files(["log"]).result(PATIENCE).contents["log"].split()
        session.close()
    except SessionFailed as failure:
        return f"lost: {failure.reason}" if failure.is_lost else f"wrong: {failure}"
    right = found == [str(turn).encode() for turn in range(TURNS)]
    return "good" if right else f"wrong: {found}"


def run(seconds, *, seed=0):
    """What was killed, and how jobs and sessions ended; see the module."""
    chooser = random.Random(seed)
    killed, outcomes = collections.Counter(), collections.Counter()
    sessions, resolved = collections.Counter(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        server = test_remote.Nats(folder)
        workers = [start_worker(server, "chaos") for _ in range(2)]
        end = time.monotonic() + seconds
        try:
            largest = test_remote.LARGEST
            remote = RemoteWorkers(
                server.url, "chaos", largest=largest, silence_seconds=2.0
            )
            with Pool(remote, max_attempts=10) as pool:

                def talk():
                    while time.monotonic() < end:
                        sessions[one_session(pool)] += 1

                threads = [threading.Thread(target=talk) for _ in range(2)]
                for thread in threads:
                    thread.start()
                futures = {}
                next_kill = time.monotonic() + 2
                while time.monotonic() < end:
                    if sum(not future.done() for future in futures.values()) < 12:
                        name = f"job {len(futures)}"
                        sleep = chooser.choice((0, 0, 0.5, 1.5))
                        code = f"import time; time.sleep({sleep}); {test_remote.HONEST}"
                        futures[name] = pool.submit(test_remote.job(name, code))
                        futures[name].add_done_callback(
                            lambda _, name=name: resolved.update([name])
                        )
                    if time.monotonic() > next_kill:
                        next_kill = time.monotonic() + chooser.uniform(1, 4)
                        if chooser.random() < 0.5:
                            killed["broker"] += 1
                            server.kill()
                            time.sleep(chooser.choice((0, 0.3, 1, 2)))
                            server.start()
                        else:
                            killed["worker"] += 1
                            worker = workers.pop(0)
                            worker.kill()
                            worker.wait()
                            workers.append(start_worker(server, "chaos"))
                    time.sleep(0.01)
                for thread in threads:
                    thread.join()
                for future in futures.values():
                    result = future.result(PATIENCE)
                    outcomes[f"{result.outcome}: {result.reason}"] += 1
                    if result.verdict and result.verdict["components"]["right"] != 1.0:
                        outcomes["wrong reward"] += 1
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait()
            server.kill()
    return {
        "seconds": seconds,
        "killed": dict(killed),
        "jobs": len(futures),
        "outcomes": dict(outcomes),
        "resolved other than once": [n for n in futures if resolved[n] != 1],
        "sessions": dict(sessions),
    }


def faults(report):
    """What the report says went wrong."""
    wrong = {name: n for name, n in report["sessions"].items() if name.startswith("wrong")}
    others = {n: c for n, c in report["outcomes"].items() if n != "ok: graded"}
    found = {"jobs": others, "sessions": wrong, "times": report["resolved other than once"]}
    return {name: what for name, what in found.items() if what}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = run(options.seconds, seed=options.seed)
    for name, value in report.items():
        print(f"{name}: {value}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(bool(faults(report)))


if __name__ == "__main__":
    main()
