"""Snapshots outside of any worker: a folder that outlives it, with a file for each."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Protocol


class SnapshotStore(Protocol):
    """Where durable snapshots go: workspaces as tar archives, with a JSON state each."""

    async def put(self, snapshot_id: str, archive: bytes, state: Any) -> None: ...

    async def get(self, snapshot_id: str) -> tuple[bytes, Any]:
        """Raises KeyError."""
        ...

    async def delete(self, snapshot_id: str) -> None: ...


class FolderStore:
    """In a folder of this machine, or one that several share."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)

    def _path(self, snapshot_id: str) -> Path:
        return self._folder / hashlib.sha256(snapshot_id.encode()).hexdigest()

    async def put(self, snapshot_id: str, archive: bytes, state: Any) -> None:
        path = self._path(snapshot_id)
        head = json.dumps({"id": snapshot_id, "state": state}).encode()
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        with open(temporary, "wb") as file:
            file.write(head + b"\n")
            file.write(archive)
        temporary.replace(path)

    async def get(self, snapshot_id: str) -> tuple[bytes, Any]:
        try:
            with open(self._path(snapshot_id), "rb") as file:
                head = json.loads(file.readline())
                return file.read(), head["state"]
        except FileNotFoundError as error:
            raise KeyError(snapshot_id) from error

    async def delete(self, snapshot_id: str) -> None:
        self._path(snapshot_id).unlink(missing_ok=True)
