"""Sandboxes on this machine, jaxpt's and its peers', measured in turn.

    python scripts/bench/sandbox.py --json figures.json --markdown docs/performance.md

Systems run one after the other, round after round, and the figures are medians over rounds.
`acquire` is until a session can run something, `exec` is `true` in a session's shell (a
fresh one where a peer has none that stays), and a one-shot episode is a fresh sandbox, a
Python program in it, and its artifact; ours is graded in a second sandbox. The peers'
environments are made once, under .cache/bench (see peers/sandbox_peers.py).

    python scripts/bench/sandbox.py --profile

says instead which kinds of process use the processor in an episode of ours, and what an
idle session is made of.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from peers import sandbox_peers, sandbox_processes, sandbox_report
from peers.sandbox_peers import PEERS, PeerFailed, PeerUnavailable

from sandbox.local_workers import LocalWorkers
from sandbox.pool import Pool
from sandbox.protocol import Execution, Grading, Job, Limits
from sandbox.session import Session

PROGRAM = "open('out', 'w').write('5')"
GRADER = """
def grade(artifacts, payload):
    return {"components": {"right": float(artifacts["out"] == b"5")}, "why": ""}
"""
MIB = 1 << 20
# What the issue asks for: the bound, and whether more is better.
GOALS = {
    "acquire_p50_ms": (5.0, False),
    "exec_p50_ms": (3.0, False),
    "oneshot_per_s": (150.0, True),
    "idle_mb": (3.0, False),
    "fork_50mb_ms": (20.0, False),
}
# Episodes, sessions and commands of peers that take a tenth of a second for each.
SLOW = {"swe-rex local", "inspect_ai docker", "docker exec"}
WRITE_50_MB = """
for number in 1 2 3 4 5; do head -c 10485760 /dev/urandom > "file-$number"; done
"""


def milliseconds(call: Any) -> tuple[float, Any]:
    """How long a call took, and what it returned."""
    start = time.perf_counter()
    result = call()
    return 1e3 * (time.perf_counter() - start), result


def job(job_id: str) -> Job:
    return Job(
        job_id=job_id,
        domain="bench",
        execution=Execution(
            command=("python", "-I", "-S", "main.py"),
            files={"main.py": PROGRAM.encode()},
            artifacts=("out",),
        ),
        grading=Grading(program=GRADER, payload=None),
    )


def oneshots(pool: Pool, name: str, episodes: int) -> dict[str, float]:
    """Episodes a second, and medians of what an episode's own clock says, in ms."""
    start = time.perf_counter()
    futures = [pool.submit(job(f"{name}/{i}")) for i in range(episodes)]
    results = [future.result() for future in futures]
    seconds = time.perf_counter() - start
    outcomes = collections.Counter(result.outcome for result in results)
    if outcomes != {"ok": episodes}:
        raise SystemExit(f"Not every episode was graded: {dict(outcomes)}.")
    return {
        "oneshot_per_s": episodes / seconds,
        **{
            f"oneshot_{part}_p50_ms": 1e3
            * statistics.median(result.seconds[part] for result in results)
            for part in ("acquire", "execute", "grade")
        },
    }


def acquire(pool: Pool, count: int) -> dict[str, float]:
    times = []
    for _ in range(count):
        taken, session = milliseconds(lambda: pool.open("bench").result())
        times.append(taken)
        session.close().result()
    return {"acquire_p50_ms": statistics.median(times)}


def execs(pool: Pool, count: int) -> dict[str, float]:
    session = pool.open("bench").result()
    session.exec("true").result()
    times = [milliseconds(lambda: session.exec("true").result())[0] for _ in range(count)]
    session.close().result()
    return {"exec_p50_ms": statistics.median(times)}


def forks(pool: Pool, count: int) -> dict[str, float]:
    """Of a workspace where a command has just written 50 MB; then once more of the same.

    Until `fork` is answered, and until the new session has answered its first command.
    """
    limits = Limits(file_bytes=64 * MIB, workspace_bytes=256 * MIB)
    times = collections.defaultdict(list)
    for _ in range(count):
        session = pool.open("bench", limits).result()
        ran = session.exec(WRITE_50_MB).result()
        if ran.reason:
            raise SystemExit(f"50 MB could not be written: {ran}")
        for name in ("fork", "fork_again"):
            start = time.perf_counter()
            forked = session.fork().result()
            times[name].append(1e3 * (time.perf_counter() - start))
            listed = forked.exec("ls").result()
            times[f"{name}_to_exec"].append(1e3 * (time.perf_counter() - start))
            if listed.stdout.text().count("file-") != 5:
                raise SystemExit(f"The fork does not hold what was written: {listed}")
            forked.close().result()
        session.close().result()
    medians = {f"{name}_50mb_ms": statistics.median(found) for name, found in times.items()}
    return medians


def settled_mb() -> float:
    """Memory to be had, once it has stopped to change by much."""
    before = sandbox_processes.available_mb()
    for _ in range(10):
        time.sleep(0.5)
        now = sandbox_processes.available_mb()
        if abs(now - before) < 2:
            break
        before = now
    return now


def idle(workers: int, sessions: int) -> dict[str, Any]:
    """MiB of each of so many sessions that have run a command and wait for the next one.

    By what the machine has less to give, and by what all processes of the pool hold.
    """
    local_workers = LocalWorkers(workers)
    with Pool(local_workers, session_share=1e-4) as pool:
        for session in [pool.open("warm").result() for _ in range(workers)]:
            session.exec("true").result()
            session.close().result()
        available = settled_mb()

        def begin(_: int) -> Session:
            session = pool.open("bench").result()
            if session.exec("true").result().reason:
                raise SystemExit("A session did not run its command.")
            return session

        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            opened = list(threads.map(begin, range(sessions)))
        seconds = time.perf_counter() - start
        taken = available - settled_mb()
        kinds = sandbox_processes.by_kind(os.getpid(), local_workers.pids)
        held = sandbox_processes.memory_mb(kinds)
        answer, ran = milliseconds(lambda: opened[0].exec("echo alive").result())
        if ran.stdout.text() != "alive\n":
            raise SystemExit("The first of the idle sessions is not alive.")
        closing, _ = milliseconds(
            lambda: [future.result() for future in [s.close() for s in opened]]
        )
    by_pss = sum(held.values()) / sessions
    return {
        "idle_mb": max(taken / sessions, by_pss),
        "sessions": sessions,
        "by_available_mb": taken / sessions,
        "by_pss_mb": by_pss,
        "pss_kb_a_session": {k: 1024 * v / sessions for k, v in held.items()},
        "processes": {kind: len(members) for kind, members in kinds.items()},
        "open_ms_each": 1e3 * seconds / sessions,
        "close_ms_each": closing / sessions,
        "exec_of_first_ms": answer,
    }


def of_ours(pool: Pool, name: str, options: argparse.Namespace) -> dict[str, float]:
    """One round."""
    return {
        **acquire(pool, options.repeats),
        **execs(pool, options.repeats),
        **oneshots(pool, name, options.episodes),
        **forks(pool, max(options.repeats // 10, 3)),
    }


def of_peer(name: str, options: argparse.Namespace) -> dict[str, float]:
    """One round, in a fresh process of the peer's. Raises PeerUnavailable, PeerFailed."""
    divisor = 10 if name in SLOW else 1
    count = max(options.repeats // divisor, 3)
    episodes = max(options.episodes // (4 * divisor), 4)
    with sandbox_peers.Driver(PEERS[name]) as driver:
        figures = driver.ask("acquire", count=count)
        figures |= driver.ask("execs", count=count, script="true")
        python = driver.ask("execs", count=count, script="python3 -I -S -c pass")
        figures["python_p50_ms"] = python["exec_p50_ms"]
        figures |= driver.ask("episodes", count=episodes, together=options.workers)
    return figures


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """All figures: medians over rounds, and how many times ours each peer's are."""
    rounds: dict[str, list[dict[str, float]]] = {"ours": []}
    unavailable: dict[str, str] = {}
    with Pool(LocalWorkers(options.workers)) as pool:
        oneshots(pool, "warm", 10 * options.workers)
        for number in range(options.rounds):
            rounds["ours"].append(of_ours(pool, str(number), options))
            for name in options.peers:
                if name in unavailable:
                    continue
                try:
                    rounds.setdefault(name, []).append(of_peer(name, options))
                except (PeerUnavailable, PeerFailed, TimeoutError) as error:
                    unavailable[name] = str(error) or repr(error)
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    medians = {name: median_of(found) for name, found in rounds.items() if found}
    idle_figures = idle(options.workers, options.sessions)
    details: dict[str, Any] = {**medians.pop("ours"), "idle": idle_figures}
    ours = {key: (details | idle_figures)[key] for key in GOALS}
    return {
        "ours": ours,
        "goals": {key: goal for key, (goal, _) in GOALS.items()},
        "reached": {key: reached(key, ours[key]) for key in GOALS},
        "details": details,
        "peers": medians,
        "unavailable": unavailable,
        "ratios": {
            name: {key: peer[key] / ours[key] for key in GOALS if key in peer}
            for name, peer in medians.items()
        },
        "rounds": rounds,
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "kernel": os.uname().release,
            "load": os.getloadavg(),
        },
    }


def reached(key: str, value: float) -> bool:
    goal, more_is_better = GOALS[key]
    return value >= goal if more_is_better else value <= goal


def report(figures: dict[str, Any]) -> str:
    """Tables of ours beside the goals, and of all systems."""
    ours, details = figures["ours"], figures["details"]
    rows = [
        [key, f"{ours[key]:.2f}", f"{goal:g}", "yes" if figures["reached"][key] else "no"]
        for key, goal in figures["goals"].items()
    ]
    goals = sandbox_report.table(["figure", "jaxpt", "goal", "reached"], rows)
    shown = ("acquire_p50_ms", "exec_p50_ms", "python_p50_ms", "oneshot_per_s")
    header = ["system", "acquire, ms", "`true`, ms", "`python3 -c pass`, ms", "one-shot/s"]
    rows = [["jaxpt", *(_cell(ours, key) for key in shown)]]
    for name in [*figures["peers"], *figures["unavailable"]]:
        found = figures["peers"].get(name, {})
        version = PEERS[name].version
        rows.append([version, *(_cell(found, key, ours) for key in shown)])
    systems = sandbox_report.table(header, rows)
    unavailable = [
        f"{PEERS[name].version} was not measured: {reason}"
        for name, reason in figures["unavailable"].items()
    ]
    idle_figures = details["idle"]
    kinds = ", ".join(
        f"{kind} {value:.0f}" for kind, value in idle_figures["pss_kb_a_session"].items()
    )
    machine = figures["machine"]
    notes = [
        "In brackets: how many times ours. No peer here forks a workspace, and those that "
        "keep a shell are swe-rex and ours.",
        *unavailable,
        f"Fork of 50 MB: {details['fork_50mb_ms']:.1f} ms until the fork is there, "
        f"{details['fork_to_exec_50mb_ms']:.1f} ms until it has run a command; of the same "
        f"state again {details['fork_again_50mb_ms']:.1f} and "
        f"{details['fork_again_to_exec_50mb_ms']:.1f} ms.",
        f"{idle_figures['sessions']} idle sessions: {idle_figures['by_available_mb']:.2f} "
        f"MB each of the machine's memory, {idle_figures['by_pss_mb']:.2f} MB of processes "
        f"(kB each: {kinds}); opened with a command run in "
        f"{idle_figures['open_ms_each']:.1f} ms each.",
        f"Medians of {len(figures['rounds']['ours'])} rounds on {machine['cpus']} cores, "
        f"Linux {machine['kernel']}, load {machine['load'][0]:.1f} at the end.",
    ]
    return "\n\n".join([goals, systems, *notes])


def _cell(found: dict[str, float], key: str, ours: dict[str, float] | None = None) -> str:
    if key not in found:
        return ""
    if not ours or key not in ours:
        return f"{found[key]:.2f}"
    return f"{found[key]:.2f} ({found[key] / ours[key]:.3g})"


def profile(options: argparse.Namespace) -> dict[str, Any]:
    """Processor milliseconds by kind of process, of an episode and of an empty session."""

    workers = LocalWorkers(options.workers)

    def used() -> dict[str, float]:
        kinds = sandbox_processes.by_kind(os.getpid(), workers.pids)
        return sandbox_processes.cpu_ms(kinds)

    def sessions(pool: Pool) -> None:
        for _ in range(options.episodes):
            pool.open("bench").result().close().result()

    work = {
        "one-shot episode": lambda pool: oneshots(pool, "profiled", options.episodes),
        "session opened and closed": sessions,
    }
    found: dict[str, Any] = {}
    with Pool(workers) as pool:
        oneshots(pool, "warm", 10 * options.workers)
        for name, run in work.items():
            before = used()
            start = time.perf_counter()
            run(pool)
            seconds = time.perf_counter() - start
            after = used()
            found[name] = {
                kind: (after[kind] - before[kind]) / options.episodes for kind in after
            }
            found[name] |= {
                "all": sum(found[name].values()),
                "elapsed": 1e3 * seconds / options.episodes,
            }
    found["idle"] = idle(options.workers, options.sessions)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=300, help="of ours in a round")
    parser.add_argument("--repeats", type=int, default=100, help="of acquire and exec")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sessions", type=int, default=1000, help="idle ones (1000)")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--profile", action="store_true", help="ours alone, by process")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables into this page")
    parser.add_argument("--from-json", type=Path, help="the figures of an earlier run")
    options = parser.parse_args()
    if options.profile:
        figures = profile(options)
        print(json.dumps(figures, indent=1))
    else:
        if options.from_json:
            figures = json.loads(options.from_json.read_text())
        else:
            figures = compare(options)
        print(report(figures))
        if options.markdown:
            text = report(figures)
            sandbox_report.write_section(options.markdown, "sandbox.py", text)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
