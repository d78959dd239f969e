"""Prompts and completions to packed rows: ragged lists in, a `Batch` of fixed shape out.

Completions of one prompt that land in the same row share one copy of it, as branches of a
segment; how rows are filled changes no result, only the cost.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxpt.types import Batch

_INTEGERS = (
    "tokens",
    "positions",
    "segment_ids",
    "branch_ids",
    "sequence_ids",
    "parents",
    "loss_ids",
)
_FLOATS = (
    "completion_mask",
    "loss_weights",
    "sampler_logprobs",
    "processed_logprobs",
    "old_logprobs",
    "advantages",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """Tokens to learn from after a prompt, and what is known of each; all [length].

    mask: 1 where the token is learnt from, 0 where it is only context (a tool's answer).
    logprobs, processed_logprobs: the sampler's, of the plain distribution and of the one
      drawn from.
    loss_id: which of the update's loss functions it has.
    """

    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    processed_logprobs: np.ndarray
    loss_id: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt (at least one token) and completions of it.

    together: so many completions, one after the other, share a row: 2 for pairs.
    """

    prompt: Sequence[int]
    completions: Sequence[Completion]
    together: int = 1

    def __post_init__(self):
        if len(self.completions) % self.together:
            raise ValueError(
                f"A group has {len(self.completions)} completions, which can't be kept "
                f"{self.together} together."
            )


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows, without credit yet, and where in them each completion lies.

    places: (row, first column, length) of each, in the order given.
    """

    batch: Batch
    places: Sequence[tuple[int, int, int]]

    def gather(self, array: Any) -> list[np.ndarray]:
        """What an array [R, T] says of each completion, each [length]."""
        array = np.asarray(array)
        return [array[row, start : start + n] for row, start, n in self.places]

    def scatter(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """An array [R, T] float32 with these in the completions' places, 0 elsewhere."""
        array = np.zeros(self.batch.tokens.shape, np.float32)
        for (row, start, n), value in zip(self.places, values, strict=True):
            array[row, start : start + n] = value
        return array


def rows_needed(
    *,
    num_groups: int,
    group_size: int,
    prompt_length: int,
    completion_length: int,
    row_length: int,
    together: int = 1,
) -> int:
    """Rows that always suffice for such groups, whatever the lengths up to these limits."""
    fitting = (row_length - prompt_length) // (completion_length * together) * together
    if fitting < 1:
        several = "a completion" if together == 1 else f"{together} completions"
        raise ValueError(
            f"row_length={row_length} can't hold a prompt of {prompt_length} and "
            f"{several} of {completion_length} tokens; make it at least "
            f"{prompt_length + completion_length * together}."
        )
    return num_groups * -(-group_size // fitting)


def pack(groups: Sequence[Group], *, num_rows: int, row_length: int) -> Packed:
    """Packs first-fit, in the order given, into `num_rows` rows of `row_length`.

    Raises:
      ValueError: a prompt with a completion is longer than a row, or the rows do not
        suffice.
    """
    arrays: dict[str, Any] = {
        name: np.zeros((num_rows, row_length), dtype)
        for names, dtype in ((_INTEGERS, np.int32), (_FLOATS, np.float32))
        for name in names
    }
    used = np.zeros(num_rows, np.int64)
    segments = np.zeros(num_rows, np.int64)
    sequences = np.zeros(num_rows, np.int64)
    places: list[tuple[int, int, int]] = []
    rows_in_use = 0

    def write(row: int, values: dict[str, Any]) -> int:
        """Appends to a row; where it begins."""
        start, length = int(used[row]), len(values["tokens"])
        for name, value in values.items():
            arrays[name][row, start : start + length] = value
        used[row] += length
        return start

    for group in groups:
        prompt_length = len(group.prompt)
        if prompt_length < 1:
            raise ValueError("A prompt has no tokens: nothing predicts the first one.")
        row, branch, prompt_start = -1, 0, 0
        for block in _blocks(group):
            length = sum(len(completion.tokens) for completion in block)
            if length == 0:
                places += [(0, 0, 0)] * len(block)
                continue
            if row < 0 or used[row] + length > row_length:
                need = prompt_length + length
                if need > row_length:
                    several = (
                        "a completion" if len(block) == 1 else f"{len(block)} completions"
                    )
                    raise ValueError(
                        f"A prompt of {prompt_length} and {several} of {length} "
                        f"tokens do not fit into a row of {row_length}."
                    )
                fits = np.flatnonzero(used[:rows_in_use] + need <= row_length)
                row = int(fits[0]) if fits.size else rows_in_use
                if row == num_rows:
                    raise ValueError(
                        f"{num_rows} rows of {row_length} tokens are too few for these "
                        f"{len(groups)} groups; see rows_needed."
                    )
                rows_in_use = max(rows_in_use, row + 1)
                segments[row] += 1
                steps = np.arange(prompt_length)
                prompt = {
                    "tokens": group.prompt,
                    "positions": steps,
                    "segment_ids": segments[row],
                    "parents": used[row] + np.maximum(steps - 1, 0),
                }
                branch, prompt_start = 0, write(row, prompt)
            for completion in block:
                branch += 1
                sequences[row] += 1
                length = len(completion.tokens)
                steps = np.arange(length)
                parents = used[row] + steps - 1
                parents[:1] = prompt_start + prompt_length - 1
                start = write(
                    row,
                    {
                        "tokens": completion.tokens,
                        "positions": prompt_length + steps,
                        "segment_ids": segments[row],
                        "branch_ids": branch,
                        "sequence_ids": sequences[row],
                        "parents": parents,
                        "completion_mask": completion.mask,
                        "loss_ids": completion.loss_id,
                        "sampler_logprobs": completion.logprobs,
                        "processed_logprobs": completion.processed_logprobs,
                        "old_logprobs": completion.logprobs,
                    },
                )
                places.append((row, start, length))
    arrays["num_rows"] = np.int32(rows_in_use)
    return Packed(Batch(**arrays), places)


def _blocks(group: Group) -> Iterator[Sequence[Completion]]:
    for first in range(0, len(group.completions), group.together):
        yield group.completions[first : first + group.together]
