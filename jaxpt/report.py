"""A run for people: summary.json, a table, a plot, and what to do next."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpt import metrics

SUMMARY_FILE, PLOT_FILE, DOMAINS_FILE = "summary.json", "reward.png", "domains.png"
_BINS = 24  # of steps, in the picture of domains


def write_report(workdir: Path, progress: dict[str, Any]) -> dict[str, Any]:
    """Writes summary.json and reward.png from a finished run; returns the summary."""
    before, after = (progress["heldout"][when] for when in ("before", "after"))
    seconds = {name: round(value, 2) for name, value in progress["seconds"].items()}
    summary = {
        "heldout_pass_before": before["sampled"],
        "heldout_pass_before_greedy": before["greedy"],
        "heldout_pass_after": after["sampled"],
        "heldout_pass_after_greedy": after["greedy"],
        "heldout_tasks": after["sampled_tasks"],
        **{
            f"heldout_by_domain{suffix}": {
                when: progress["heldout"][when][f"{name}_by_domain"]
                for when in ("before", "after")
            }
            for name, suffix in (("sampled", ""), ("greedy", "_greedy"))
        },
        "programs_executed": progress["programs_executed"],
        "outcomes": progress["outcomes"],
        "max_logprob_gap": progress["max_logprob_gap"],
        "steps": progress["step"],
        "params_sha256": progress["params_sha256"],
        "seconds": {**seconds, "total": round(sum(seconds.values()), 2)},
    }
    (workdir / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    plot(workdir, workdir / PLOT_FILE)
    plot_domains(workdir, workdir / DOMAINS_FILE)
    return summary


def plot(workdir: Path, path: Path) -> None:
    """Reward, pass rate, entropy, logprob gap and seconds per phase over the steps."""
    # pyplot takes a second to import and picks a display; the figure alone needs neither.
    from matplotlib.figure import Figure

    records = metrics.read(workdir, "reinforcement")
    steps = [record["step"] for record in records]
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots(2, 2)
    panels = (
        (axes[0][0], "Reward and pass rate", ("reward", "pass_rate"), "linear"),
        (axes[0][1], "Entropy (nats per token)", ("entropy",), "linear"),
        (axes[1][0], "Sampler/trainer logprob gap", ("logprob_gap",), "log"),
    )
    for ax, title, names, scale in panels:
        for name, style in zip(names, ("-", "--")):
            # A step that had nothing to learn from did not measure everything.
            values = [record.get(name, math.nan) for record in records]
            ax.plot(steps, values, style, label=name)
        ax.set(title=title, xlabel="update", yscale=scale)
        ax.grid(alpha=0.3)
        if len(names) > 1:
            ax.legend()
    axes[0][0].set_ylim(0, 1)
    phases = sorted(
        {name for record in records for name in record if name.startswith("seconds_")}
    )
    axes[1][1].stackplot(
        steps,
        [[record.get(name, 0.0) for record in records] for name in phases],
        labels=[name.removeprefix("seconds_") for name in phases],
    )
    axes[1][1].set(title="Seconds per step", xlabel="update")
    axes[1][1].legend(loc="upper right")
    figure.savefig(path, dpi=110)


def plot_domains(workdir: Path, path: Path) -> None:
    """Reward and level of each domain over the steps; nothing for a run with one domain.

    White: not drawn; in the picture of levels, crosses: in quarantine.
    """
    from matplotlib.figure import Figure

    records = metrics.read(workdir, "reinforcement")
    named = {key.split("/")[1] for r in records for key in r if key.startswith("domain/")}
    if not named:
        return
    rewards = {name: _binned(records, f"domain/{name}/reward") for name in named}
    last = {name: np.nanmean([*row[-_BINS // 3 :], -1.0]) for name, row in rewards.items()}
    names = sorted(named, key=lambda name: (last[name], name))
    figure = Figure(figsize=(13, 2 + 0.19 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, title, rows, most in (
        (left, "Reward", [rewards[name] for name in names], 1.0),
        (
            right,
            "Level",
            [_binned(records, f"domain/{name}/level") for name in names],
            None,
        ),
    ):
        extent = (0, len(records), -0.5, len(names) - 0.5)
        image = axis.imshow(
            rows, aspect="auto", origin="lower", extent=extent, vmin=0, vmax=most
        )
        axis.set(title=title, xlabel="update")
        figure.colorbar(image, ax=axis)
    left.set_yticks(range(len(names)), names, fontsize=7)
    crosses = [
        (step, place)
        for step, record in enumerate(records)
        for place, name in enumerate(names)
        if record.get(f"domain/{name}/quarantined")
    ]
    right.scatter(*zip(*crosses) if crosses else ((), ()), marker="x", s=9, c="red")
    figure.savefig(path, dpi=110)


def _binned(records: list[dict[str, Any]], key: str) -> list[float]:
    """Means of a figure over bins of steps; NaN where it was not measured."""
    found = []
    for part in np.array_split(np.arange(len(records)), min(_BINS, len(records))):
        values = [records[i][key] for i in part if key in records[i]]
        found.append(float(np.mean(values)) if values else math.nan)
    return found


def print_report(workdir: Path, summary: dict[str, Any]) -> None:
    """The closing table, and what can be done with the run."""
    console = Console(file=sys.stdout)
    table = Table(title="Held-out tasks, pass@1")
    for column in ("", "before RL", "after RL"):
        table.add_column(column, justify="right" if column else "left")
    for name, suffix in (("sampled", ""), ("greedy", "_greedy")):
        table.add_row(
            name,
            *(
                f"{summary[f'heldout_pass_{when}{suffix}']:.3f}"
                for when in ("before", "after")
            ),
        )
    console.print(table)
    executed = summary["programs_executed"]
    programs = f"{executed} programs executed; " if executed else ""
    outcomes = ", ".join(f"{k} {v}" for k, v in sorted(summary["outcomes"].items()))
    console.print(
        f"{summary['steps']} steps in {summary['seconds']['total']:.0f} s; "
        f"{programs}episodes: {outcomes}; "
        f"largest sampler/trainer logprob gap {summary['max_logprob_gap']:.1e}.",
        highlight=False,
    )
    for line in (
        f"Plot:           {workdir / PLOT_FILE}",
        f"TensorBoard:    tensorboard --logdir {workdir / 'tensorboard'}",
        f"Every episode:  {workdir / metrics.TRAJECTORIES_FILE}",
        f"Sample from it: scripts/sample.py --workdir {workdir}",
        "On a real base: scripts/train.py --gin_file configs/runs/smollm2_arithmetic.gin "
        "--gin_file configs/algorithms/grpo.gin "
        "--workdir runs/smollm2",
    ):
        console.print(line, highlight=False, soft_wrap=True)
