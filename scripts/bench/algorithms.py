#!/usr/bin/env python
"""Every algorithm on the main job's task, from one warm start: a table and a plot of all.

    scripts/bench/algorithms.py --workdir runs/algorithms --markdown docs/results.md \\
        --plot docs/algorithms.png

Each run is scripts/train.py with configs/runs/quickstart.gin and a file of
configs/algorithms, in a workdir of its own that begins with a copy of the warm start's
checkpoints. What is finished is not run again. Distillation has GRPO's run as its teacher.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from peers.sandbox_report import table, write_section

ROOT = Path(__file__).resolve().parent.parent.parent
ALGORITHMS = sorted(path.stem for path in (ROOT / "configs/algorithms").glob("*.gin"))
WARM = "warm_start"
PHASES = ("sample", "reward", "learn")


def train(workdir: Path, algorithm: str, seed: int, bindings: list[str]) -> float:
    """Runs or goes on with a run; its seconds."""
    command = [sys.executable, ROOT / "scripts/train.py", "--workdir", workdir]
    for file in ("runs/quickstart", f"algorithms/{algorithm}"):
        command += ["--gin_file", f"configs/{file}.gin"]
    for binding in bindings:
        command += ["--gin_bindings", binding]
    start = time.perf_counter()
    done = subprocess.run([*command, "--seed", str(seed)], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{algorithm}, seed {seed}: exit code {done.returncode}.")
    return time.perf_counter() - start


def begin(workdir: Path, warm: Path) -> None:
    """A workdir that goes on from another run's warm start: its last checkpoint of that
    stage, and what is beside it."""
    if workdir.exists():
        return
    of_its_own = shutil.ignore_patterns(
        "config.gin", "operative_config.gin", "summary.json"
    )
    shutil.copytree(warm, workdir, ignore=of_its_own)
    for checkpoint in (workdir / "checkpoints").iterdir():
        progress = checkpoint / "progress" / "metadata"
        if json.loads(progress.read_text())["stage"] != "supervised":
            shutil.rmtree(checkpoint)


def rewards(workdir: Path) -> list[float]:
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [r["reward"] for r in records if "reward" in r]


def plot(path: Path, curves: dict[str, list[list[float]]]) -> None:
    """Mean reward over the seeds, smoothed over five steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axis = figure.subplots()
    for number, (name, runs) in enumerate(curves.items()):
        mean = np.mean([run[: min(map(len, runs))] for run in runs], axis=0)
        smooth = np.convolve(mean, np.ones(5) / 5, mode="valid")
        style = ("-", "--", ":")[number // 10 % 3]
        axis.plot(np.arange(len(smooth)) + 5, smooth, style, label=name)
    axis.set(xlabel="update", ylabel="reward, mean of five updates", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=Path, default=ROOT / "runs/algorithms")
    parser.add_argument("--algorithms", nargs="*", default=ALGORITHMS, choices=ALGORITHMS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the table into this page")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rows, curves = [], {}
    # The teacher comes first.
    names = sorted(options.algorithms, key=lambda name: name == "distillation")
    for name in names:
        for seed in options.seeds:
            folder = options.workdir.resolve() / str(seed)
            warm, workdir = folder / WARM, folder / name
            if not (warm / "summary.json").exists():
                train(warm, "grpo", seed, ["STEPS = 1", "run.CheckpointConfig.keep = 99"])
            begin(workdir, warm)
            bindings = [f"STEPS = {options.steps}"]
            if name == "distillation":
                bindings.append(f"TEACHER = '{folder / 'grpo'}'")
            seconds = train(workdir, name, seed, bindings)
            summary = json.loads((workdir / "summary.json").read_text())
            curves.setdefault(name, []).append(rewards(workdir))
            rows.append(
                [
                    name,
                    str(seed),
                    *(
                        f"{summary[f'heldout_pass_{when}{how}']:.3f}"
                        for how in ("", "_greedy")
                        for when in ("before", "after")
                    ),
                    *(f"{summary['seconds'].get(k, 0.0):.0f}" for k in PHASES),
                ]
            )
            print(f"{name}, seed {seed}: {seconds:.0f} s", flush=True)
    header = ["", "seed", "sampled before", "after", "greedy before", "after"]
    text = table([*header, *(f"{phase}, s" for phase in PHASES)], rows)
    print(text)
    if options.plot:
        plot(options.plot, curves)
    if options.markdown:
        write_section(options.markdown, "algorithms.py", text)


if __name__ == "__main__":
    main()
