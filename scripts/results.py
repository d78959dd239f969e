#!/usr/bin/env python
"""Writes docs/results.md from finished runs: workdirs in, a table of their figures out.

    scripts/results.py runs/quickstart runs/seed1 runs/seed2

The first run's plot is copied beside it. No figure on that page is written by hand.
"""

import json
import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
COLUMNS = (
    ("seed", "seed"),
    ("sampled before", "heldout_pass_before"),
    ("sampled after", "heldout_pass_after"),
    ("greedy before", "heldout_pass_before_greedy"),
    ("greedy after", "heldout_pass_after_greedy"),
    ("tasks", "heldout_tasks"),
    ("programs executed", "programs_executed"),
    ("largest logprob gap", "max_logprob_gap"),
    ("seconds", "seconds_total"),
)


def figures(workdir: Path) -> dict:
    summary = json.loads((workdir / "summary.json").read_text())
    seed = re.search(
        r"^train\.train\.seed = (\d+)", (workdir / "config.gin").read_text(), re.M
    )
    return summary | {
        "seed": int(seed[1]) if seed else 0,
        "seconds_total": summary["seconds"]["total"],
    }


def shown(value) -> str:
    if isinstance(value, float):
        return (
            f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.3f}".rstrip("0").rstrip(".")
        )
    return str(value)


def main() -> int:
    workdirs = [Path(argument) for argument in sys.argv[1:]]
    if not workdirs:
        print(__doc__, file=sys.stderr)
        return 2
    rows = [figures(workdir) for workdir in workdirs]
    lines = [
        "# Results",
        "",
        "Written by `scripts/results.py` from the workdirs of finished runs.",
        "",
        "## The main job",
        "",
        "`configs/runs/quickstart.gin`: pass@1 on held-out tasks before and after RL.",
        "",
        "| " + " | ".join(title for title, _ in COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *(
            "| " + " | ".join(shown(row[name]) for _, name in COLUMNS) + " |"
            for row in rows
        ),
        "",
        "![Reward, pass rate, entropy, logprob gap and seconds](reward.png)",
        "",
    ]
    DOCS.mkdir(exist_ok=True)
    shutil.copy(workdirs[0] / "reward.png", DOCS / "reward.png")
    (DOCS / "results.md").write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
