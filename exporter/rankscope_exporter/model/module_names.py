"""Lists the modules of a model by the names that the user knows, with one name per module."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from rankscope_exporter.model.name_patterns import Targets, target_notices
from rankscope_exporter.model.parameter_names import entry, plain_name


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A callable module with its displayed name (empty for the model itself) and its other names.

    The reference to the module is weak, so that a layer that the training removes is freed.
    """

    name: str
    reference: weakref.ref[nn.Module]
    aliases: tuple[str, ...] = ()
    compiled: bool = False  # part of compiled code, in which no hook is called

    @property
    def module(self) -> nn.Module | None:
        """Return the module; None if it no longer exists."""
        return self.reference()


def named_modules(root: nn.Module) -> tuple[NamedModule, ...]:
    """Return the modules of `root` in the order of definition.

    A wrapper and the module that it wraps have the same name. The wrapped module is returned, because the user wrote
    it. The wrapper of `torch.compile` is an exception: the wrapper is returned, because hooks do not run inside of it.
    """
    under: dict[str, tuple[nn.Module, bool]] = {}
    regions: list[str] = []  # full names of compiled modules
    wrappers: set[str] = set()
    for full, module in root.named_modules(remove_duplicate=False):
        name = plain_name(full)
        compiles = entry(module._modules, "_orig_mod") is not None  # noqa: SLF001 - `__getattr__` may be the user's
        if compiles:
            regions.append(f"{full}._orig_mod" if full else "_orig_mod")
            wrappers.add(name)
        elif getattr(module, "_compiled_call_impl", None) is not None:
            regions.append(full)
        inside = any(f"{full}.".startswith(f"{region}.") or not region for region in regions)
        if compiles or not (inside and name in wrappers):
            under[name] = module, inside
    names: dict[int, list[str]] = {}
    for name, (module, _) in under.items():
        if _can_be_called(module):
            names.setdefault(id(module), []).append(name)
    return tuple(
        NamedModule(own[0], weakref.ref(under[own[0]][0]), tuple(own[1:]), under[own[0]][1]) for own in names.values()
    )


def selected(modules: Iterable[NamedModule], targets: Targets) -> tuple[NamedModule, ...]:
    """Return the modules that `targets` select by their displayed name or another name."""
    return tuple(item for item in modules if targets.selects(item.name, *item.aliases))


def unmatched(modules: Iterable[NamedModule], targets: Targets) -> list[str]:
    """Return a sentence for each target that selects no module.

    The sentence suggests the most similar names of modules.
    """
    return target_notices(targets, (name for item in modules for name in (item.name, *item.aliases)), "module")


def _can_be_called(module: nn.Module) -> bool:
    """Return whether the module has a forward method. A ModuleList has none."""
    return defines_forward(type(module)) or "forward" in module.__dict__


def defines_forward(kind: type[nn.Module]) -> bool:
    """Return whether the class `kind` defines `forward`.

    The attribute `forward` is looked up without a normal attribute access, which fails for a scripted module.
    """
    return inspect.getattr_static(kind, "forward") is not inspect.getattr_static(nn.Module, "forward")
