"""What jaxpt's step on the workload of workload.py is made of, by XLA's own clock.

    python scripts/bench/profile_step.py --steps 8

The process keeps to one core, so that the times of operations add up to the step's. They
are grouped by program, by part of the model (forward or backward), and by whether they
multiply matrices.
"""

import argparse
import collections
import glob
import gzip
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
PROGRAMS = {"jit_generate": "sample", "jit_update": "update"}
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
SCOPE, CALLED = re.compile(r'op_name="([^"]*)"'), re.compile(r"calls=%?([\w.\-]+)")


def instructions(dump: Path, program: str) -> dict[str, tuple[str, bool]]:
    """Of each instruction: where in the model it comes from, and if it multiplies matrices.

    A fusion multiplies when what it calls does, whatever it ends with.
    """
    (path,) = dump.glob(f"*.{program}.*after_optimizations.txt")
    multiplying, found = set(), {}
    computation = ""
    for line in path.read_text().splitlines():
        if line.endswith("{"):
            computation = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
        elif match := INSTRUCTION.match(line):
            scope, called = SCOPE.search(line), CALLED.search(line)
            product = " dot(" in line or bool(called and called[1] in multiplying)
            if product:
                multiplying.add(computation)
            found[match[1]] = (scope[1] if scope else "", product)
    return found


def part(scope: str) -> str:
    direction = "backward" if "transpose(jvp" in scope else "forward"
    for name in ("attention", "feed_forward"):
        if name in scope:
            return f"{name}, {direction}"
    return "the rest"


def events(trace: Path) -> Iterator[tuple[str, str, float]]:
    """(program, instruction, milliseconds) of everything that ran."""
    (path,) = glob.glob(f"{trace}/**/*.trace.json.gz", recursive=True)
    with gzip.open(path) as file:
        recorded = json.load(file)["traceEvents"]
    for event in recorded:
        arguments = event.get("args", {})
        if event.get("ph") == "X" and "hlo_op" in arguments:
            yield arguments["hlo_module"], arguments["hlo_op"], event["dur"] / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="steps to profile (8)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        dump, trace = Path(folder, "dump"), Path(folder, "trace")
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} "
            "--xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_(update|generate)"
        )
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # or nothing would be dumped
        import grpo_jaxpt
        import jax
        import workload

        step, clock = grpo_jaxpt.make_step(), workload.Clock()
        for i in range(workload.COLD_STEPS):
            step(i, clock)
        with jax.profiler.trace(str(trace)):
            for i in range(options.steps):
                step(workload.COLD_STEPS + i, clock)

        known = {program: instructions(dump, program) for program in PROGRAMS}
        totals: collections.Counter = collections.Counter()
        for program, instruction, milliseconds in events(trace):
            if program not in PROGRAMS or instruction.startswith("while"):
                continue  # a loop's time is that of what it holds
            scope, product = known[program].get(instruction, ("", False))
            kind = "products" if product else "other"
            totals[PROGRAMS[program], part(scope), kind] += milliseconds / options.steps

    for name in PROGRAMS.values():
        total = sum(value for (program, *_), value in totals.items() if program == name)
        print(f"{name}: {total:.0f} ms a step on one core")
        for (program, where, kind), value in totals.most_common():
            if program == name:
                print(f"  {value:7.1f} ms {value / total:5.0%}  {where}, {kind}")
    if options.json:
        figures = {"; ".join(key): value for key, value in totals.most_common()}
        options.json.write_text(json.dumps({"ours_ms": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
