"""Which hostile programs each system contains: jaxpt's backends, and its peers.

    python scripts/bench/containment.py --json matrix.json --markdown docs/containment.md

Every cell is decided by a run: the attack, beside it an honest program in another session
of the same system, and one more after it, which must both leave the right artifact. A cell
is `contained`, `leaked` (it got through, or its end left something), `hung` (no answer in
its time limit and ten seconds more) or `not applicable`. Attacks are in attacks/; on a
system that does not isolate they run on the bare machine, so all are bounded and undone.

The exit code is 1 if an attack on ours was not contained, or an honest program failed.
"""

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from attacks import cheats, programs
from attacks.cheats import CHEATS, Cheat
from attacks.host import Host
from attacks.programs import ATTACKS, PRELUDE, Attack, Scene
from attacks.systems import (
    Died,
    EvalPlus,
    Ours,
    Refused,
    System,
    Theirs,
    arguments_file,
)
from peers import sandbox_report
from peers.sandbox_peers import PEERS, PeerFailed, PeerUnavailable

from sandbox.backends.backend import SandboxUnavailable

OURS = ("ours local", "ours docker")
COLUMNS = (*OURS, "swe-rex local", "inspect_ai local", "evalplus")
CONTAINED, LEAKED, HUNG, NONE = "contained", "leaked", "hung", "not applicable"
_PATIENCE = 10.0  # seconds beyond a time limit, before a system counts as hung

Cell = dict[str, Any]


def honest(system: System) -> bool:
    """Whether a program that does no harm leaves the right artifact."""
    try:
        session = system.open()
        try:
            system.write(session, "main.py", b"open('out', 'w').write('5')")
            system.exec(session, "python3 -I -S main.py", 30.0).result(60)
            return system.read(session, "out")[0] == b"5"
        finally:
            system.close(session)
    except (Refused, Died, TimeoutError):
        return False


def beside(system: System, attack: Callable[[], tuple[str, str]]) -> Cell:
    """The cell of an attack; honest programs run during it and after it."""
    during: list[bool] = []
    thread = threading.Thread(target=lambda: during.append(honest(system)))
    start = time.monotonic()
    thread.start()
    try:
        cell, why = attack()
    except TimeoutError:
        cell, why = HUNG, "no answer"
    except Died as error:
        cell, why = LEAKED, f"the harness died: {error}"
    except Refused as error:
        cell, why = CONTAINED, f"refused: {error}"
    seconds = time.monotonic() - start
    thread.join(90)
    if cell == HUNG or (during != [True] and cell == LEAKED):
        system.restart()
    after = honest(system)
    if not after:
        system.restart()
    return {
        "cell": cell,
        "why": why[:300],
        "honest": during == [True] and after,
        "honest_during": during == [True],
        "seconds": round(seconds, 2),
    }


def try_attack(system: System, host: Host, attack: Attack, marker: str) -> tuple[str, str]:
    session = system.open()
    try:
        arguments = host.arguments(marker, system.harness)
        source = f"{PRELUDE}\n{attack.program}\nprint('TRIED', flush=True)\n"
        system.write(session, "arguments.json", arguments_file(arguments))
        system.write(session, "attack.py", source.encode())
        running = system.exec(session, "python3 -I -S attack.py", attack.seconds)
        return judge(system, session, host, attack, marker, running)
    finally:
        with contextlib.suppress(Refused, Died, TimeoutError):
            system.close(session)


def judge(
    system: System, session: Any, host: Host, attack: Attack, marker: str, running: Any
) -> tuple[str, str]:
    try:
        ran = running.result(attack.seconds + _PATIENCE)
    except Refused as error:
        # The sandbox, or its shell, was lost to the attack: it must be said, and no more.
        scene = Scene(system, None, host, marker, "", False)
        left = programs.survivors(scene)
        return (LEAKED, left) if left else (CONTAINED, f"refused: {error}")
    said = [line for line in ran.output.splitlines() if line.startswith("THROUGH")]
    if said:
        return LEAKED, "; ".join(line.removeprefix("THROUGH ") for line in said)
    if "ABSENT" in ran.output:
        return NONE, ran.output.partition("ABSENT ")[2].splitlines()[0]
    if attack.ends and ran.timed_out:
        return HUNG, "it did not end within its time limit"
    if attack.ends and "TRIED" not in ran.output:
        # It did not come to its end: killed, or unable to run, which proves nothing.
        killed = "Killed" in ran.output or "MemoryError" in ran.output
        if not killed and "LAST" not in ran.output and attack.check is programs.none:
            return NONE, f"the attack did not run: {ran.output[-200:]}"
    scene = Scene(system, session, host, marker, ran.output, ran.timed_out)
    try:
        found = attack.check(scene)
    except Refused as error:
        return CONTAINED, f"refused: {error}"
    return (LEAKED, found) if found else (CONTAINED, "")


def try_many_timeouts(system: System, host: Host, marker: str) -> tuple[str, str]:
    """40 execs in 8 sessions, of which every fifth takes too long."""
    sessions = [system.open() for _ in range(8)]
    try:
        slow = f"bash -c 'exec -a {marker} sleep 300'"
        running = []
        for number in range(40):
            script = slow if number % 5 == 0 else "sleep 0.1"
            running.append(system.exec(sessions[number % 8], script, 1.0))
        deadline = time.monotonic() + 30
        for future in running:
            with contextlib.suppress(Refused):
                future.result(max(deadline - time.monotonic(), 0.01))
    finally:
        for session in sessions:
            with contextlib.suppress(Refused, Died, TimeoutError):
                system.close(session)
    found = programs.survivors(Scene(system, None, host, marker, "", False))
    return (LEAKED, found) if found else (CONTAINED, "")


def try_dead_controller(system: System, host: Host, marker: str) -> tuple[str, str]:
    system.leave_and_kill(_left(marker))
    deadline = time.monotonic() + 5
    while alive := host.alive(marker):
        if time.monotonic() > deadline:
            return LEAKED, f"{len(alive)} processes live on"
        time.sleep(0.1)
    return CONTAINED, ""


def try_snapshot(system: System, host: Host, marker: str) -> tuple[str, str]:
    if not isinstance(system, Ours):
        return NONE, "it has no snapshots"
    session = system.open()
    try:
        system.exec(session, _left(marker), 10.0).result(30)
        if not host.alive(marker):
            return NONE, "the process was not there to begin with"
        system.survives_snapshot(session)
        found = programs.survivors(Scene(system, session, host, marker, "", False))
    finally:
        system.close(session)
    return (LEAKED, found) if found else (CONTAINED, "")


def _left(marker: str) -> str:
    """A script that leaves a process behind and ends."""
    streams = ">/dev/null 2>&1 </dev/null"
    return f"setsid bash -c 'exec -a {marker} sleep 300' {streams} & sleep 0.3"


def try_endless_grader(system: System, host: Host, marker: str) -> tuple[str, str]:
    if not isinstance(system, Ours):
        return NONE, "its grader is not a program of ours"
    found = system.hang_a_grader()
    return (LEAKED, found) if found else (CONTAINED, "")


# Rows of which the attack is more than a program: name, complaints, what is done.
SPECIAL = [
    ("40 execs at once, a fifth of them too long", "2", try_many_timeouts),
    ("the controller is killed by SIGKILL", "11, 12", try_dead_controller),
    ("a process outlives a snapshot", "31", try_snapshot),
    ("a grader without end", "10", try_endless_grader),
]


def try_cheat(system: Any, cheat: Cheat) -> Cell:
    """Its cell: whether it got the reward, and whether an honest solution got one."""
    start = time.monotonic()
    try:
        score = system.score(cheat)
        cell = NONE if score is None else LEAKED if score > 0 else CONTAINED
        why = "" if score is None else f"scored {score:g}"
    except (TimeoutError, PeerFailed):
        cell, why = HUNG, "no answer"
        system.restart()
    except Refused as error:
        cell, why = CONTAINED, f"refused: {error}"
    seconds = round(time.monotonic() - start, 2)
    right = Cheat(name="honest", solution=cheats.HONEST, tolerance=cheat.tolerance)
    try:
        scored = cell == NONE or system.score(right) == 1.0
    except (Refused, Died, PeerFailed, TimeoutError):
        scored = False
        system.restart()
    return {"cell": cell, "why": why, "honest": scored, "seconds": seconds}


def sandbox_cells(
    name: str, system: System, host: Host, wanted: Callable[[str], bool]
) -> dict[str, Cell]:
    """The cells of hostile programs."""
    rows: list[tuple[str, Callable[[str], tuple[str, str]]]] = [
        (attack.name, lambda m, a=attack: try_attack(system, host, a, m))
        for attack in ATTACKS
    ]
    rows += [(row, lambda m, r=run: r(system, host, m)) for row, _, run in SPECIAL]
    cells: dict[str, Cell] = {}
    for number, (row, run) in enumerate(rows):
        if wanted(row):
            marker = f"{host.token}-{number}-{name.replace(' ', '-')}"
            cells[row] = beside(system, lambda r=run, m=marker: r(m))
            host.clear(but={system.harness})
            _say(name, row, cells[row])
    return cells


def column(
    name: str, host: Host, wanted: Callable[[str], bool], waive: Sequence[str]
) -> dict[str, Cell]:
    """All cells of a system. Raises SandboxUnavailable, PeerUnavailable."""
    if name == "evalplus":
        system: Any = EvalPlus()
    elif name in OURS:
        system = Ours(host, name.removeprefix("ours "), waive)
    else:
        system = Theirs(host, PEERS[name])
    try:
        cells = {}
        if name != "evalplus":
            cells |= sandbox_cells(name, system, host, wanted)
        for cheat in CHEATS:
            row = f"grader: {cheat.name}"
            if wanted(row):
                cells[row] = try_cheat(system, cheat)
                host.clear(but={system.harness})
                _say(name, row, cells[row])
        return cells
    finally:
        system.stop()


def _say(name: str, row: str, cell: Cell) -> None:
    beside = "" if cell["honest"] else ", HONEST FAILED"
    print(
        f"{name}: {row}: {cell['cell']}{beside} ({cell['seconds']} s) {cell['why']}",
        file=sys.stderr,
    )


def row_names() -> dict[str, str]:
    """Every row, and the complaints that it stands for."""
    return {
        **{attack.name: attack.complaints for attack in ATTACKS},
        **{name: complaints for name, complaints, _ in SPECIAL},
        **{f"grader: {cheat.name}": cheat.complaints for cheat in CHEATS},
    }


def report(matrix: dict[str, Any]) -> str:
    """The matrix as a table, with how many cells of each kind a column has."""
    columns = matrix["columns"]
    rows = []
    for row, complaints in row_names().items():
        if any(row in cells for cells in columns.values()):
            cells = [_shown(cells.get(row)) for cells in columns.values()]
            rows.append([row, complaints, *cells])
    header = ["attack", "complaint", *columns]
    lines = [sandbox_report.table(header, rows)]
    for name, cells in columns.items():
        counts = {
            kind: sum(cell["cell"] == kind for cell in cells.values())
            for kind in (CONTAINED, LEAKED, HUNG)
        }
        shown = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        failed = sum(not cell["honest"] for cell in cells.values())
        lines.append(
            f"{name}: {shown}; the honest program beside it failed {failed} times."
        )
    if matrix["waived"]:
        lines.append(f"Waived for ours: {', '.join(matrix['waived'])}.")
    for name, why in matrix["unavailable"].items():
        lines.append(f"{name} was not tried: {why}")
    return "\n\n".join(lines)


def _shown(cell: Cell | None) -> str:
    if cell is None or cell["cell"] == NONE:
        return "n/a"
    return cell["cell"] if cell["honest"] else f"{cell['cell']} (honest failed)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--rows", default="", help="only rows with this in their names")
    parser.add_argument(
        "--waive", nargs="*", default=[], help="layers that ours need not have here"
    )
    parser.add_argument("--json", type=Path, help="also write the matrix to this file")
    parser.add_argument("--markdown", type=Path, help="write the table into this page")
    options = parser.parse_args()
    matrix: dict[str, Any] = {
        "columns": {},
        "unavailable": {},
        "waived": options.waive,
    }
    with Host() as host:
        for name in options.columns:
            try:
                found = column(name, host, lambda row: options.rows in row, options.waive)
                matrix["columns"][name] = found
            except (SandboxUnavailable, PeerUnavailable, TypeError) as error:
                matrix["unavailable"][name] = str(error)
            finally:
                host.clear(but=set())
    text = report(matrix)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(matrix, indent=1) + "\n")
    if options.markdown:
        sandbox_report.write_section(options.markdown, "containment.py", text)
    ours = [
        cell
        for name in OURS
        for cell in matrix["columns"].get(name, {}).values()
        if cell["cell"] not in (CONTAINED, NONE) or not cell["honest"]
    ]
    sys.exit(1 if ours else 0)


if __name__ == "__main__":
    main()
