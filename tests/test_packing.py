"""Packing loses nothing, and tells the truth about who predicts whom."""

import dataclasses

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
    packed = pack(groups, num_rows=num_rows, row_length=row_length)
    batch = packed.batch
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
                    batch.sampler_logprobs,
                    batch.processed_logprobs,
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
        )
        for group in groups
        for c in group.completions
    ]
    assert sorted(found) == sorted(want)
    # Each completion has its place, and a number of its own in its row.
    everything = [c for group in groups for c in group.completions]
    for completion, tokens in zip(everything, packed.gather(batch.tokens), strict=True):
        assert tuple(completion.tokens) == tuple(tokens)
    logprobs = packed.scatter([c.logprobs for c in everything])
    np.testing.assert_array_equal(logprobs, batch.sampler_logprobs)
    numbers = [
        (row, *set(batch.sequence_ids[row, at : at + n])) for row, at, n in packed.places
    ]
    assert len(set(numbers)) == len(numbers) and all(len(n) == 2 for n in numbers)
    assert (batch.sequence_ids > 0).sum() == sum(len(c.tokens) for c in everything)
    assert (batch.segment_ids[batch.num_rows :] == 0).all()
    assert batch.completion_mask[batch.segment_ids == 0].sum() == 0


def test_completions_of_a_group_share_their_prompt():
    groups = random_groups(1, [4], prompt=(5, 6), completion=(7, 8))
    batch = pack(groups, num_rows=1, row_length=5 + 4 * 7).batch
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


def test_pairs_share_a_row():
    groups = random_groups(2, [4, 4, 2], prompt=(3, 4), completion=(4, 8))
    pairs = [dataclasses.replace(group, together=2) for group in groups]
    packed = pack(pairs, num_rows=8, row_length=18)
    for better, worse in zip(packed.places[::2], packed.places[1::2], strict=True):
        assert better[0] == worse[0] and worse[1] == better[1] + better[2]
        first = packed.batch.sequence_ids[better[0], better[1]]
        second = packed.batch.sequence_ids[worse[0], worse[1]]
        assert first % 2 == 1 and second == first + 1
    with pytest.raises(ValueError, match=r"3 completions.*2 together"):
        dataclasses.replace(random_groups(0, [3])[0], together=2)
    with pytest.raises(ValueError, match=r"2 completions of 7 tokens.*at least 17"):
        rows_needed(
            num_groups=1,
            group_size=2,
            prompt_length=3,
            completion_length=7,
            row_length=16,
            together=2,
        )
