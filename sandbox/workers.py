"""What a pool asks of whatever brings it workers: this machine, or a network."""

from typing import Protocol

from sandbox.items import Resources
from sandbox.sessions import Reply, Request


class WorkerLost(RuntimeError):
    """The worker is of no more use; `reason` is the code for what it had."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Link(Protocol):
    """A way to one worker."""

    async def request(self, request_id: str, request: Request) -> Reply:
        """The worker's reply; the same id again is the same request.

        Raises WorkerLost if none will come.
        """
        ...

    def kill(self, reason: str = "worker_died", detail: str = "") -> None:
        """Gives the worker up: whoever waits for it gets WorkerLost with this reason."""
        ...


class Members(Protocol):
    """The pool, as told who comes and goes. A worker's id is never used again."""

    def joined(self, worker_id: str, link: Link, capacity: Resources) -> None: ...

    def left(self, worker_id: str, lost: WorkerLost) -> None: ...

    def failed_to_join(self, lost: WorkerLost) -> None:
        """While there is no worker at all, this fails what waits for one."""
        ...


class Workers(Protocol):
    """Brings workers, and replaces those that are lost.

    largest: the capacity of the largest worker that may join.
    leaves_containers: whether a killed worker may leave some of Docker's on this machine.
    """

    largest: Resources
    leaves_containers: bool

    async def run(self, members: Members, snapshots: str) -> None:
        """Until it is cancelled; then all links are killed, and nothing is left.

        snapshots: a folder of this machine for those that outlive a worker.
        """
        ...
