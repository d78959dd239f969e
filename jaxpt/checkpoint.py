"""One atomic checkpoint of everything that a run needs to go on, by Orbax.

A checkpoint holds arrays (parameters, optimizer, the random key) and a JSON record
(`progress`: stage, step, data position, positions in the logs, figures so far). Orbax
writes it to a temporary name and renames it when it is whole.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints in a folder, numbered by updates made; keeps the newest `keep`."""

    def __init__(self, folder: Path, *, keep: int = 2):
        # Orbax takes seconds to import, so only those who write checkpoints wait for it.
        import orbax.checkpoint as ocp

        if keep < 1:
            raise ValueError(f"keep={keep} must be 1 or more.")
        self._ocp = ocp
        self._folder = Path(folder).absolute()
        self._keep = keep
        self._manager = self._open()

    def _open(self):
        return self._ocp.CheckpointManager(
            self._folder,
            options=self._ocp.CheckpointManagerOptions(
                max_to_keep=self._keep, enable_async_checkpointing=False
            ),
            item_names=("state", "progress"),
        )

    def save(self, number: int, state: Any, progress: dict[str, Any]) -> None:
        """Returns when the checkpoint is whole on disk.

        Raises:
          OSError: the disk is full or can't be written; earlier checkpoints are intact.
        """
        if number in self._manager.all_steps():
            return
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        free = shutil.disk_usage(self._folder).free

        def refusal(reason: str) -> OSError:
            return OSError(
                f"Checkpoint {number} ({size / 1e6:.0f} MB) could not be written to "
                f"{self._folder} ({free / 1e6:.0f} MB free): {reason}. Free some space and "
                "start the same command again: it resumes from the last whole one."
            )

        if free < size:
            raise refusal("there is too little room")
        try:
            self._manager.save(
                number,
                args=self._ocp.args.Composite(
                    state=self._ocp.args.StandardSave(state),
                    progress=self._ocp.args.JsonSave(progress),
                ),
            )
            self._manager.wait_until_finished()
        except Exception as error:
            for half_written in self._folder.glob(f"{number}.*"):
                shutil.rmtree(half_written, ignore_errors=True)
            *_, reason = str(error).rsplit(": ", 1)
            raise refusal(reason) from error

    def restore(
        self, abstract_state: Callable[[dict[str, Any]], Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """The newest whole checkpoint's (state, progress), or None if there is none.

        A checkpoint that can't be read is reported, removed and passed over for the one
        before it.

        Args:
          abstract_state: progress -> the state as ShapeDtypeStructs with shardings.
        """
        for number in sorted(self._manager.all_steps(), reverse=True):
            try:
                progress = self._manager.restore(
                    number,
                    args=self._ocp.args.Composite(progress=self._ocp.args.JsonRestore()),
                )["progress"]
                state = self._manager.restore(
                    number,
                    args=self._ocp.args.Composite(
                        state=self._ocp.args.StandardRestore(abstract_state(progress))
                    ),
                )["state"]
            except Exception as error:
                summary = str(error).splitlines()[0] if str(error) else repr(error)
                logger.warning(
                    "Checkpoint %d in %s is not whole (%s); it is removed and the one "
                    "before it is used.",
                    number,
                    self._folder,
                    summary[:200],
                )
                self._manager.close()
                shutil.rmtree(self._folder / str(number), ignore_errors=True)
                self._manager = self._open()
                continue
            return state, progress
        return None

    def close(self) -> None:
        self._manager.close()
