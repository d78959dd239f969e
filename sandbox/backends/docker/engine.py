"""The Docker engine of this machine, by its SDK: starting containers and ending them.

Everything here blocks, for at most `_PATIENCE` seconds a call; call it in threads.
"""

import contextlib
import dataclasses
import itertools
import os
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandbox import linux
from sandbox.backends.backend import SandboxFailed, SandboxUnavailable

FOLDER = "/run/jaxpt-sandbox"  # with a folder for each worker, in which it mounts
_PREFIX = "jaxpt-sandbox"
_WORKER = "jaxpt.sandbox.worker"  # label: the worker's pid, and of which pid namespace
_PATIENCE = 60
_REMEDY = (
    "Run sandbox/images/start_docker as root, which installs Docker and starts it, and "
    "sandbox/images/build for the images."
)
_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Started:
    """A container that runs: attached to the streams of its first process, `pid`."""

    identity: str
    stream: socket.socket
    pid: int
    pidfd: int

    def close(self) -> None:
        """Lets go of it; the container is not ended."""
        self.stream.close()
        os.close(self.pidfd)


class Engine:
    """Raises SandboxUnavailable if none answers that could make sandboxes for us."""

    def __init__(self, runtime: str):
        try:
            import docker
        except ImportError as error:
            raise SandboxUnavailable(
                "The Docker SDK is missing: pip install 'jaxpt[docker]'."
            ) from error
        try:
            # The version is asked for, and so it is heard whether anyone answers.
            self.api: Any = docker.from_env(timeout=_PATIENCE).api
            runtimes = self.api.info()["Runtimes"]
        except Exception as error:
            raise SandboxUnavailable(
                f"No Docker engine answers: {error} {_REMEDY}"
            ) from error
        if runtime not in runtimes:
            raise SandboxUnavailable(
                f"Docker has no runtime {runtime!r}, but {sorted(runtimes)}. {_REMEDY}"
            )
        self._check_machine()

    def _check_machine(self) -> None:
        """Workspaces are mounted by this process, and have to be seen by the engine."""
        if os.geteuid() != 0:
            raise SandboxUnavailable(
                "A worker that makes Docker sandboxes mounts their workspaces: it has to "
                "be root. Without root use the local backend."
            )
        address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        if not address.startswith("unix://"):
            raise SandboxUnavailable(
                f"The Docker engine is at {address}, not on this machine: start a worker "
                "there."
            )
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address.removeprefix("unix://"))
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("3i", peer)
        try:
            there = os.readlink(f"/proc/{pid}/ns/mnt")
        except OSError:
            there = f"those of process {pid}"
        if there != (here := os.readlink("/proc/self/ns/mnt")):
            raise SandboxUnavailable(
                f"This process and the Docker engine see different mounts ({here}, "
                f"{there}): start the worker outside of any container, and in a process "
                "that makes no local sandboxes."
            )

    def check_image(self, image: str) -> None:
        """Raises SandboxFailed if there is none."""
        from docker import errors

        with _failing(f"The image {image}"):
            try:
                self.api.inspect_image(image)
            except errors.ImageNotFound as error:
                name = image.rpartition(":")[2]
                raise SandboxFailed(
                    f"There is no image {image!r}: run sandbox/images/build {name}."
                ) from error

    def start(self, arguments: dict[str, Any]) -> Started:
        """Starts a container; raises SandboxFailed, and then none is left."""
        with _failing("The start of a container"):
            name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
            labels = {_WORKER: f"{os.getpid()} {_pid_namespace()}"}
            made = self._create(name, labels, arguments)
            stream = None
            try:
                stream = self._attach(made)
                self.api.start(made)
                state = self.api.inspect_container(made)["State"]
                if not state["Pid"]:
                    raise SandboxFailed(f"A container ended at once: {state}")
                pidfd = os.pidfd_open(state["Pid"])
                return Started(made, stream, state["Pid"], pidfd)
            except BaseException:
                if stream is not None:
                    stream.close()
                self.remove(made)
                raise

    def _create(self, name: str, labels: dict, arguments: dict[str, Any]) -> str:
        host_config = arguments.pop("host_config")
        config = self.api.create_container_config(
            **arguments, labels=labels, host_config=host_config
        )
        # With the one stream that is attached, the container's stdin ends: so containers
        # end with their worker, however that does.
        config["StdinOnce"] = True
        return self.api.create_container_from_config(config, name)["Id"]

    def _attach(self, identity: str) -> socket.socket:
        wanted = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        stream = self.api.attach_socket(identity, wanted)
        # Of all that the SDK wraps around it, the descriptor alone is needed.
        connection = socket.socket(fileno=os.dup(stream.fileno()))
        stream._response.close()
        stream.close()
        connection.setblocking(False)
        return connection

    def remove(self, identity: str) -> None:
        """Ends a container, if it lives, and leaves nothing of it."""
        from docker import errors

        with _failing("The removal of a container"):
            try:
                self.api.remove_container(identity, force=True, v=True)
            except errors.NotFound:
                return
            except errors.APIError as error:
                if error.status_code != 409:  # someone else is at it
                    raise

    def end_of(self, identity: str) -> tuple[bool, int]:
        """Whether a container ended for want of memory, and its exit code."""
        with _failing("A look at a container"):
            state = self.api.inspect_container(identity)["State"]
            return state["OOMKilled"], state["ExitCode"]

    def pause(self, identity: str) -> None:
        with _failing("The freezing of a container"):
            self.api.pause(identity)

    def unpause(self, identity: str) -> None:
        with _failing("The thawing of a container"):
            self.api.unpause(identity)

    def remove_those_of_the_dead(self) -> None:
        """Removes what workers left that did not come to remove it."""
        with _failing("The removal of containers"):
            found = self.api.containers(all=True, filters={"label": _WORKER})
        for container in found:
            pid, _, namespace = container["Labels"][_WORKER].partition(" ")
            if namespace == _pid_namespace() and not linux.is_alive(pid):
                self.remove(container["Id"])
        with contextlib.suppress(FileNotFoundError):
            for folder in Path(FOLDER).iterdir():
                if not linux.is_alive(folder.name.partition("-")[0]):
                    clear(str(folder))

    def close(self) -> None:
        self.api.close()


def clear(folder: str) -> None:
    """Unmounts all below a worker's folder, and removes it."""
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        mounted = line.split()[4]
        if mounted.startswith(f"{folder}/"):
            with contextlib.suppress(OSError):
                linux.unmount(mounted)
    shutil.rmtree(folder, ignore_errors=True)


def new_folder() -> str:
    """A folder for this worker's mounts, which its name is removed by when it is dead."""
    folder = f"{FOLDER}/{os.getpid()}-{next(_numbers)}"
    os.makedirs(FOLDER, mode=0o711, exist_ok=True)
    os.mkdir(folder, mode=0o711)
    return folder


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Raises SandboxFailed for whatever goes wrong between us and the engine."""
    import requests
    from docker import errors

    try:
        yield
    except (errors.DockerException, requests.RequestException, OSError) as error:
        raise SandboxFailed(f"{what} failed: {error}") from error
