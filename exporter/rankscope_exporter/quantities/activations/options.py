"""What `activations` can be told: which modules, which of their tensors. Checked at construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankscope_exporter.model.name_patterns import Targets
from rankscope_exporter.model.pytree import Specs, parse_specs
from rankscope_exporter.quantities.base import QuantityOptions

_SWITCHES = ("inputs", "outputs", "input_grads", "output_grads", "forward_only", "backward_only", "all_modules")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationOptions(QuantityOptions):
    """What of which modules. `targets` may also be a table, which stands for its keys as targets and for `parts`."""

    inputs: bool = True
    outputs: bool = True
    input_grads: bool = True
    output_grads: bool = True
    forward_only: bool = False
    """No gradients."""
    backward_only: bool = False
    """Gradients alone."""
    all_modules: bool = False
    """Modules that no target selects are measured whole; the targets say what is measured of the others."""
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By target, what of a module is meant: {"head": {"input": "tuple[2]:0", "output": "tensor"}}. What is not named
    there is not measured; a target without an entry, or with an empty one, is measured whole."""

    def __post_init__(self) -> None:
        targets: Any = self.targets
        if isinstance(targets, Mapping):
            object.__setattr__(self, "parts", {**targets, **self.parts})
            object.__setattr__(self, "targets", tuple(targets) or ("*",))
        QuantityOptions.__post_init__(self)
        if not isinstance(self.parts, Mapping):
            raise ValueError(f"parts is a table of tables by target, not {self.parts!r}")  # noqa: TRY004 - becomes a ConfigError
        for target, described in self.parts.items():
            parse_specs(target, described)
            if target not in self.targets:
                raise ValueError(f"parts[{target!r}] is of no target; add it to targets")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is true or false, not {getattr(self, name)!r}")  # noqa: TRY004 - see above
        if not (self.inputs or self.outputs or self.input_grads or self.output_grads):
            raise ValueError("inputs, outputs, input_grads and output_grads are all false: nothing would be measured")

    @property
    def objects(self) -> frozenset[str]:
        """Return which of a module's objects are measured at all, in the words of object_specs.OBJECTS."""
        forward, backward = not self.backward_only, not self.forward_only
        chosen = {
            "input": self.inputs and forward,
            "output": self.outputs and forward,
            "input_grad": self.input_grads and backward,
            "output_grad": self.output_grads and backward,
        }
        return frozenset(name for name, wanted in chosen.items() if wanted)

    def specs_of(self, *names: str) -> Specs:
        """Return what the first target that selects one of the `names` of a module says of it; empty means all."""
        for target, described in self.parts.items():
            if Targets((target,)).selects(*names):
                return parse_specs(target, described)
        return {}
