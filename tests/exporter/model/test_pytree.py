"""Tests of the search for tensors inside of objects, and of their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_exporter.model.pytree import MAX_DEPTH, MAX_TENSORS, Found, ObjectSpec, parse_specs, received, returned

A, B, C, D = (torch.tensor(float(number)) for number in range(4))


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Data:
    first: Any
    second: Any = None


def numbers(found: Found) -> list[tuple[int | None, str, float]]:
    return [(slot.index, slot.path, float(slot.tensor)) for slot in found.slots]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (A, [(None, "", 0)]),
        ((A,), [(None, "[0]", 0)]),
        ([(A,)], [(None, "[0][0]", 0)]),
        ((A, None), [(0, "[0]", 0)]),
        ((3, A), [(1, "[1]", 0)]),
        ([A, B], [(0, "[0]", 0), (1, "[1]", 1)]),
        ({"a": A, "b": B}, [(0, ".a", 0), (1, ".b", 1)]),
        ({1: A, "b": B}, [(0, "[0]", 0), (1, ".b", 1)]),
        (Point(A, B), [(0, ".x", 0), (1, ".y", 1)]),
        (Data(A, [B, C]), [(0, ".first", 0), (2, ".second[0]", 1), (3, ".second[1]", 2)]),
        ((A, (B, C), D), [(0, "[0]", 0), (3, "[1][0]", 1), (4, "[1][1]", 2), (2, "[2]", 3)]),
        ([[A, B]], [(0, "[0][0]", 0), (1, "[0][1]", 1)]),
        (None, []),
        (["text", {}], []),
    ],
)
def test_top_level_results_have_lower_numbers_than_nested_tensors(output, expected):
    assert expected == numbers(returned(output))
    assert () == returned(output).unknown


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((A,), {}, [(None, "[0]", 0)]),
        ((), {"x": A}, [(None, ".x", 0)]),
        ((A, 3), {"mask": None}, [(None, "[0]", 0)]),
        ((A, None, B), {"c": C, "n": 1}, [(0, "[0]", 0), (1, "[2]", 1), (2, ".c", 2)]),
        (((A, B), C), {}, [(0, "[1]", 2), (1, "[0][0]", 0), (2, "[0][1]", 1)]),
        (({"a": A},), {}, [(None, "[0].a", 0)]),
        ((), {}, []),
    ],
)
def test_arguments_are_numbered_among_tensors_only(args, kwargs, expected):
    assert expected == numbers(received(args, kwargs))


def test_depth_and_tensor_limits_and_unknown_types_are_reported():
    deep: Any = A
    for _ in range(MAX_DEPTH + 1):
        deep = [deep, 1]

    assert ("list",) == returned(deep).unknown
    many = returned([A] * (MAX_TENSORS + 3))
    assert (MAX_TENSORS, ("3 tensors beyond the first 128",)) == (len(many.slots), many.unknown)
    assert ("object", "set") == tuple(sorted(returned((A, {1}, object())).unknown))
    cyclic: list[Any] = [A]
    cyclic.append(cyclic)
    assert 0 < len(returned(cyclic).slots) <= MAX_TENSORS


_objects = st.recursive(
    st.one_of(st.none(), st.integers(), st.builds(lambda: torch.zeros(1))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(st.text(max_size=2), inner)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(output=_objects)
def test_tensor_numbers_in_an_object_are_unique(output):
    for found in (returned(output), received((output,), {"x": output})):
        indices = [slot.index for slot in found.slots]
        assert len(set(indices)) == len(indices)
        assert (None in indices) <= (len(indices) == 1)


def test_part_is_selected_by_position_number_or_name():
    outputs, inputs = returned((A, (B, C), D)), received((A, None, B), {"mask": C})
    select = lambda text, found: [float(slot.tensor) for slot in ObjectSpec.parse(text).select(found) or ()]  # noqa: E731

    assert {"tuple[3]:0": [0.0], "tuple[3]:1": [1.0, 2.0], "list[3]": [0.0, 1.0, 2.0, 3.0], "tuple[4]:0": []} == {
        text: select(text, outputs) for text in ("tuple[3]:0", "tuple[3]:1", "list[3]", "tuple[4]:0")
    }
    by_number, by_position = "list[3]:1", "tuple[4]:2"  # in module_struct.json, and in the call
    assert {by_number: [1.0], by_position: [1.0], "dict:mask": [2.0], "dict:mas": [], "tensor": []} == {
        text: select(text, inputs) for text in (by_number, by_position, "dict:mask", "dict:mas", "tensor")
    }
    single = [("tensor", A), ("tuple[1]:0", A), ("tensor", (A, 1))]
    assert [[0.0]] * 3 == [select(text, returned(output)) for text, output in single]


@pytest.mark.parametrize("text", ["", "tuple", "tuple[2]:", "tuple[2]:2", "tuple[-1]", "dict:", "Tensor", None, 3])
def test_invalid_part_is_rejected(text):
    with pytest.raises(ValueError, match=r"does not select an element|does not exist"):
        ObjectSpec.parse(text)
    with pytest.raises(ValueError, match=r"parts\['a'\]"):
        parse_specs("a", {"input": text})
