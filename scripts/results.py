#!/usr/bin/env python
"""Writes docs/results.md from finished runs: workdirs in, tables and plots of them out.

    scripts/results.py --quickstart runs/quickstart runs/seed1 runs/seed2 \\
        --smollm2 runs/smollm2

No figure on that page is written by hand.
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
RUN_COLUMNS = {
    "seed": "seed",
    "sampled before": "heldout_pass_before",
    "sampled after": "heldout_pass_after",
    "greedy before": "heldout_pass_before_greedy",
    "greedy after": "heldout_pass_after_greedy",
    "tasks": "heldout_tasks",
    "programs executed": "programs_executed",
    "lost": "lost",
    "largest logprob gap": "max_logprob_gap",
    "steps over 1e-5": "steps_over",
    "seconds": "seconds_total",
}
STEP_COLUMNS = {
    "step": "step",
    "reward": "reward",
    "pass rate": "pass_rate",
    "entropy": "entropy",
    "logprob gap": "logprob_gap",
    "gradient norm": "gradient_norm",
    "seconds": "seconds",
}


def figures(workdir: Path) -> dict:
    """A run's summary, and what the tables show beside it."""
    summary = json.loads((workdir / "summary.json").read_text())
    config = (workdir / "config.gin").read_text()
    seed = re.search(r"^train\.train\.seed = (\d+)", config, re.M)
    outcomes = summary["outcomes"]
    gaps = [record.get("logprob_gap", 0.0) for record in reinforcement(workdir)]
    return summary | {
        "seed": int(seed[1]) if seed else 0,
        "seconds_total": summary["seconds"]["total"],
        "steps_over": f"{sum(gap > 1e-5 for gap in gaps)} of {len(gaps)}",
        "lost": outcomes.get("infra_fail", 0) + outcomes.get("grader_fail", 0),
    }


def reinforcement(workdir: Path) -> list[dict]:
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["stage"] == "reinforcement"]


def steps(workdir: Path, shown: int = 12) -> list[dict]:
    """About `shown` steps of a run's reinforcement, evenly spaced, first and last too."""
    records = reinforcement(workdir)
    chosen = sorted({i * (len(records) - 1) // (shown - 1) for i in range(shown)})
    return [
        records[i]
        | {"seconds": sum(v for k, v in records[i].items() if k.startswith("seconds_"))}
        for i in chosen
    ]


def table(columns: dict[str, str], rows: list[dict]) -> list[str]:
    return [
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *(
            "| " + " | ".join(cell(row.get(c, "")) for c in columns.values()) + " |"
            for row in rows
        ),
        "",
    ]


def cell(value) -> str:
    if isinstance(value, float):
        return (
            f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.3f}".rstrip("0").rstrip(".")
        )
    return str(value)


def picture(workdir: Path, name: str) -> list[str]:
    shutil.copy(workdir / "reward.png", DOCS / name)
    return [f"![Reward, pass rate, entropy, logprob gap and seconds]({name})", ""]


def quickstart(workdirs: list[Path]) -> list[str]:
    return [
        "## The main job",
        "",
        "`configs/runs/quickstart.gin`: pass@1 on held-out tasks before and after RL. The",
        "seconds are the run's own; installation comes before them.",
        "",
        *table(RUN_COLUMNS, [figures(workdir) for workdir in workdirs]),
        *picture(workdirs[0], "reward.png"),
    ]


def smollm2(workdir: Path) -> list[str]:
    run = figures(workdir)
    sampled, greedy = run["heldout_by_domain"], run["heldout_by_domain_greedy"]
    by_domain = [
        {
            "domain": name,
            "sampled before": sampled["before"][name],
            "sampled after": sampled["after"][name],
            "greedy before": greedy["before"][name],
            "greedy after": greedy["after"][name],
        }
        for name in sampled["before"]
    ]
    return [
        "## A real base",
        "",
        "`configs/runs/smollm2_arithmetic.gin`: SmolLM2-135M-Instruct before and after RL.",
        "",
        *table({k: v for k, v in RUN_COLUMNS.items() if k != "programs executed"}, [run]),
        "By domain:",
        "",
        *table({name: name for name in by_domain[0]}, by_domain),
        "From the log of its steps:",
        "",
        *table(STEP_COLUMNS, steps(workdir)),
        *picture(workdir, "smollm2.png"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quickstart", type=Path, nargs="+", required=True)
    parser.add_argument("--smollm2", type=Path)
    args = parser.parse_args()
    try:
        lines = quickstart(args.quickstart)
        if args.smollm2:
            lines += smollm2(args.smollm2)
    except FileNotFoundError as error:
        print(f"error: {error.filename} is missing: is that run done?", file=sys.stderr)
        return 2
    head = ["# Results", "", "Written by `scripts/results.py` from finished runs.", ""]
    (DOCS / "results.md").write_text("\n".join([*head, *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
