"""Quantity `structure`: the modules of the model and the call stacks of their calls, for the dataset `modules`.

Hooks store shapes and names, never a tensor. The publisher thread makes the rows, the text and the JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, ClassVar, Final

import torch

from rankscope_exporter.adapters.base import Framework
from rankscope_exporter.adapters.hook_context import Hook, HookContext
from rankscope_exporter.adapters.parameter_names import NamedModule, local_tensor
from rankscope_exporter.adapters.process_group import rank_here
from rankscope_exporter.adapters.pytree import Found, Slot, children, received, returned
from rankscope_exporter.measure.kernels.tensor_access import dtype_name
from rankscope_exporter.measure.quantities.base import QuantityOptions, SamplingGate
from rankscope_exporter.measure.quantities.module_quantity import ModuleQuantity, TensorHooks
from rankscope_exporter.measure.table import Table
from rankscope_exporter.monitors.flight_recorder.poller import script_frames
from rankscope_exporter.process.validation import at_least, some_text
from rankscope_exporter.publish.sinks.files import DEFAULT_FOLDER, FOLDER_VARIABLE, create
from rankscope_exporter.records.record import Row

MODEL: Final = "(the model)"


@dataclass(slots=True)
class Described:
    """An input or output tensor of a module: its path, shape and dtype, and the shape and dtype of its gradient."""

    path: str
    index: int | None
    shape: tuple[int, ...]
    dtype: str
    grad: tuple[tuple[int, ...], str] | None = None

    @classmethod
    def of(cls, slot: Slot) -> Described:
        """Return path, shape and dtype of the tensor in `slot`, a place among the inputs or outputs of a module."""
        return cls(slot.path, slot.index, *shape_and_type(slot.tensor))

    def row(self) -> dict[str, Any]:
        """Return one element of the column `inputs` or `outputs`: shape, dtype, place, and dtype of the gradient."""
        row: dict[str, Any] = {"shape": list(self.shape), "dtype": self.dtype}
        if self.index is not None:
            row |= {"index": self.index, "path": self.path}
        return row | ({"grad": self.grad[1]} if self.grad else {})


@dataclass(slots=True)
class ModuleRecord:
    """A module, with the inputs and outputs of its first call in the step.

    `inputs` and `outputs` are None if the module was not called.
    """

    name: str
    class_name: str
    placement: str | None = None
    inputs: list[Described] | None = None
    outputs: list[Described] | None = None
    output_form: str = "tensor"
    output_parts: dict[str, Described | str] = field(default_factory=dict)  # only the top level, by position or name
    stack: tuple[str, ...] = ()
    vpp_stage: int | None = None

    def note_output(self, output: Any, found: Found) -> None:
        """Store the shapes and dtypes of the tensors in the output of the module's first call."""
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
        """Return the row of the dataset `modules` for this module."""
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
        """Return a line of text with the name, class, inputs and outputs of the module."""
        if self.inputs is None:
            return f"{self.name or MODEL}: {self.class_name}, not called"
        outputs = "nothing" if self.outputs is None else _list_of(self.outputs) or "no tensor"
        return f"{self.name or MODEL}: {self.class_name}({_list_of(self.inputs)}) -> {outputs}"

    def document(self) -> dict[str, Any]:
        """Return the inputs, outputs and gradients in the format of the file `module_struct.json`."""
        inputs = self.inputs or []
        outputs = self.output_parts
        return {
            "input": {"config": f"list[{len(inputs)}]", **{str(i): _text(item) for i, item in enumerate(inputs)}},
            "output": {"config": self.output_form, **{key: _text(item) for key, item in outputs.items()}},
            "input_grad": _gradients(inputs),
            "output_grad": _gradients(outputs.values()),
        }


def shape_and_type(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """Return the shape and dtype of this rank's part of a tensor. The shape of a nested tensor is ()."""
    local = local_tensor(tensor)
    shape = () if local.is_nested else tuple(local.shape)
    return shape, dtype_name(local.dtype)


def _json(tensors: Sequence[Described] | None) -> str | None:
    return None if tensors is None else json.dumps([item.row() for item in tensors], ensure_ascii=False)


def _list_of(tensors: Sequence[Described]) -> str:
    return ", ".join(f"{item.dtype}{list(item.shape)}" for item in tensors)


def _text(item: Described | str) -> str:
    return item if isinstance(item, str) else _size(item.shape, item.dtype)


def _gradients(items: Iterable[Described | str]) -> dict[str, str]:
    listed = list(items)
    texts = {
        str(number): _size(*item.grad) if isinstance(item, Described) and item.grad else str(type(None))
        for number, item in enumerate(listed)
    }
    return {"config": f"tuple[{len(listed)}]", **texts}


def _size(shape: tuple[int, ...], dtype: str) -> str:
    return f"size={shape}, dtype=torch.{dtype}"


MAX_FRAMES: Final = 24
STRUCTURE_FILE: Final = "module_struct.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureOptions(QuantityOptions):
    """Options of the quantity `structure`: the steps to sample, and the output of the structure as text and file."""

    times: Annotated[int, at_least(0)] | None = 1
    """Number of sampled steps. One step is enough, because the structure of a model seldom changes."""
    stacks: bool = True
    """Also record the call stack of the first call of each module."""
    print_struct: bool = False
    """Also print the structure on rank 0, and write `module_struct/rank<r>/module_struct.json`."""
    output_dir: Annotated[str, some_text("the path of a folder")] | None = None
    """Folder of the file `module_struct.json`.

    Null means the environment variable MONITOR_OUTPUT_DIR; without it, `monitor_output` in the working directory.
    """


class Structure(ModuleQuantity):
    """Writes one row per module: class, placement, call stack, and inputs and outputs of its first call in the step."""

    name: ClassVar[str] = "structure"
    options_class: ClassVar[type[QuantityOptions]] = StructureOptions
    options: StructureOptions

    text = ""
    """Structure of the model at the latest sampled step, as text with one line per module."""

    def install(self, hooking: HookContext, gate: SamplingGate) -> None:
        self._modules: list[NamedModule] = []
        self._records: dict[str, ModuleRecord] = {}
        self._handles = TensorHooks(self.monitored)
        super().install(hooking, gate)
        gate.keep(self._handles)
        self._notes.report(self.tell)

    def _follow(self, named: NamedModule) -> None:
        def before(_module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            if self._hooking.in_forward:
                self._begins(named, received(args, kwargs))

        def after(_module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
            record = self._records.get(named.name)
            if record is not None and record.inputs is not None and record.outputs is None:
                self._ended(record, output)

        self._modules.append(named)
        self._register(named, "structure of inputs", before, before=True)
        self._register(named, "structure of outputs", after)

    def on_step_begin(self, table: Table) -> None:
        self._handles.remove()
        framework = self.monitored.framework
        records = self._records = {}
        for named in self._modules:
            if (module := named.module) is not None:
                placement, vpp_stage = _placement(module, framework), framework.vpp_stage(module)
                records[named.name] = ModuleRecord(named.name, type(module).__name__, placement, vpp_stage=vpp_stage)
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")  # a script may have set bfloat16 as default type
        table.defer("modules", nothing, lambda _nothing: self._rows(list(records.values())))

    def on_forward_failed(self, table: Table) -> None:
        if self._hooking.micro_step == 0:
            table.withdraw("modules")
            self.on_step_begin(table)

    def on_optimizer_step_end(self, table: Table) -> None:  # noqa: ARG002 - the signature of every event
        self._handles.remove()  # hooks on leaf tensors outlive the graph

    def _begins(self, named: NamedModule, found: Found) -> None:
        record = self._records.get(named.name)
        if record is None or record.inputs is not None:
            return
        record.inputs = [Described.of(slot) for slot in found.slots]
        if self.options.stacks:
            record.stack = call_stack(sys._getframe())  # noqa: SLF001 - the only way that builds no traceback
        self._watch(found, record.inputs)

    def _ended(self, record: ModuleRecord, output: Any) -> None:
        found = returned(output)
        record.note_output(output, found)
        self._watch(found, record.outputs or [])

    def _watch(self, found: Found, described: Iterable[Described]) -> None:
        """Register gradient hooks on the tensors in `found`, to store the shapes and dtypes of their gradients."""
        if not self._hooking.grad_enabled:
            return
        for slot, item in zip(found.slots, described, strict=True):
            if slot.tensor.requires_grad:
                note = functools.partial(_note_gradient, item)
                hook = Hook(self._hooking, "structure of gradients", note, gate=self._gate)
                self._handles.hook(slot.tensor, hook)

    def _rows(self, records: list[ModuleRecord]) -> list[Row]:
        """Return the rows of all modules, and print and write the structure if this is configured.

        Runs on the publisher thread.
        """
        self.text = "\n".join(record.line() for record in records)
        if self.options.print_struct:
            rank = rank_here(os.environ)
            if rank == 0 and sys.stderr is not None:  # None: the process was started with standard error closed
                with contextlib.suppress(OSError, ValueError):  # a closed stream
                    sys.stderr.write(f"{self.text}\n")
            called = (record for record in records if record.inputs is not None)
            self._write({f"{record.vpp_stage or 0}:{record.name}": record.document() for record in called}, rank)
        return [item.row() for item in records]

    def _write(self, document: Mapping[str, Any], rank: int) -> None:
        """Write `module_struct.json`: the called modules by chunk number and name."""
        folder = self.options.output_dir or os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER
        path = Path(folder, "module_struct", f"rank{rank}", STRUCTURE_FILE)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            create(path, json.dumps(document, indent=4, ensure_ascii=False).encode())
        except OSError as error:
            self.tell(f"{path} cannot be written: {error.strerror}")


def _note_gradient(item: Described, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        item.grad = shape_and_type(gradient)


def call_stack(frame: FrameType | None) -> tuple[str, ...]:
    """Return the calls that lead to `frame`, outermost first, as texts of the form `file:line function`.

    Frames of torch and Rankscope are left out.
    """
    frames = reversed(script_frames(frame, MAX_FRAMES))
    return tuple(f"{item.f_code.co_filename}:{item.f_lineno} {item.f_code.co_qualname}" for item in frames)


def _placement(module: torch.nn.Module, framework: Framework) -> str | None:
    """Return the placements of the parameters that the module itself holds, as text; None if it holds none."""
    placements = {framework.layout(parameter).placement for parameter in module.parameters(recurse=False)}
    return ", ".join(sorted(placements)) or None
