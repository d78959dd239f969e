"""Reads what a program left in its workspace, once nothing of the program is alive."""

import os
import stat


def read_artifact(workspace: str, name: str, max_bytes: int) -> bytes | str:
    """A regular file's content, or the reason why there is none; follows no links."""
    *folders, last = name.split("/")
    nofollow = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    folder = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folders:
            inner = os.open(part, os.O_DIRECTORY | nofollow, dir_fd=folder)
            os.close(folder)
            folder = inner
        kind = os.stat(last, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(kind.st_mode):
            return "artifact_not_regular"
        if kind.st_size > max_bytes:
            return "artifact_too_large"
        file = os.open(last, os.O_RDONLY | nofollow, dir_fd=folder)
    except FileNotFoundError:
        return "missing_artifact"
    except OSError:
        return "artifact_not_regular"
    finally:
        os.close(folder)
    with os.fdopen(file, "rb") as opened:
        return opened.read(max_bytes)
