"""Collating: what lies where in a packed batch, and taking it apart again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import make_samples
from tlora.kernels.dropout import token_keys
from tlora.supermodel.batch import BatchRow, PackedBatch, TokenSpan, collate


def row(
    job_id: str, ids: list[int], weights: list[float] | None = None, normalizer: float = 1.0, key: tuple[int, int, int] | None = None
) -> BatchRow:
    weights = [1.0] * len(ids) if weights is None else weights
    return BatchRow(job_id, np.array(ids, np.int32), np.array(weights, np.float32), normalizer, key)


def test_what_lies_where() -> None:
    batch = collate([row("a", [5, 6, 7], [0, 0, 1], 4.0), row("a", [8, 9]), row("b", [3, 4], normalizer=2.0)], pad_to=9)
    assert batch.input_ids_T.tolist() == [5, 6, 7, 8, 9, 3, 4, 0, 0]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 0, 0]
    assert batch.labels_T.tolist() == [6, 7, 0, 9, 0, 4, 0, 0, 0]
    assert batch.loss_weights_T.tolist() == [0, 1, 0, 1, 0, 1, 0, 0, 0]
    assert batch.grad_weights_T.tolist() == [0, 0.25, 0, 1, 0, 0.5, 0, 0, 0]
    assert batch.labelled.tolist() == [1, 3, 5]
    assert batch.lengths == (3, 2, 2, 2) and batch.spans == (
        TokenSpan("a", 0, (3, 2), n0=0, n1=2, grad_scale=16.0),
        TokenSpan("b", 5, (2,), n0=2, n1=3, grad_scale=32.0),
    )
    assert batch.num_tokens == 7 and batch.keys_T is None


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize(("before", "total", "pieces"), [(0, 7, ()), (0, 9, (2,)), (9, 20, (13,)), (100, 7 + 2 * 512 + 1, (512, 512, 1))])
def test_padding_later_is_padding_at_once_in_pieces(before: int, total: int, pieces: tuple[int, ...], with_keys: bool) -> None:
    key = (1, 2, 3) if with_keys else None
    rows = [row("a", [5, 6, 7], key=key), row("a", [8, 9], key=key), row("b", [3, 4])]
    batch = collate(rows, pad_to=before)
    padded = batch.padded(total)
    assert same(padded, collate(rows, pad_to=total)) and padded.lengths == batch.padded_lengths(total) == (3, 2, 2, *pieces)
    assert all(len(values_T) == total for values_T in (padded.input_ids_T, padded.position_ids_T, padded.labels_T, padded.loss_weights_T))
    assert not padded.position_ids_T[7:].any() and not padded.loss_weights_T[7:].any()


def test_dropout_keys_are_each_samples_own() -> None:
    batch = collate([row("a", [5, 6, 7], key=(1, 2, 3)), row("b", [3, 4])])
    assert batch.keys_T is not None
    assert np.array_equal(batch.keys_T[:3].numpy(), token_keys(1, 2, 3, 3)) and batch.keys_T[3:].tolist() == [0, 0]
    assert batch.spans == (
        TokenSpan("a", 0, (3,), has_keys=True, n0=0, n1=2, grad_scale=16.0),
        TokenSpan("b", 3, (2,), n0=2, n1=3, grad_scale=16.0),
    )


def test_weight_of_the_first_token_is_never_a_target() -> None:
    assert collate([row("a", [5, 6], [9, 1])]).loss_weights_T.tolist() == [1, 0]


def test_nothing_at_all() -> None:
    batch = collate([])
    assert batch.num_tokens == 0 and batch.lengths == () and list(batch.units()) == []


def same(left: PackedBatch, right: PackedBatch) -> bool:
    for name in ("input_ids_T", "position_ids_T", "labels_T", "loss_weights_T", "grad_weights_T", "labelled"):
        if not torch.equal(getattr(left, name), getattr(right, name)):
            return False
    keys = (left.keys_T is None) == (right.keys_T is None) and (left.keys_T is None or torch.equal(left.keys_T, right.keys_T))  # type: ignore[arg-type]
    return keys and left.lengths == right.lengths and left.spans == right.spans


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 99), st.integers(0, 200))
def test_units_of_a_batch_are_the_samples_collated_alone(counts: list[int], seed: int, pad_to: int) -> None:
    samples = iter(make_samples(sum(counts), seed=seed, low=1, high=30))
    rows: list[BatchRow] = []
    for job, count in enumerate(counts):
        rows += [BatchRow(f"job{job}", s.input_ids, s.loss_weights, 3.0, (seed, 0, i)) for i, s in zip(range(count), samples, strict=False)]
    found = list(collate(rows, pad_to=pad_to).units())
    assert len(found) == len(rows) and all(same(part, collate([one])) for part, one in zip(found, rows, strict=True))


PAIR = BatchRow("p", np.array([5, 6, 7, 8, 9]), np.array([1, 1, 1, 0, 1], np.float32), 2.0, None, (3, 2))


def test_the_sequences_of_a_unit_are_told_apart() -> None:
    batch = collate([row("a", [3, 4]), PAIR, PAIR], pad_to=15)
    assert batch.lengths == (2, 3, 2, 3, 2, 3) and batch.spans[1] == TokenSpan(
        "p", 2, (3, 2, 3, 2), sequences=2, n0=1, n1=7, grad_scale=32.0
    )
    assert batch.position_ids_T.tolist() == [0, 1, 0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 0, 0, 0]
    assert batch.labels_T.tolist() == [4, 0, 6, 7, 0, 9, 0, 6, 7, 0, 9, 0, 0, 0, 0]
    assert batch.loss_weights_T.tolist() == [1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0, 0]
    assert batch.grad_weights_T.tolist() == [1, 0, 0.5, 0.5, 0, 0.5, 0, 0.5, 0.5, 0, 0.5, 0, 0, 0, 0]
    assert [(span.t0, span.t1) for span in batch.spans] == [(0, 2), (2, 12)]
    assert [part.lengths for part in batch.units()] == [(2,), (3, 2), (3, 2)]


@given(st.lists(st.sampled_from(["sample", "pair"]), min_size=1, max_size=5), st.sets(st.integers(0, 4), min_size=1), st.integers(0, 40))
def test_some_jobs_of_a_batch_are_what_they_are_alone(kinds: list[str], wanted: set[int], pad_to: int) -> None:
    rows = [replace(PAIR if kind == "pair" else row("", [3, 4, 5, 6]), job_id=f"job{i}") for i, kind in enumerate(kinds)]
    wanted &= set(range(len(rows)))
    if wanted:
        assert same(collate(rows, pad_to=pad_to).only({f"job{i}" for i in wanted}), collate([rows[i] for i in sorted(wanted)]))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("a", [1]), row("b", [1]), row("a", [1])], "rows of a are not adjacent"),
        ([row("a", [])], "a row of a: "),
        ([replace(PAIR, lengths=(3, 3))], "a row of p: "),
        ([PAIR, replace(PAIR, lengths=())], "rows of p have 1 sequences, and 2"),
        ([row("a", [1], normalizer=0)], "normalizer=0"),
        ([row("a", [1], key=(1, 2, 3)), row("a", [1])], "some rows of a have a dropout key and some have none"),
    ],
)
def test_what_only_a_bug_can_ask_for(rows: list[BatchRow], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        collate(rows)
