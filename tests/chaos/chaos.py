"""Kills processes of the pool and the trainer at random while episodes run.

    python tests/chaos/chaos.py --seconds 120

Prints what was killed, how the episodes ended, and what was left 10 s later; exits with 1
if an episode was lost or doubled, or a reward wrong, or anything was left.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WITHIN_SECONDS = 10.0


def processes():
    """{pid: (parent, command line)} of everything that runs."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            line = (
                (path / "cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
            found[int(path.name)] = (parent, line)
    return found


def below(root, known):
    """The descendants of a process."""
    children = collections.defaultdict(list)
    for pid, (parent, _) in known.items():
        children[parent].append(pid)
    found, todo = set(), [root]
    while todo:
        for child in children[todo.pop()]:
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def kind(line):
    for name, text in (
        ("nanny", "sandbox.nanny"),
        ("worker", "sandbox.worker"),
        ("zygote, slot, init or Python program", "local.zygote"),
        ("shell", "bash --noprofile"),
        ("background program", "sleep 300."),
    ):
        if text in line:
            return name
    return "other"


def groups():
    return {
        str(path)
        for pattern in ("*/jaxpt-sandbox-*", "*/*/jaxpt-sandbox-*", "*/*/*/jaxpt-sandbox-*")
        for path in Path("/sys/fs/cgroup").glob(pattern)
    }


def ownerless(path, now):
    """Whether no process lives that the path is named after; its last number counts."""
    numbers = re.findall(r"jaxpt-(?:sandbox|snapshots)[-/](\d+)", path)
    return not numbers or int(numbers[-1]) not in now


def mounts():
    """How often something is mounted at each place, but for Docker's own."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    places = collections.Counter(line.split()[4] for line in lines)
    return collections.Counter({p: n for p, n in places.items() if "/docker/" not in p})


def leftovers(before, marker):
    """What there is now that was not there before."""
    now = processes()
    folders = {str(path) for path in Path(tempfile.gettempdir()).glob("jaxpt-snapshots-*")}
    ours = [
        line
        for _, line in now.values()
        if f"300.{marker}" in line or ("trainer.py" in line and str(marker) in line)
    ]
    # Other pools may be at work on this machine; theirs have an owner.
    workers = [
        line
        for pid, (parent, line) in now.items()
        if pid not in before["processes"]
        and kind(line) in ("worker", "nanny")
        and (parent == 1 or parent not in now)
    ]
    return {
        "processes": ours + workers,
        "groups": sorted(
            path for path in groups() - before["groups"] if ownerless(path, now)
        ),
        "folders": sorted(
            path for path in folders - before["folders"] if ownerless(path, now)
        ),
        "mounts": sorted(
            path for path in mounts() - before["mounts"] if ownerless(path, now)
        ),
    }


def run(seconds, *, seed=0, episodes=None, workers=2, pause=0.4):
    """What was killed, how the episodes ended, and what was left; see the module."""
    chooser = random.Random(seed)
    marker = os.getpid() * 100 + seed
    before = {
        "processes": set(processes()),
        "groups": groups(),
        "folders": {str(p) for p in Path(tempfile.gettempdir()).glob("jaxpt-snapshots-*")},
        "mounts": mounts(),
    }
    episodes = episodes or int(16 * seconds)
    killed = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder, "ledger")
        ledger.touch()
        script = str(Path(__file__).with_name("trainer.py"))
        command = [sys.executable, script, str(ledger), str(episodes), str(marker)]
        command.append(str(workers))
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        trainer = subprocess.Popen(command, env=environment)
        end = time.monotonic() + seconds
        try:
            while trainer.poll() is None or trainer.returncode != 0:
                if trainer.poll() is not None:
                    trainer = subprocess.Popen(command, env=environment)
                if time.monotonic() > end:
                    code = trainer.wait(600)
                    if code == 0:
                        break
                    continue
                time.sleep(chooser.uniform(0.2, 1.8) * pause)
                known = processes()
                by_kind = collections.defaultdict(list)
                for pid in sorted(below(trainer.pid, known)):
                    by_kind[kind(known[pid][1])].append(pid)
                by_kind.pop("other", None)
                if chooser.random() < 0.08:
                    victim, name = trainer.pid, "trainer"
                elif not by_kind:
                    continue
                else:
                    name = chooser.choice(sorted(by_kind))
                    victim = chooser.choice(by_kind[name])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed[name] += 1
                if name == "trainer":
                    trainer.wait()
        finally:
            if trainer.poll() is None:
                trainer.kill()
                trainer.wait()
        lines = [line.split() for line in ledger.read_text().splitlines()]
    deadline = time.monotonic() + WITHIN_SECONDS
    while any(left := leftovers(before, marker).values()) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = leftovers(before, marker)
    ids = collections.Counter(int(words[0]) for words in lines)
    return {
        "seconds": seconds,
        "episodes": episodes,
        "killed": dict(sorted(killed.items())),
        "outcomes": dict(collections.Counter(f"{w[1]}: {w[2]}" for w in lines)),
        "tried again": sum(int(words[4]) > 1 for words in lines),
        "missing": sorted(set(range(episodes)) - set(ids)),
        "doubled": sorted(number for number, times in ids.items() if times > 1),
        "wrong rewards": [w for w in lines if w[1] == "ok" and w[3] != "1.0"],
        "blamed on the agent": [w for w in lines if w[1] == "policy_fail"],
        "left behind": {name: what for name, what in left.items() if what},
    }


def faults(report):
    """What the report says went wrong."""
    names = ("missing", "doubled", "wrong rewards", "left behind")
    return {name: report[name] for name in names if report[name]}


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
