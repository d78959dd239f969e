"""The workspace of a sandbox: files in memory, of bounded size, that snapshots can share.

A fresh workspace is one file system in memory. One that starts from a snapshot is an
overlay: the snapshot's layers below, which nobody writes, and a file system of its own on
top, as large as the quota leaves. So any number of sandboxes start from one state at no
cost.

All are mounted where only the worker and what it hands them to can see them.
"""

import contextlib
import dataclasses
import io
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence

from sandbox import linux

MAX_LAYERS = 32  # above this they are copied into one; mount options fit in a page
_STATE = "JAXPT.state."  # before the names of texts that go with an archive
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK


class Layer:
    """A file system that is never written again; gone with the last who refers to it."""

    def __init__(self, mount: str, folder: str):
        self._mount = mount
        self.folder = folder
        status = os.statvfs(mount)
        self.used_bytes = (status.f_blocks - status.f_bfree) * status.f_frsize

    def __del__(self):
        with contextlib.suppress(OSError):
            linux.unmount(self._mount)
            os.rmdir(self._mount)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Layers, the lowest first, and what the next shell takes over from the last one."""

    layers: tuple[Layer, ...] = ()
    folder: str = "/workspace"
    exported: str = ""


class Workspace:
    """Files below `folder`, a mount; at most `size` bytes, layers included.

    uid: their owner. Raises OSError, with ENOSPC if the layers leave no room.
    """

    def __init__(self, path: str, *, size: int, uid: int, layers: Sequence[Layer] = ()):
        self.layers = tuple(layers)
        self.uid = uid
        self._mount = path
        os.mkdir(path)
        self._mounted: list[str] = []
        try:
            room = size - sum(layer.used_bytes for layer in layers)
            linux.mount_tmpfs(path, size=max(room, 4096), uid=uid)
            self._mounted.append(path)
            self.folder = path
            self._upper = path
            if layers:
                self._mount_overlay()
        except BaseException:
            self.close()
            raise

    def _mount_overlay(self) -> None:
        upper, work = f"{self._mount}/files", f"{self._mount}/work"
        for folder in (upper, work):
            os.mkdir(folder)
            os.chown(folder, self.uid, self.uid)
        lower = ":".join(layer.folder for layer in reversed(self.layers))
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        if not _is_initial_root():
            options += ",userxattr"
        view = f"{self._mount}-view"
        os.mkdir(view)
        linux.mount("overlay", view, options=options)
        self._mounted.append(view)
        self.folder, self._upper = view, upper

    def tree(self, *, read_only: bool = False) -> int:
        """A descriptor of the mount, for a sandbox to attach; the caller's to close."""
        tree = linux.detached_copy(self.folder)
        if read_only:
            linux.set_read_only(tree)
        return tree

    def used_bytes(self) -> int:
        """What its own file system holds, beyond that of its layers."""
        status = os.statvfs(self._mount)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def write(self, files: Mapping[str, bytes]) -> None:
        """Writes files, as if the sandbox's user had; folders are made as needed."""
        root = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for path, content in files.items():
                self._make_folders(root, path)
                file = linux.open_beneath(root, path, _NEW_FILE)
                with os.fdopen(file, "wb", 0) as opened:
                    if not stat.S_ISREG(os.fstat(file).st_mode):
                        raise FileExistsError(f"{path} is no regular file.")
                    os.fchown(file, self.uid, self.uid)
                    rest = memoryview(content)
                    while rest:
                        rest = rest[opened.write(rest) :]
        finally:
            os.close(root)

    def _make_folders(self, root: int, path: str) -> None:
        parts = path.split("/")[:-1]
        for depth in range(len(parts), 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.close(linux.open_beneath(root, "/".join(parts[:depth]), os.O_PATH))
                break
        else:
            depth = 0
        for made in range(depth + 1, len(parts) + 1):
            above = "/".join(parts[: made - 1]) or "."
            folder = linux.open_beneath(root, above, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.mkdir(parts[made - 1], dir_fd=folder)
                # A sandbox that runs may have put a link in its place.
                os.chown(
                    parts[made - 1],
                    self.uid,
                    self.uid,
                    dir_fd=folder,
                    follow_symlinks=False,
                )
            finally:
                os.close(folder)

    def read(self, paths: Sequence[str], max_bytes: int) -> dict[str, bytes | str]:
        """Of each path its bytes, or the reason why there are none; follows no links."""
        root = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return {path: _read(root, path, max_bytes) for path in paths}
        finally:
            os.close(root)

    def freeze(self) -> tuple[Layer, ...]:
        """Its layers with its own files on top; it is closed, and nobody may use it."""
        if self.folder != self._mount:
            linux.unmount(self.folder)
            os.rmdir(self.folder)
            self._mounted.remove(self.folder)
        self._mounted.remove(self._mount)
        return (*self.layers, Layer(self._mount, self._upper))

    def close(self) -> None:
        for path in reversed(self._mounted):
            linux.unmount(path)
        self._mounted.clear()
        for path in (f"{self._mount}-view", self._mount):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(path)


def _read(root: int, path: str, max_bytes: int) -> bytes | str:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        file = linux.open_beneath(root, path, flags, follow_links=False)
    except FileNotFoundError:
        return "missing_artifact"
    except OSError:
        return "artifact_not_regular"
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            return "artifact_not_regular"
        if found.st_size > max_bytes:
            return "artifact_too_large"
        with os.fdopen(file, "rb", closefd=False) as opened:
            return opened.read(max_bytes)
    finally:
        os.close(file)


def pack(folder: str, state: Mapping[str, str]) -> bytes:
    """The tree below a folder as a tar archive: files, folders and links, nobody's own.

    state: short texts to go with it.
    """

    def nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member if member.isreg() or member.isdir() or member.issym() else None

    buffer = io.BytesIO()
    headers = {f"{_STATE}{name}": text for name, text in state.items()}
    with tarfile.open(
        fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers
    ) as archive:
        archive.add(folder, arcname=".", filter=nobodys)
    return buffer.getvalue()


def unpack(archive: bytes, workspace: Workspace) -> dict[str, str]:
    """Writes what `pack` made into a workspace that no process uses yet; its state."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        headers = opened.pax_headers
        opened.extractall(workspace.folder, filter="tar")
    for folder, folders, files in os.walk(workspace.folder):
        for name in (*folders, *files):
            os.lchown(os.path.join(folder, name), workspace.uid, workspace.uid)
    return {
        name.removeprefix(_STATE): text
        for name, text in headers.items()
        if name.startswith(_STATE)
    }


def _is_initial_root() -> bool:
    """Whether this process is root of the machine, and not of a user namespace."""
    with open("/proc/self/uid_map") as file:
        return file.read().split() == ["0", "0", str((1 << 32) - 1)]
