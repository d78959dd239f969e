"""The host callback queue: episodes leave the jitted decode loop the moment they end.

In the graph, `on_finished` calls the host once per `data` shard whenever one of the shard's
episodes has ended. The callback only puts the shard's rows into a queue; a thread takes
them out and hands each episode to `submit`, so the device never waits for a sandbox. The
loop then collects the outcomes on the host, or, for experiments that want one program per
iteration, in the graph (`collect_in_graph`).
"""

import functools
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpt import mesh as mesh_lib
from jaxpt.types import Outcome

# (row in the batch, its tokens) -> the outcome to come.
Submit = Callable[[int, np.ndarray], "Future[Outcome]"]


class CallbackQueue:
    """Takes the rows of one batch after another; a context manager, since it has a thread.

    `open` a batch, run the program that calls `on_finished`, `collect`.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._arrivals: queue.SimpleQueue = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._submit: Submit | None = None
        self._expected: frozenset[int] = frozenset()
        self._futures: dict[int, Future[Outcome]] = {}
        self._error: str | None = None
        self._thread = threading.Thread(
            target=self._forward_arrivals, name="callback-queue", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> "CallbackQueue":
        return self

    def __exit__(self, *exc_info) -> None:
        self._arrivals.put(None)
        self._thread.join()

    def open(self, rows: list[int], submit: Submit) -> None:
        """Begins a batch: each of `rows` will be submitted once, the moment it ends."""
        with self._changed:
            missing = self._expected - set(self._futures)
            if missing and self._error is None:
                raise RuntimeError(
                    f"{len(missing)} episodes of the last batch were never collected."
                )
            self._submit = submit
            self._expected = frozenset(rows)
            self._futures = {}
            self._error = None

    def on_finished(
        self, newly_done: jax.Array, tokens: jax.Array, lengths: jax.Array
    ) -> None:
        """In the graph: sends the rows that have just ended.

        newly_done: [P, G] bool, tokens: [P, G, C], lengths: [P, G]. Row numbers count
        p * G + g over the whole batch.
        """
        rows = jnp.arange(newly_done.size, dtype=jnp.int32).reshape(newly_done.shape)

        def shard(newly_done, rows, tokens, lengths):
            # Replicas over the other axes hold the same rows: the first one speaks.
            first = jnp.array(True)
            for axis in mesh_lib.AXES:
                if axis != mesh_lib.DATA:
                    first &= jax.lax.axis_index(axis) == 0

            def send():
                io_callback(
                    self._put, None, newly_done, rows, tokens, lengths, ordered=False
                )

            jax.lax.cond(jnp.any(newly_done) & first, send, lambda: None)

        batch = P(mesh_lib.DATA)
        jax.shard_map(
            shard,
            mesh=self._mesh,
            in_specs=(batch, batch, batch, batch),
            out_specs=None,
            check_vma=False,
        )(newly_done, rows, tokens, lengths)

    def _put(self, newly_done, rows, tokens, lengths) -> None:
        # Runs on a thread of the runtime: copy and leave.
        self._arrivals.put(tuple(np.array(x) for x in (newly_done, rows, tokens, lengths)))

    def _forward_arrivals(self) -> None:
        while (arrival := self._arrivals.get()) is not None:
            newly_done, rows, tokens, lengths = arrival
            for place in zip(*np.nonzero(newly_done)):
                row, length = int(rows[place]), int(lengths[place])
                try:
                    self._submit_row(row, tokens[place][:length])
                except Exception:  # reported by collect, in the thread that waits
                    with self._changed:
                        self._error = traceback.format_exc()
                        self._changed.notify_all()

    def _submit_row(self, row: int, tokens: np.ndarray) -> None:
        with self._changed:
            if row not in self._expected:
                return  # a padding row
            if row in self._futures:
                raise RuntimeError(f"row {row} ended twice in one batch.")
            submit = self._submit
        assert submit is not None, "rows are expected only once a batch is open"
        future = submit(row, tokens)
        with self._changed:
            self._futures[row] = future
            self._changed.notify_all()

    def collect(self) -> dict[int, Outcome]:
        """Waits for every row of the batch, and returns the outcomes by row.

        Raises:
          RuntimeError: an episode could not be submitted; the message has its traceback.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or self._futures.keys() >= self._expected
            )
            if self._error:
                raise RuntimeError(f"An episode was not submitted:\n{self._error}")
            futures = dict(self._futures)
        return {row: future.result() for row, future in futures.items()}

    def collect_in_graph(self, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """In the graph: waits for the outcomes; the device waits too.

        Args:
          lengths: [P, G], a result of the decode loop, so that this comes after it.

        Returns: rewards [P, G] float32 (0 where there is none) and whether there is one.
        """
        rows = jnp.arange(lengths.size, dtype=jnp.int32).reshape(lengths.shape)

        def host(rows, lengths):
            del lengths
            outcomes = self.collect()
            found = [outcomes.get(int(row)) for row in np.asarray(rows).reshape(-1)]
            rewards = [o.reward.total if o and o.reward else 0.0 for o in found]
            valid = [o is not None and o.reward is not None for o in found]
            return (
                np.asarray(rewards, np.float32).reshape(rows.shape),
                np.asarray(valid, bool).reshape(rows.shape),
            )

        def shard(rows, lengths):
            shapes = (
                jax.ShapeDtypeStruct(rows.shape, jnp.float32),
                jax.ShapeDtypeStruct(rows.shape, jnp.bool_),
            )
            return io_callback(host, shapes, rows, lengths, ordered=False)

        batch = P(mesh_lib.DATA)
        return jax.shard_map(
            shard,
            mesh=self._mesh,
            in_specs=(batch, batch),
            out_specs=(batch, batch),
            check_vma=False,
        )(rows, lengths)


def then(future: Future, function: Callable) -> Future:
    """The future of `function(future.result())`."""
    following: Future = Future()

    def finish(function, done):
        try:
            following.set_result(function(done.result()))
        except Exception as error:
            following.set_exception(error)

    future.add_done_callback(functools.partial(finish, function))
    return following
