"""What a module looked like when it was called: as a row, as a line of text, and in the existing tool's JSON.

Pure; keeps shapes and types, never a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rankscope_exporter.naming import local_tensor
from rankscope_exporter.objects import Found, Slot, children

MODEL: Final = "(the model)"


@dataclass(slots=True)
class Described:
    """A tensor of an object: where it is, what it is like, and the type of its gradient once that has arrived."""

    path: str
    index: int | None
    shape: tuple[int, ...]
    dtype: str
    grad: tuple[tuple[int, ...], str] | None = None

    @classmethod
    def of(cls, slot: Slot) -> Described:
        """Return the description of a slot."""
        return cls(slot.path, slot.index, *shape_and_type(slot.tensor))

    def row(self) -> dict[str, Any]:
        """Return it as it is in the columns `inputs` and `outputs`."""
        row: dict[str, Any] = {"shape": list(self.shape), "dtype": self.dtype}
        if self.index is not None:
            row |= {"index": self.index, "path": self.path}
        return row | ({"grad": self.grad[1]} if self.grad else {})


@dataclass(slots=True)
class Seen:
    """One module at its first call; None as long as there was none."""

    name: str
    class_name: str
    placement: str | None = None
    inputs: list[Described] | None = None
    outputs: list[Described] | None = None
    output_form: str = "tensor"
    output_parts: dict[str, Described | str] = field(default_factory=dict)  # top level alone, by position or name
    stack: tuple[str, ...] = ()
    vpp_stage: int | None = None

    def took(self, found: Found) -> None:
        """Note the arguments of the call."""
        self.inputs = [Described.of(slot) for slot in found.slots]

    def gave(self, output: Any, found: Found) -> None:
        """Note what the call returned."""
        self.outputs = [Described.of(slot) for slot in found.slots]
        items = children(output)
        if items is None:
            own: Described | str = self.outputs[0] if self.outputs else str(type(output))
            self.output_parts = {"tensor": own}
            return
        named = isinstance(output, Mapping) or not isinstance(output, tuple | list)
        by_path = {described.path: described for described in self.outputs}
        self.output_form = f"{'dict' if named else 'list' if isinstance(output, list) else 'tuple'}[{len(items)}]"
        for position, (path, value) in enumerate(items):
            key = path.strip(".[]") if named else str(position)
            self.output_parts[key] = by_path.get(path, str(type(value)))

    def row(self) -> dict[str, Any]:
        """Return the row of the dataset `modules`."""
        return {
            "module": self.name,
            "class": self.class_name,
            "inputs": _json(self.inputs),
            "outputs": _json(self.outputs),
            "placement": self.placement,
            "stack": "\n".join(self.stack) or None,
            "vpp_stage": self.vpp_stage,
        }

    def line(self) -> str:
        """Return the module as a line of text."""
        if self.inputs is None:
            return f"{self.name or MODEL}: {self.class_name}, not called"
        outputs = "nothing" if self.outputs is None else _list_of(self.outputs) or "no tensor"
        return f"{self.name or MODEL}: {self.class_name}({_list_of(self.inputs)}) -> {outputs}"

    def document(self) -> dict[str, Any]:
        """Return the module as the existing tool prints it."""
        inputs = self.inputs or []
        outputs = self.output_parts
        return {
            "input": {"config": f"list[{len(inputs)}]", **{str(i): _words(item) for i, item in enumerate(inputs)}},
            "output": {"config": self.output_form, **{key: _words(item) for key, item in outputs.items()}},
            "input_grad": _gradients(inputs),
            "output_grad": _gradients(outputs.values()),
        }


def shape_and_type(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """Return shape and type of what lies on this rank."""
    local = local_tensor(tensor)
    shape = () if local.is_nested else tuple(local.shape)
    return shape, str(local.dtype).removeprefix("torch.")


def structure_text(modules: Iterable[Seen]) -> str:
    """Return a line for each module."""
    return "\n".join(module.line() for module in modules)


def structure_document(modules: Iterable[Seen]) -> dict[str, Any]:
    """Return the content of `module_struct.json`: the modules that were called, behind the number of their chunk."""
    return {
        f"{module.vpp_stage or 0}:{module.name}": module.document() for module in modules if module.inputs is not None
    }


def _json(tensors: Sequence[Described] | None) -> str | None:
    return None if tensors is None else json.dumps([item.row() for item in tensors], ensure_ascii=False)


def _list_of(tensors: Sequence[Described]) -> str:
    return ", ".join(f"{item.dtype}{list(item.shape)}" for item in tensors)


def _words(item: Described | str) -> str:
    return item if isinstance(item, str) else _size(item.shape, item.dtype)


def _gradients(items: Iterable[Described | str]) -> dict[str, str]:
    listed = list(items)
    words = {
        str(number): _size(*item.grad) if isinstance(item, Described) and item.grad else str(type(None))
        for number, item in enumerate(listed)
    }
    return {"config": f"tuple[{len(listed)}]", **words}


def _size(shape: tuple[int, ...], dtype: str) -> str:
    return f"size={shape}, dtype=torch.{dtype}"
