"""Prompts and completions to packed rows: ragged lists in, a `Batch` of fixed shape out.

Completions of one prompt that land in the same row share one copy of it, as branches of a
segment; how rows are filled changes no result, only the cost.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpt.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """Tokens to learn from after a prompt, and what is known of each; all [length].

    mask: 1 where the token is learnt from, 0 where it is only context (a tool's answer).
    """

    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    processed_logprobs: np.ndarray
    advantages: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt (at least one token) and completions of it."""

    prompt: Sequence[int]
    completions: Sequence[Completion]


def rows_needed(
    *,
    num_groups: int,
    group_size: int,
    prompt_length: int,
    completion_length: int,
    row_length: int,
) -> int:
    """Rows that always suffice for such groups, whatever the lengths up to these limits."""
    fitting = (row_length - prompt_length) // completion_length
    if fitting < 1:
        raise ValueError(
            f"row_length={row_length} can't hold a prompt of {prompt_length} and a "
            f"completion of {completion_length} tokens; make it at least "
            f"{prompt_length + completion_length}."
        )
    return num_groups * -(-group_size // fitting)


def pack(groups: Sequence[Group], *, num_rows: int, row_length: int) -> Batch:
    """Packs first-fit, in the order given, into `num_rows` rows of `row_length`.

    Raises:
      ValueError: a prompt with a completion is longer than a row, or the rows do not
        suffice.
    """
    shape = (num_rows, row_length)
    ints = {
        name: np.zeros(shape, np.int32)
        for name in ("tokens", "positions", "segment_ids", "branch_ids", "parents")
    }
    floats = {
        name: np.zeros(shape, np.float32)
        for name in (
            "completion_mask",
            "old_logprobs",
            "processed_logprobs",
            "advantages",
        )
    }
    used = np.zeros(num_rows, np.int64)
    segments = np.zeros(num_rows, np.int64)
    rows_in_use = 0

    def write(row, values, start):
        for name, value in values.items():
            array = ints[name] if name in ints else floats[name]
            array[row, start : start + len(values["tokens"])] = value

    for group in groups:
        prompt_length = len(group.prompt)
        if prompt_length < 1:
            raise ValueError("A prompt has no tokens: nothing predicts the first one.")
        row, branch, prompt_start = -1, 0, 0
        for completion in group.completions:
            length = len(completion.tokens)
            if length == 0:
                continue
            if row < 0 or used[row] + length > row_length:
                need = prompt_length + length
                if need > row_length:
                    raise ValueError(
                        f"A prompt of {prompt_length} and a completion of {length} "
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
                branch, prompt_start = 0, int(used[row])
                steps = np.arange(prompt_length)
                write(
                    row,
                    {
                        "tokens": group.prompt,
                        "positions": steps,
                        "segment_ids": segments[row],
                        "branch_ids": 0,
                        "parents": prompt_start + np.maximum(steps - 1, 0),
                    },
                    prompt_start,
                )
                used[row] += prompt_length
            branch += 1
            start = int(used[row])
            steps = np.arange(length)
            parents = start + steps - 1
            parents[0] = prompt_start + prompt_length - 1
            write(
                row,
                {
                    "tokens": completion.tokens,
                    "positions": prompt_length + steps,
                    "segment_ids": segments[row],
                    "branch_ids": branch,
                    "parents": parents,
                    "completion_mask": completion.mask,
                    "old_logprobs": completion.logprobs,
                    "processed_logprobs": completion.processed_logprobs,
                    "advantages": completion.advantages,
                },
                start,
            )
            used[row] += length
    arrays: dict[str, Any] = {**ints, **floats, "num_rows": np.int32(rows_in_use)}
    return Batch(**arrays)
