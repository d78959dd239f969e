"""A run for people: summary.json, a table, a plot, and what to do next."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxpt import metrics

SUMMARY_FILE, PLOT_FILE = "summary.json", "reward.png"


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
