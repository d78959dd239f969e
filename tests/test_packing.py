"""Packing loses nothing, and tells the truth about who predicts whom."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpt.data.packing import pack, rows_needed
from tests.conftest import random_groups


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    row_length=st.integers(13, 40),
)
def test_every_token_is_in_the_batch_once(seed, sizes, row_length):
    groups = random_groups(seed, sizes)
    num_rows = rows_needed(
        num_groups=len(sizes),
        group_size=max(*sizes, 1),
        prompt_length=5,
        completion_length=7,
        row_length=row_length,
    )
    batch = pack(groups, num_rows=num_rows, row_length=row_length)
    found = []
    for row in range(num_rows):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            inside = batch.segment_ids[row] == segment
            prompt = batch.tokens[row][inside & (batch.branch_ids[row] == 0)]
            for branch in range(1, batch.branch_ids[row][inside].max() + 1):
                places = np.flatnonzero(inside & (batch.branch_ids[row] == branch))
                fields = (
                    batch.tokens,
                    batch.completion_mask,
                    batch.old_logprobs,
                    batch.processed_logprobs,
                    batch.advantages,
                )
                found.append(
                    (tuple(prompt), *(tuple(field[row, places]) for field in fields))
                )
                # Walking up the parents gives the completion and its prompt, backwards.
                walk, place = [], places[-1]
                while True:
                    walk.append(batch.tokens[row, place])
                    parent = batch.parents[row, place]
                    if parent == place:
                        break
                    assert batch.positions[row, parent] == batch.positions[row, place] - 1
                    place = parent
                assert tuple(walk[::-1]) == found[-1][0] + found[-1][1]
    want = [
        (
            tuple(group.prompt),
            tuple(c.tokens),
            tuple(c.mask),
            tuple(c.logprobs),
            tuple(c.processed_logprobs),
            tuple(c.advantages),
        )
        for group in groups
        for c in group.completions
    ]
    assert sorted(found) == sorted(want)
    assert (batch.segment_ids[batch.num_rows :] == 0).all()
    assert batch.completion_mask[batch.segment_ids == 0].sum() == 0


def test_completions_of_a_group_share_their_prompt():
    groups = random_groups(1, [4], prompt=(5, 6), completion=(7, 8))
    batch = pack(groups, num_rows=1, row_length=5 + 4 * 7)
    assert (batch.segment_ids > 0).sum() == 5 + 4 * 7


def test_too_long_and_too_many_are_refused_with_the_numbers():
    groups = random_groups(0, [1], prompt=(5, 6), completion=(7, 8))
    with pytest.raises(ValueError, match=r"of 5 and a completion of 7 .* row of 11"):
        pack(groups, num_rows=1, row_length=11)
    with pytest.raises(ValueError, match="1 rows of 12"):
        pack(groups * 2, num_rows=1, row_length=12)
    with pytest.raises(ValueError, match="at least 12"):
        rows_needed(
            num_groups=1,
            group_size=1,
            prompt_length=5,
            completion_length=7,
            row_length=11,
        )
