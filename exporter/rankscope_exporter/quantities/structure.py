"""The structure of the model and the call sites of its modules, seen at one step, into the dataset `modules`.

Hooks keep shapes and names, never a tensor; rows, text and msprobe's JSON are made on the publisher thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Final

import torch

from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.placement import placement_of
from rankscope_exporter.model.module_names import NamedModule, named_modules, selected, unmatched
from rankscope_exporter.model.parameter_names import local_tensor
from rankscope_exporter.model.pytree import Found, Slot, children, received, returned
from rankscope_exporter.process.identity import rank_here
from rankscope_exporter.quantities.base import Hooking, Quantity, QuantityOptions, SamplingGate, Table
from rankscope_exporter.quantities.hook_handles import HookHandles, hook_after, hook_before
from rankscope_exporter.records.host_transfer import Row
from rankscope_exporter.statistics.tensor_access import dtype_name

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
    return shape, dtype_name(local.dtype)


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


MAX_FRAMES: Final = 24
OUTPUT_VARIABLE: Final = "MONITOR_OUTPUT_DIR"
"""Where the existing tool writes; `./monitor_output` without it."""

_OUR_CODE: Final = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH_CODE: Final = f"{Path(torch.__file__).parent}{os.sep}"  # torchvision beside it is the script's


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureOptions(QuantityOptions):
    """When to look, and what to do with it beside storing it."""

    times: int | None = 1
    """One step is enough: a structure seldom changes."""
    stacks: bool = True
    """Also note where each module is called from."""
    print_struct: bool = False
    """Also print it on rank 0, and write `module_struct/rank<r>/module_struct.json` as the existing tool does."""
    output_dir: str | None = None
    """Where that file goes; null is MONITOR_OUTPUT_DIR, else `monitor_output` in the working directory."""

    def __post_init__(self) -> None:
        QuantityOptions.__post_init__(self)
        for name in ("stacks", "print_struct"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is true or false, not {getattr(self, name)!r}")  # noqa: TRY004 - becomes a ConfigError
        if self.output_dir is not None and not (isinstance(self.output_dir, str) and self.output_dir):
            raise ValueError(f"output_dir is a folder, not {self.output_dir!r}")


class Structure(Quantity):
    """One row for each module: its class, what it took and gave at its first call of the step, placement and stack."""

    name: ClassVar[str] = "structure"
    measures_tensors: ClassVar[bool] = False
    options_class: ClassVar[type[QuantityOptions]] = StructureOptions
    of_modules: ClassVar[bool] = True
    options: StructureOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self.text = ""
        """The structure as it was last seen, a line for each module."""
        self._modules: tuple[NamedModule, ...] = ()
        self._seen: dict[str, Seen] = {}
        self._open: set[str] = set()  # modules whose first call is under way
        self._handles = HookHandles(monitored)
        self._tell: Callable[[str], None] = lambda _message: None

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Register on every module of the targets."""
        self._tell = lambda message: hooking.tell(f"structure: {message}")
        hooking.keep(self._handles)
        modules = named_modules(self.monitored.framework.module)
        for sentence in unmatched(modules, self.targets):
            self._tell(sentence)
        self._modules = selected(modules, self.targets)
        for named in self._modules:
            self._follow(named, hooking, gate)

    def _follow(self, named: NamedModule, hooking: Hooking, gate: SamplingGate) -> None:
        def before(_module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            if hooking.in_forward:
                self._called(named, received(args, kwargs), hooking, gate)

        def after(_module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
            if named.name in self._open:
                self._open.remove(named.name)
                self._returned(self._seen[named.name], output, hooking, gate)

        try:
            first = hooking.guarded("structure of inputs", before, gate)
            hook_before(hooking, named, first)
            last = hooking.guarded("structure of outputs", after, gate)
            hook_after(hooking, named, last)
        except (RuntimeError, AttributeError) as error:
            self._tell(f"{named.name}: no hook can be registered ({type(error).__name__})")

    def on_step_begin(self, table: Table) -> None:
        """Begin anew; what this step shows is put together once it is over."""
        self._handles.remove()
        self._open.clear()
        seen = self._seen = dict(self._unseen_modules())
        table.defer("modules", torch.empty(0), lambda _nothing: self._report(list(seen.values())))

    def _unseen_modules(self) -> Iterator[tuple[str, Seen]]:
        for named in self._modules:
            module = named.module
            if module is not None:
                placement, vpp_stage = _placement(module, self.placement), self.monitored.framework.vpp_stage(module)
                yield named.name, Seen(named.name, type(module).__name__, placement, vpp_stage=vpp_stage)

    def on_optimizer_step_end(self, table: Table) -> None:  # noqa: ARG002 - the signature of every moment
        """Let go of tensors that outlive their graph."""
        self._handles.remove()

    def _called(self, named: NamedModule, found: Found, hooking: Hooking, gate: SamplingGate) -> None:
        seen = self._seen.get(named.name)
        if seen is None or seen.inputs is not None:
            return
        self._open.add(named.name)
        seen.took(found)
        if self.options.stacks:
            seen.stack = call_stack(sys._getframe())  # noqa: SLF001 - the only way to look without building a traceback
        self._watch(found, seen.inputs or [], hooking, gate)

    def _returned(self, seen: Seen, output: Any, hooking: Hooking, gate: SamplingGate) -> None:
        found = returned(output)
        seen.gave(output, found)
        self._watch(found, seen.outputs or [], hooking, gate)

    def _watch(self, found: Found, described: Iterable[Described], hooking: Hooking, gate: SamplingGate) -> None:
        if not hooking.grad_enabled:
            return
        for slot, item in zip(found.slots, described, strict=True):
            if slot.tensor.requires_grad:

                def arrived(gradient: torch.Tensor | None, item: Described = item) -> None:
                    if gradient is not None:
                        item.grad = shape_and_type(gradient)

                self._handles.hook(slot.tensor, hooking.guarded("structure of gradients", arrived, gate))

    def _report(self, seen: list[Seen]) -> list[Row]:
        """Return the rows; on the publisher's thread, where files may be written."""
        self.text = structure_text(seen)
        if self.options.print_struct:
            rank = rank_here(os.environ)
            if rank == 0:
                with contextlib.suppress(OSError, ValueError):  # a closed stream
                    sys.stderr.write(f"{self.text}\n")
            self._write(structure_document(seen), rank)
        return [item.row() for item in seen]

    def _write(self, document: Mapping[str, Any], rank: int) -> None:
        folder = self.options.output_dir or os.environ.get(OUTPUT_VARIABLE) or "monitor_output"
        path = Path(folder, "module_struct", f"rank{rank}", "module_struct.json")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_suffix(".tmp")
            beside.write_text(json.dumps(document, indent=4, ensure_ascii=False), encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            self._tell(f"{path} cannot be written: {error.strerror}")


def call_stack(frame: FrameType | None) -> tuple[str, ...]:
    """Return the calls that lead to `frame` as `file:line function`, the outermost first; torch's and ours left out."""
    calls: list[str] = []
    while frame is not None and len(calls) < MAX_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith((_OUR_CODE, _TORCH_CODE, "<frozen ")):
            calls.append(f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return tuple(reversed(calls))


def _placement(module: torch.nn.Module, otherwise: str) -> str | None:
    """Return how the module's own parameters lie on the ranks; None without any."""
    placements = {_lies(parameter, otherwise) for parameter in module.parameters(recurse=False)}
    return ", ".join(sorted(placements)) or None


def _lies(parameter: torch.Tensor, otherwise: str) -> str:
    return placement_of(parameter) if hasattr(parameter, "placements") else otherwise
