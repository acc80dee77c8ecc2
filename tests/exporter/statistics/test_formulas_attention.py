"""Tests of entropy and largest weight of attention, compared with complete matrices in float64; and of their memory."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.exporter.statistics.conftest import Operations, normal

from rankscope_exporter.statistics.formulas.attention import Mask, attention_sums, broadcast, hides_of, sampled_rows

BATCH, HEADS, WIDTH = 3, 4, 8


def reference(
    query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None = None, scale: float | None = None
) -> tuple[list[float], list[float]]:
    """Return entropy and mean largest weight of each head, from complete matrices. Masked scores have bias -inf."""
    query, key = query.double(), key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    entropies, greatest = [], []
    for head in range(query.shape[1]):
        rows = scores[:, head].reshape(-1, scores.shape[3])
        rows = rows[(rows > -math.inf).any(1)]
        weights = torch.softmax(rows, -1)
        entropies.append(float(-torch.special.xlogy(weights, weights).sum(1).mean()))
        greatest.append(float(weights.amax(1).mean()))
    return entropies, greatest


def means(sums: torch.Tensor) -> tuple[list[float], list[float]]:
    return (sums[0] / sums[2]).tolist(), (sums[1] / sums[2]).tolist()


def bias_of(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -math.inf)


def masks(queries: int, keys: int) -> dict[str, tuple[Mask, torch.Tensor | None]]:
    """Return masks in the form of the argument, each with the equivalent bias for all scores."""
    some = normal(BATCH, 1, queries, keys, seed=5) > 0.4
    some[0, 0, 1] = True  # a query that attends to no key
    added = normal(HEADS, queries, keys, seed=6)
    lowest = torch.where(some, torch.finfo(torch.float32).min, 0.0)
    later = torch.arange(keys) > torch.arange(queries)[:, None]
    padded = torch.arange(keys) >= torch.tensor([keys, 3, 0])[:, None]  # the last element of the batch has no key

    def given(mask: torch.Tensor, *, true_attends: bool = False, causal: bool = False) -> Mask:
        values = broadcast(hides_of(mask, true_attends=true_attends), BATCH, HEADS, queries, keys)
        assert values is not None
        return Mask(values, causal=causal)

    return {
        "none": (Mask(), None),
        "hides": (given(some), bias_of(some)),
        "attends": (given(~some, true_attends=True), bias_of(some)),
        "ones and zeros": (given((~some).long(), true_attends=True), bias_of(some)),
        "added to heads": (given(added), added.double()),
        "lowest numbers": (given(lowest), bias_of(some)),
        "minus ten thousand": (given(torch.where(some, -1e4, 0.0)), bias_of(some)),
        "causal": (Mask(causal=True), bias_of(later)),
        "causal and hides": (given(some, causal=True), bias_of(some | later)),
        "of one query": (given(some[0, 0, :1]), bias_of(some[0, 0, :1])),
        "by element": (given(some[:, 0]), bias_of(some)),
        "by element and head": (given(some.expand(-1, HEADS, -1, -1).flatten(0, 1)), bias_of(some)),
        "padding": (given(padded), bias_of(padded[:, None, None])),
    }


@pytest.mark.parametrize("max_bytes", [64 << 20, 4096, 1], ids=["at once", "in parts", "row by row"])
@pytest.mark.parametrize(("queries", "keys", "key_heads"), [(7, 7, 4), (5, 9, 2), (9, 4, 1)])
def test_attention_equals_that_of_whole_matrices(queries, keys, key_heads, max_bytes):
    query, key = normal(BATCH, HEADS, queries, WIDTH) * 2, normal(BATCH, key_heads, keys, WIDTH, seed=1)
    for name, (mask, bias) in masks(queries, keys).items():
        found = means(attention_sums(query, key, mask, max_bytes=max_bytes))
        for expected, got in zip(reference(query, key, bias), found, strict=True):
            assert expected == pytest.approx(got, rel=2e-6, abs=2e-6), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_attention_of_every_dtype_and_scale(dtype):
    query, key = (normal(2, 2, 6, WIDTH, seed=seed).to(dtype) for seed in (1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        found = means(attention_sums(query, key, Mask(), scale=3.0))

    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    for expected, got in zip(reference(query, key, scale=3.0), found, strict=True):
        assert expected == pytest.approx(got, rel=tolerance, abs=tolerance)


def test_extremes_of_attention_are_exact():
    """Entropy is 0 for one key and ln n for equal scores. A NaN affects only its head, a masked NaN affects none."""
    query, key = torch.ones(1, 3, 4, 2), torch.ones(1, 3, 4, 2)
    key[0, 1, 3, 0] = math.nan
    hidden = torch.zeros(1, 3, 4, 4, dtype=torch.bool)
    hidden[0, 2, :, 1:] = True
    entropy, greatest = means(attention_sums(query, key, Mask(hidden)))
    assert pytest.approx([math.log(4), math.nan, 0], nan_ok=True) == entropy
    assert pytest.approx([0.25, math.nan, 1], nan_ok=True) == greatest
    assert (0, 1) == (entropy[2], greatest[2])

    hidden[0, 1, :, 3] = True
    entropy, _ = means(attention_sums(query, key, Mask(hidden)))
    assert pytest.approx([math.log(4), math.log(3), 0]) == entropy
    assert [0, 0, 0] == attention_sums(query, key, Mask(torch.ones_like(hidden))).sum(0).tolist()


def test_sampled_rows_are_at_equal_distances():
    query, key = normal(2, 2, 50, WIDTH), normal(2, 2, 50, WIDTH, seed=1)
    chosen = sampled_rows(50, 12)
    hidden = torch.arange(50) > torch.arange(50)[:, None]
    expected = reference(query[:, :, list(chosen)], key, bias_of(hidden[list(chosen)]))

    sums = attention_sums(query, key, Mask(causal=True), rows=12)
    assert {2.0 * len(chosen)} == set(sums[2].tolist())
    for one, other in zip(expected, means(sums), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@given(st.integers(0, 3000), st.integers(1, 3000))
def test_sampled_rows_cover_all_queries_within_the_limit(queries, rows):
    chosen = list(sampled_rows(queries, rows))

    assert min(queries, 1) <= len(chosen) <= min(queries, rows)
    assert all(0 <= row < queries for row in chosen)
    if chosen:
        assert abs(chosen[0] - (queries - 1 - chosen[-1])) <= 1
        assert 1 >= len({after - before for before, after in itertools.pairwise(chosen)})


@pytest.mark.parametrize("sizes", [(1, 2, 512), (1, 64, 90), (256, 2, 32), (1, 16, 200)])
def test_scores_of_long_sequences_are_never_whole_in_memory(sizes):
    """The memory is limited for many queries, heads and elements of a batch. Whole scores would be 2 MiB."""
    batch, heads, queries = sizes
    query, key = normal(*sizes, 8), normal(*sizes, 8, seed=1)
    mask = broadcast(torch.zeros(queries, dtype=torch.bool), batch, heads, queries, queries)
    with Operations() as operations:
        attention_sums(query, key, Mask(mask, causal=True), max_bytes=1 << 19)

    assert operations.largest_bytes <= max(1 << 17, query.nbytes)


@pytest.mark.parametrize("shape", [(2, 2), (3, 6, 5), (7,), (2, 3, 5, 6), (1, 1, 1, 1, 1)])
def test_broadcast_returns_none_for_a_mask_that_does_not_fit(shape):
    assert broadcast(torch.zeros(shape), 3, 4, 6, 6) is None
