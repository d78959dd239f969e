#!/usr/bin/env python
"""Runs an experiment, or goes on with it: a gin file and a workdir in, a trained model out.

    scripts/train.py --gin_file configs/runs/quickstart.gin \\
        --gin_file configs/algorithms/grpo.gin --workdir runs/quickstart

The same command again resumes. Exit code 2 means that the input can't be run as it is: one
line says why and what to do.
"""

import argparse
import errno
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gin_file", action="append", required=True, help="repeatable, in order"
    )
    parser.add_argument(
        "--gin_bindings",
        action="append",
        default=[],
        help="e.g. mesh.MeshConfig.data=2",
    )
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--seed", type=int, help="short for train.train.seed=SEED")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from absl import logging

    from jaxpt import configure
    from jaxpt import train as train_lib
    from jaxpt.data.mixture import NothingToDraw
    from jaxpt.report import print_report
    from sandbox.backends.backend import SandboxUnavailable

    logging.set_verbosity(logging.FATAL)  # libraries' errors come back as exceptions
    try:
        bindings = list(args.gin_bindings)
        if args.seed is not None:
            bindings.append(f"train.train.seed = {args.seed}")
        train = configure.parse(train_lib.train, args.gin_file, bindings)
        configure.check_workdir(args.workdir)
        args.workdir.mkdir(parents=True, exist_ok=True)
        summary = train(
            workdir=args.workdir,
            on_start=lambda: configure.save(args.workdir),
            on_first_step=lambda: configure.save_operative(args.workdir),
        )
        print_report(args.workdir, summary)
    except (ValueError, OSError, SandboxUnavailable, NothingToDraw) as error:
        if os.environ.get("JAXPT_TRACEBACK"):
            raise
        # Gin adds where it was called from; the first line is what a user can act on.
        line = str(error).partition("\n  In call to configurable")[0]
        if os.strerror(errno.ENOSPC) in line and "Free" not in line:
            line += ". Free some space there and start the same command again."
        print(f"error: {' '.join(line.split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
