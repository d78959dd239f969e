"""One GRPO step of jaxpt, google-tunix and TRL, timed in turn on this machine.

    python scripts/bench/grpo_step.py --json figures.json --markdown docs/performance.md

The systems run one after the other, round after round (A B C A B C ...), each time in a
fresh process, so that what else the machine does meets all of them; the figures are the
medians over rounds. The peers' environments are made once, under .cache/bench. Nothing
compiled is kept between processes. The work is described in workload.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent.parent
ENVIRONMENTS = ROOT / ".cache" / "bench"

# The script of each system, and what its environment holds; ours is this one.
OURS = "jaxpt"
SYSTEMS = {
    OURS: ("grpo_jaxpt.py", None),
    "tunix": ("peers/grpo_tunix.py", ("google-tunix==0.1.7", "jax==0.10.2")),
    "trl": (
        "peers/grpo_trl.py",
        ("torch==2.13.0", "trl==1.16.0", "transformers", "datasets"),
    ),
}
MEDIANS = (
    "step_s",
    "cpu_step_s",
    "first_step_s",
    "first_two_steps_s",
    "process_s",
    "completion_tokens_per_s",
)
MARK = "<!-- written by scripts/bench/grpo_step.py: {} -->"


def interpreter(system: str) -> Path:
    """The system's Python; its environment is made if it is not there."""
    requirements = SYSTEMS[system][1]
    if requirements is None:
        return Path(sys.executable)
    python = ENVIRONMENTS / system / "bin" / "python"
    stamp = ENVIRONMENTS / system / "installed"
    wanted = "\n".join(requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"Installing {', '.join(requirements)} (once) ...", file=sys.stderr)
        uv = Path(sys.executable).with_name("uv")
        subprocess.run(
            [
                uv,
                "venv",
                "--quiet",
                "--clear",
                "--python",
                sys.executable,
                python.parents[1],
            ],
            check=True,
        )
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--python", python, *requirements], check=True
        )
        stamp.write_text(wanted)
    return python


def timed(system: str, python: Path, steps: int) -> dict:
    """The figures of one process; process_s: from its start to the second rewards."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "JAX_COMPILATION_CACHE_DIR"
    } | {"PYTHONPATH": str(BENCH)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        start = time.time()
        done = subprocess.run(
            [python, BENCH / SYSTEMS[system][0], "--steps", str(steps), "--json", path],
            check=False,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{system} failed:\n{done.stderr[-4000:]}")
        figures = json.loads(path.read_text())
    figures["process_s"] = figures.pop("second_rewards_at") - start
    return figures


def compare(runs: dict[str, list[dict]]) -> dict:
    """Medians over rounds, and our step over each peer's; runs: by system, by round."""
    systems = {
        name: {"system": rounds[0]["system"]}
        | {key: statistics.median(figures[key] for figures in rounds) for key in MEDIANS}
        for name, rounds in runs.items()
    }
    ours = systems[OURS]["step_s"]
    ratios = {name: ours / systems[name]["step_s"] for name in systems if name != OURS}
    return {
        "systems": systems,
        "ratios": ratios,
        "step_ratio": max(ratios.values()),
        "rounds": runs,
    }


def table(comparison: dict) -> str:
    """The comparison as a Markdown table."""
    lines = [
        "| system | step, s | jaxpt's step / its | CPU s a step | tokens/s "
        "| first step, s | first two steps, s | from process start, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in comparison["systems"].items():
        ratio = comparison["ratios"].get(name)
        lines.append(
            f"| {row['system']} | {row['step_s']:.3f} | {f'{ratio:.2f}' if ratio else ''} "
            f"| {row['cpu_step_s']:.3f} | {row['completion_tokens_per_s']:.0f} "
            f"| {row['first_step_s']:.1f} | {row['first_two_steps_s']:.1f} "
            f"| {row['process_s']:.1f} |"
        )
    ours = comparison["rounds"][OURS]
    rounds = len(ours)
    steps = [f"{figures['step_s']:.3f}" for figures in ours]
    parts = [
        f"{part} {statistics.median(figures['parts_s'][part] for figures in ours):.3f} s"
        for part in ours[0]["parts_s"]
    ]
    lines += [
        "",
        f"step_ratio (jaxpt's step / the faster peer's): {comparison['step_ratio']:.2f}; "
        f"medians of {rounds} rounds, jaxpt's: {', '.join(steps)} s.",
        "",
        f"Of jaxpt's step: {', '.join(parts)}.",
    ]
    return "\n".join(lines)


def write_between_marks(page: Path, text: str) -> None:
    """Replaces what stands between the two marks of the page."""
    begin, end = MARK.format("begin"), MARK.format("end")
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a process")
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=list(SYSTEMS),
        default=list(SYSTEMS),
        help=f"which to run ({OURS} and at least one peer)",
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--markdown", type=Path, help="write the table into this page")
    parser.add_argument(
        "--from-json", type=Path, help="take the figures of an earlier run, and run nothing"
    )
    options = parser.parse_args()
    if options.from_json:
        comparison = json.loads(options.from_json.read_text())
    else:
        if OURS not in options.systems or len(options.systems) < 2:
            parser.error(f"--systems needs {OURS} and at least one peer to compare.")
        pythons = {system: interpreter(system) for system in options.systems}
        runs: dict[str, list[dict]] = {system: [] for system in options.systems}
        for number in range(options.rounds):
            for system, python in pythons.items():
                figures = timed(system, python, options.steps)
                runs[system].append(figures)
                print(
                    f"round {number + 1}: {figures['system']} {figures['step_s']:.3f} s",
                    file=sys.stderr,
                )
        comparison = compare(runs)
    text = table(comparison)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(comparison, indent=1) + "\n")
    if options.markdown:
        write_between_marks(options.markdown, text)


if __name__ == "__main__":
    main()
