"""Train while one name of torch after another is absent for the exporter, and print one line of JSON for each name.

Names are all private names in the source of the exporter that it reads while it watches a model. Those that its modules
read at their import are absent together. Other processes train without the exporter, or without torch.distributed.
"""

import ast
import functools
import importlib
import json
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state
from torch.nn.parallel import DistributedDataParallel

SOURCE = Path(__file__).parents[3] / "exporter" / "rankscope_exporter" / "adapters" / "torch_private.py"
READERS = frozenset(
    {"getattr", "hasattr", "entry", "torch_name", "loaded", "attrgetter", "methodcaller", "partial", "_optional"}
)
"""Functions that read a name which they receive as text, or make such functions."""
OF_ALL = frozenset({"_C"})  # without torch._C, there is no torch
ALSO = frozenset({"fsdp_params", "sharded_param", "unsharded_accumulated_grad", "mp_policy", "reduce_grads"})
"""Public names of private objects of FSDP2."""
STEPS = 3


AT_IMPORT: set[str] = set()
"""Last parts of the names that modules read at their import."""


def private_names() -> Iterator[str]:
    """Yield the private names in the module that alone reads private names of torch, and add to `AT_IMPORT`."""
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        for name in _read(node):
            if name.startswith("_") and not name.startswith("__") and name not in OF_ALL:
                yield name


def _read(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr
    function = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
    if function in READERS:
        for text in [*node.args, *(keyword.value for keyword in node.keywords)]:
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and " " not in text.value:
                name = text.value.rpartition(".")[2]
                if function.startswith("torch_") and text.value.startswith("torch."):
                    AT_IMPORT.add(name)
                yield name


NOWHERE = object()
absent: set[str] = set()
asked: set[str] = set()
"""Names that the exporter has read, or tried to read."""


def _is_absent(name: str) -> bool:
    if name not in NAMES:
        return False
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "pkgutil":
        frame = frame.f_back
    if frame is None or not frame.f_globals.get("__name__", "").startswith("rankscope_exporter"):
        return False
    asked.add(name)
    return name in absent


class Attribute:
    """An attribute of a class, which is absent for the exporter while its name is in `absent`."""

    def __init__(self, name: str, found: Any) -> None:
        self.name, self.found = name, found

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if _is_absent(self.name):
            raise AttributeError(
                f"no attribute {self.name}", name=self.name, obj=owner if instance is None else instance
            )
        if instance is not None and self.name in vars(instance) and not hasattr(type(self.found), "__set__"):
            return vars(instance)[self.name]
        if self.found is NOWHERE:
            raise AttributeError(f"no attribute {self.name}", name=self.name, obj=instance)
        return self.found.__get__(instance, owner) if hasattr(type(self.found), "__get__") else self.found

    def __set__(self, instance: Any, value: Any) -> None:
        if hasattr(type(self.found), "__set__"):
            self.found.__set__(instance, value)
        else:
            vars(instance)[self.name] = value

    def __delete__(self, instance: Any) -> None:
        del vars(instance)[self.name]


def hide() -> None:
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"]:
        if isinstance(module, types.ModuleType) and type(module) is types.ModuleType:
            module.__class__ = Module
    for kind in (
        *(torch.Tensor, nn.Module, torch.autograd.Variable, torch.optim.Optimizer, torch._ops.OpOverload),
        *(_fsdp_state.FSDPState, _fsdp_param.FSDPParam, _fsdp_param_group.FSDPParamGroup),
        *(FullyShardedDataParallel, DistributedDataParallel),
    ):
        for name in NAMES:
            found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), NOWHERE)
            if found is not NOWHERE or kind is not torch.autograd.Variable:
                setattr(kind, name, Attribute(name, found))


class Module(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        if _is_absent(name):
            raise AttributeError(f"no attribute {name}", name=name, obj=self)
        return super().__getattribute__(name)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage() + (" with a traceback" if record.exc_info else ""))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def ddp() -> nn.Module:
    return DistributedDataParallel(plain())


def fsdp1() -> nn.Module:
    return FullyShardedDataParallel(plain(), use_orig_params=True, device_id=torch.device("cpu"))


def fsdp2() -> nn.Module:
    return fully_shard(plain(), mesh=dist.init_device_mesh("cpu", (1,)))


WRAPPERS = (plain, ddp, fsdp1, fsdp2)


def trained(wrap: Any, *, watches: bool) -> tuple[bytes, list[int]]:
    """Return the bits of the parameters after training, and the steps whose loss the monitor published."""
    model = wrap()
    optimizer = torch.optim.Adam(model.parameters())
    monitor: Any = None
    if watches:
        import rankscope

        quantities = ("gradients", "parameters", "optimizer_state", "micro_gradients", "activations")
        config = rankscope.MonitorConfig(quantities=quantities, console=False, exit_wait_seconds=0, statistics="torch")
        monitor = rankscope.Monitor(config, total_steps=STEPS).attach(model, optimizer)
        with monitor.phase("evaluation"):
            monitor.phase("checkpoint")(int)(3)
    for step in range(STEPS):
        loss = model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if watches:
            monitor.log(loss=loss, tokens=8)
    bits = b"".join(getattr(item, "_local_tensor", item).detach().numpy().tobytes() for item in model.parameters())
    steps: list[int] = []
    if watches:
        list(monitor.current("grad_reduced"))
        session = monitor._session if hasattr(type(monitor), "_session") else None
        monitor.detach()
        records = session.channel.ring.after(-1, 1 << 30).records if session is not None else ()
        steps = [record.step for record in records for scalar in record.scalars if scalar.name == "loss"]
    return bits, steps


@functools.cache
def unwatched(wrap: Any) -> bytes:
    return trained(wrap, watches=False)[0]


def report(name: str, wrap: Any, lines: Lines) -> None:
    bits, steps = trained(wrap, watches=True)
    expected = unwatched(wrap)
    one = json.dumps({"name": name, "is_equal": bits == expected, "steps": steps, "lines": lines.texts})
    print(f"{one}\n", end="", flush=True)  # one write: other processes print, too
    lines.texts = []


def without_distributed() -> None:
    for name in [name for name in vars(torch._C) if "c10d" in name]:
        delattr(torch._C, name)
    for name in [name for name in sys.modules if name.startswith("torch.distributed")]:
        del sys.modules[name]
    importlib.import_module("torch.distributed")
    assert not torch.distributed.is_available()


def without_package(error: ImportError) -> None:
    class Finder:
        def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
            if name == error.name:
                raise error

    for name in [name for name in sys.modules if name.partition(".")[0] == error.name]:
        del sys.modules[name]
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]  # the method that is called


OLD_NUMPY = ImportError("pyarrow requires NumPy 2.0 or newer, found 1.26.4", name="pyarrow")
MISSING = ModuleNotFoundError("No module named 'prometheus_client'", name="prometheus_client")
NAMES = {*private_names(), *AT_IMPORT, *ALSO}
INSTALLATIONS: dict[str, Callable[[], object]] = {
    "old pyarrow": lambda: without_package(OLD_NUMPY),
    "no prometheus_client": lambda: without_package(MISSING),
    "no distributed": without_distributed,
    "import": lambda: (hide(), absent.update(AT_IMPORT)),
}
"""Changes of the installation, each in a separate process, before the exporter is imported."""
done: set[str] = set()


def main() -> None:
    torch.set_num_threads(1)
    lines = Lines()
    logging.getLogger("rankscope").addHandler(lines)
    logging.getLogger("rankscope").propagate = False
    children = []
    for name, prepare in INSTALLATIONS.items():
        children.append(os.fork())
        if not children[-1]:
            prepare()
            report(name, plain, lines)
            os._exit(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    hide()
    for wrap in WRAPPERS:
        asked.clear()
        report(f"none, {wrap.__name__}", wrap, lines)
        for name in sorted(asked - AT_IMPORT - done):
            done.add(name)
            absent.add(name)
            report(name, wrap, lines)
            absent.clear()
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
