"""Jobs for hostile programs, and what to look for after them."""

import contextlib
import os
import textwrap
from pathlib import Path

import pytest

from sandbox import cgroups
from sandbox.protocol import Execution, Grading, Job, Limits

PATIENCE = 120  # seconds; only a hang takes so long
SECRET = "correct-horse-battery"
GRADER = """
def grade(artifacts, payload):
    return {
        "components": {"right": float(artifacts["out"] == payload.encode())},
        "why": artifacts["out"].decode(errors="replace"),
    }
"""
HONEST = "open('out', 'w').write('5')"

needs_groups = pytest.mark.skipif(
    not any(
        "memory" in found.controllers and os.access(found.folder, os.W_OK)
        for found in cgroups.hierarchies()
    ),
    reason="memory cannot be bounded by control groups here",
)


def job(job_id, code, **limits):
    source = code if isinstance(code, bytes) else textwrap.dedent(code).encode()
    return Job(
        job_id=job_id,
        domain="attacks",
        execution=Execution(
            command=("python", "-I", "-S", "main.py"),
            files={"main.py": source},
            artifacts=("out",),
            limits=Limits(**({"wall_seconds": 30} | limits)),
        ),
        grading=Grading(program=GRADER, payload="5", limits=Limits(wall_seconds=30)),
    )


def alive(marker: str) -> list[str]:
    """Processes of the machine with the marker among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def told(result) -> str:
    """What the program wrote down for us; it must have come to its end."""
    assert result.outcome == "ok", result
    return result.verdict["why"]
