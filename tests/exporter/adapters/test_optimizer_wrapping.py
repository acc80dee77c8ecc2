"""A replaced method: calls are intercepted, copies of the object are not, and the original is restored."""

from __future__ import annotations

import copy
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from rankscope_exporter.adapters.optimizer_wrapping import PatchedMethod


class Engine:
    """An object that counts its updates."""

    def __init__(self) -> None:
        self.updates = 0

    def update(self, by: int = 1) -> int:
        self.updates += by
        return self.updates


class Passing:
    """A proxy for another object."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class Seen(list[int]):
    """The results of the intercepted calls."""

    def around(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.append(result)
        return result


@pytest.mark.parametrize("make", [Engine, lambda: Passing(Engine())])
def test_each_call_is_intercepted_until_remove(make):
    engine, seen = make(), Seen()
    replaced = PatchedMethod(engine, "update", seen.around)

    assert (2, 5) == (engine.update(2), engine.update(by=3))
    with pytest.raises(TypeError):
        engine.update("x")

    replaced.remove()

    assert "update" not in engine.__dict__
    assert (6, [2, 5]) == (engine.update(), seen)


@pytest.mark.parametrize("removed", [False, True])
def test_copy_of_the_object_is_not_intercepted(removed):
    engine, seen = Engine(), Seen()
    replaced = PatchedMethod(engine, "update", seen.around)
    engine.update()
    file = pickle.dumps(engine)
    copies = (copy.deepcopy(engine), pickle.loads(file))
    if removed:
        replaced.remove()

    assert b"rankscope" not in file
    assert [(2, 3)] * 2 == [(copied.update(), copied.update()) for copied in copies]
    assert (1, [1]) == (engine.updates, seen)


def test_replacement_is_a_method_that_can_be_wrapped_and_bound_again():
    """A learning-rate scheduler of torch reads the function and wraps it in its own method."""
    engine, seen = Engine(), Seen()
    replaced = PatchedMethod(engine, "update", seen.around)
    function = engine.update.__func__
    engine.update = types.MethodType(lambda owner, by: function.__get__(owner, Engine)(by), engine)  # type: ignore[method-assign]
    engine.update(4)
    replaced.remove()

    assert (5, [4]) == (engine.update(1), seen)


def test_method_in_the_instance_is_called_and_restored():
    engine, seen = Engine(), Seen()
    engine.update = types.MethodType(lambda owner, by: Engine.update(owner, 10 * by), engine)  # type: ignore[method-assign]
    before = engine.update
    replaced = PatchedMethod(engine, "update", seen.around)

    assert (10, [10]) == (engine.update(1), seen)
    assert (20, [10]) == (copy.deepcopy(engine).update(1), seen)

    replaced.remove()

    assert before is engine.update


def test_patched_object_is_not_kept_alive():
    engine = Engine()
    replaced = PatchedMethod(engine, "update", Seen().around)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    replaced.remove()

    assert gone() is None
