"""Metrics and trajectories on disk: JSON lines, TensorBoard events, and a plot.

The JSON lines are the record: what a checkpoint remembers of them is their length, and a
resumed run cuts them back to it, so that no step is in them twice.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpt.types import Trajectory

METRICS_FILE, TRAJECTORIES_FILE = "metrics.jsonl", "trajectories.jsonl"


class RunLog:
    """Writes a run's metrics and trajectories; a context manager."""

    def __init__(self, workdir: Path):
        self._paths = {name: workdir / name for name in (METRICS_FILE, TRAJECTORIES_FILE)}
        self._files = {name: path.open("ab") for name, path in self._paths.items()}
        self._events = _EventFile(workdir / "tensorboard")

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exc_info) -> None:
        for file in self._files.values():
            file.close()
        self._events.close()

    def scalars(self, step: int, stage: str, values: Mapping[str, Any]) -> None:
        """One record of a step; step counts updates from the start of the run."""
        self._append(METRICS_FILE, {"step": step, "stage": stage, **values})
        self._events.scalars(step, {f"{stage}/{k}": v for k, v in values.items()})

    def trajectories(
        self,
        step: int,
        stage: str,
        groups: Sequence[Sequence[Trajectory]],
        decode: Any,
    ) -> None:
        """One record per episode, with its text, outcome, reward components and why."""
        for group in groups:
            for trajectory in group:
                outcome, reward = trajectory.outcome, trajectory.outcome.reward
                self._append(
                    TRAJECTORIES_FILE,
                    {
                        "step": step,
                        "stage": stage,
                        "prompt_id": trajectory.prompt.prompt_id,
                        "domain": trajectory.prompt.domain,
                        "prompt": decode(trajectory.prompt.tokens),
                        "completion": decode(trajectory.tokens),
                        "tokens": len(trajectory.tokens),
                        "finished": trajectory.finished,
                        "outcome": outcome.kind,
                        "reason": outcome.reason,
                        "why": outcome.why,
                        "reward": reward.total if reward else None,
                        "components": dict(reward.components) if reward else None,
                        "attempts": outcome.attempts,
                        "seconds": {k: round(v, 4) for k, v in outcome.seconds.items()},
                        "usage": {k: round(v, 4) for k, v in outcome.usage.items()},
                    },
                )

    def _append(self, name: str, record: dict[str, Any]) -> None:
        self._files[name].write(json.dumps(record).encode() + b"\n")

    def positions(self) -> dict[str, int]:
        """Bytes written so far, for the checkpoint; everything is on disk on return."""
        for file in self._files.values():
            file.flush()
        return {name: path.stat().st_size for name, path in self._paths.items()}

    def rewind(self, positions: Mapping[str, int], next_step: int) -> None:
        """Cuts the logs back to these lengths: `next_step` and what follows come again."""
        for name, path in self._paths.items():
            length = positions[name]
            if path.stat().st_size < length:
                raise ValueError(
                    f"{path} has {path.stat().st_size} bytes, fewer than the {length} "
                    "that the checkpoint remembers: it was changed. Restore it, or "
                    "start in a new --workdir."
                )
            self._files[name].truncate(length)
        self._events.restart(next_step)


class _EventFile:
    """A TensorBoard event file, written without TensorFlow."""

    def __init__(self, folder: Path):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(folder))

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        summary = self._summary.Summary(
            value=[
                self._summary.Summary.Value(tag=tag, simple_value=float(value))
                for tag, value in values.items()
                if isinstance(value, int | float)
            ]
        )
        self._writer.add_event(
            self._event.Event(wall_time=time.time(), step=step, summary=summary)
        )

    def restart(self, step: int) -> None:
        """Tells TensorBoard to forget what it has from `step` on."""
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._writer.add_event(
            self._event.Event(wall_time=time.time(), step=step, session_log=start)
        )

    def close(self) -> None:
        self._writer.close()


def read(workdir: Path, stage: str) -> list[dict[str, Any]]:
    """The records of a stage, in order."""
    with (workdir / METRICS_FILE).open() as file:
        records = [json.loads(line) for line in file]
    return [record for record in records if record["stage"] == stage]
