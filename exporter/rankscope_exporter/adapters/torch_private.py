"""Private names of torch, one function for each fact: no other module of the exporter reads a private name of torch.

A fact that loops and hooks need is an `attrgetter`, which runs without a frame of Python. Remarks name the releases, of
2.4 to 2.15, that are known to lack a name. Names that a release may lack are read by `torch_name` when this module is
imported. If another name is missing, the error boundary of the monitor reports it (`process.errors`), and training
continues without the part that needs it. Private names of DeepSpeed and Megatron are in their adapters.
"""

# ruff: noqa: SLF001 - see above

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from operator import attrgetter, methodcaller
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.autograd import Variable, forward_ad
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: PLC0414 - exported

from rankscope_exporter.adapters.placement import loaded
from rankscope_exporter.process.errors import log


def torch_name(path: str, absent: Any, without: str = "", *, earlier: str = "") -> Any:
    """Return the object with the full name `path`, or with its full name `earlier` in older releases, else `absent`.

    If torch has neither, log `without`, a sentence about what the monitor does not do; log nothing if it is empty.
    """
    for name in filter(None, (path, earlier)):
        with suppress(AttributeError, ImportError):
            return pkgutil.resolve_name(name)
    if without:
        log.warning("torch %s has no %s: %s; training continues", torch.__version__, path, without)
    return absent


def _optional(name: str) -> Callable[[Any], Any]:
    """Return a function that returns the attribute `name` of an object; None without it."""
    return lambda item: getattr(item, name, None)


def _none(*_: Any) -> None:
    """Replace a function that this torch lacks: no mode, tracer or transform is active."""


# Modules. The dictionaries themselves are read: a property or `__getattr__` would run code of the user.

parameters_of: Final[Callable[[torch.nn.Module], Any]] = attrgetter("_parameters")
"""Return the dictionary of a module's own parameters. A scripted module has a table that is no dictionary."""
submodules_of: Final[Callable[[torch.nn.Module], Any]] = attrgetter("_modules")
"""Return the dictionary of the modules directly inside of a module; see `parameters_of`."""
buffers_of: Final[Callable[[torch.nn.Module], Any]] = attrgetter("_buffers")
"""Return the dictionary of a module's own buffers, which also has entries with the value None."""
forward_pre_hooks: Final[Callable[[torch.nn.Module], Mapping[int, Any]]] = attrgetter("_forward_pre_hooks")
"""Return the hooks that torch calls before the forward pass of a module. Other code may replace the dictionary."""
forward_hooks: Final[Callable[[torch.nn.Module], Mapping[int, Any]]] = attrgetter("_forward_hooks")
"""Return the hooks that torch calls after the forward pass of a module; see `forward_pre_hooks`."""

ORIGINAL: Final = "_orig_mod"
"""Name under which the wrapper of `torch.compile` contains the compiled module."""
FSDP_WRAPPED: Final = "_fsdp_wrapped_module"
"""Name under which FSDP1 contains the wrapped module."""
CALLED: Final = "_forward_module"
"""Name under which wrappers of Fabric, and others like them, contain the module that they call."""
WRAPPER_LEVELS: Final = frozenset({FSDP_WRAPPED, ORIGINAL, CALLED, "_checkpoint_wrapped_module"})
"""Levels that FSDP1, torch.compile, Fabric and activation checkpointing insert into the name of a parameter."""
CONVOLUTION: Final = torch_name("torch.nn.modules.conv._ConvNd", ())
"""Base class of all convolutions."""


def entry(table: Any, key: str) -> Any:
    """Return the value of `key` in `table`, the result of `parameters_of` or `submodules_of`; None without it.

    No method of a subclass of `dict` is called: DeepSpeed's table gathers the parameter from all ranks when it is
    read during a forward pass, also when another thread reads it.
    """
    if isinstance(table, dict):
        return dict.get(table, key)
    return table[key] if key in table else None  # noqa: SIM401 - a scripted module's tables have no `get`


def held_modules(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return `submodules_of(module)` without a call of its code; empty before its constructor has run."""
    return vars(module).get("_modules") or {}


def compiled_module(module: torch.nn.Module) -> Any:
    """Return the module that the wrapper of `torch.compile` contains; None if `module` is no such wrapper."""
    return entry(submodules_of(module), ORIGINAL)


compiled_call: Final = _optional("_compiled_call_impl")
"""Return what torch calls instead of the module after `module.compile()`, which adds no wrapper; None before."""


# Tensors.

version: Final[Callable[[torch.Tensor], int]] = attrgetter("_version")
"""Return the number of in-place changes of a tensor that is not of the inference mode."""
is_view: Final[Callable[[torch.Tensor], bool]] = methodcaller("_is_view")
gradient_hooks: Final[Callable[[torch.Tensor], Any]] = attrgetter("_backward_hooks")
"""Return the hooks that `Tensor.register_hook` has registered on a tensor; None if it never had one."""
accumulated_hooks: Final[Callable[[torch.Tensor], Any]] = attrgetter("_post_accumulate_grad_hooks")
"""Return the hooks of `Tensor.register_post_accumulate_grad_hook`; None if the tensor never had one."""

GRADIENT: Final = "_backward_hooks"
ACCUMULATED: Final = "_post_accumulate_grad_hooks"
"""Names of the attributes that `gradient_hooks` and `accumulated_hooks` read, to write them."""

_HAS_ADDRESS: Final = torch_name("torch.Tensor._cdata", None) is not None
tensor_address: Final[Callable[[torch.Tensor], int]] = attrgetter("_cdata") if _HAS_ADDRESS else lambda _tensor: 0
"""Return the address of the tensor behind its Python object, which changes in `torch.utils.swap_tensors`."""


without_tensor_functions: Final = torch_name("torch._C.DisableTorchFunctionSubclass", nullcontext)
"""Context manager in which no `__torch_function__` of a subclass of Tensor is called."""


def in_place_changes(tensor: torch.Tensor) -> int | None:
    """Return the number of in-place changes of a tensor; None for one of the inference mode, which has no number."""
    return None if tensor.is_inference() else version(tensor)


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each tensor in `sources` to the tensor at its position in `targets` by one operation."""
    torch._foreach_copy_(targets, sources)


# Autograd.

autograd_engine: Final = partial(attrgetter("_execution_engine"), Variable)
"""Return the engine that runs backward passes. Its `queue_callback` registers a callback for the end of a pass."""
NO_PASS: Final = -1
current_pass: Final = torch_name(
    "torch._C._current_graph_task_id", lambda: NO_PASS, "gradients are read when the optimizer steps"
)
"""Return the number of the backward pass of this thread, nested passes included; NO_PASS if none."""

saved_causality: Final = _optional("_saved_is_causal")
"""Return the argument `is_causal` of the attention that has this node in the graph; no bool for any other node."""


def saves_no_mask(node: Any) -> bool:
    """Return whether an attention had no mask. A saved tensor with a hook is not read, as the hook may compute."""
    names = {"_saved_attn_mask", "_saved_attn_bias"} & set(dir(node))
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)(True)
    return not names or (hooks is None and all(getattr(node, name) is None for name in names))


# Modes, tracers, transforms and compilers.

_STACKED: Final = "modes of the script remain active in hooks"
_UNSEEN: Final = "hooks do not recognize that a tracer or transform runs"
_UNREAD: Final = "logged tensors of torch.func are not read"

dispatch_modes: Final = torch_name("torch._C._len_torch_dispatch_stack", _none, _UNSEEN)
"""Return the number of dispatch modes that are active on this thread."""
infra_mode: Final = torch_name("torch._C._get_dispatch_mode", _none, _UNSEEN)
"""Return the active mode of a tracer by its key, one of INFRA_KEYS; None if it is not active."""
INFRA_KEYS: Final = (
    torch_name("torch._C._TorchDispatchModeKey.PROXY", None, _UNSEEN),
    torch_name("torch._C._TorchDispatchModeKey.FAKE", None, _UNSEEN),
    torch_name("torch._C._TorchDispatchModeKey.FUNCTIONAL", None, _UNSEEN),
)
pre_dispatch_modes: Final = torch_name("torch._ops._len_torch_dispatch_stack_pre_dispatch", _none, _UNSEEN)
"""Return the number of modes of `torch.export` that are active on this thread."""
without_modes: Final = torch_name("torch.utils._python_dispatch._disable_current_modes", nullcontext, _STACKED)
"""Return a context manager in which no dispatch mode is active."""
function_modes: Final = torch_name("torch._C._len_torch_function_stack", _none, _STACKED)
"""Return the number of function modes that are active on this thread."""
pop_function_mode: Final = torch_name("torch._C._pop_torch_function_stack", None, _STACKED)
push_function_mode: Final = torch_name("torch._C._push_on_torch_function_stack", None, _STACKED)
jit_state: Final = torch_name("torch._C._get_tracing_state", _none, _UNSEEN)
"""Return the state of `torch.jit.trace` on this thread; None if it does not run."""
fx_traces: Final = torch_name(
    "torch.fx._symbolic_trace.is_fx_symbolic_tracing", _none, _UNSEEN, earlier="torch.fx._symbolic_trace.is_fx_tracing"
)
"""Return whether `torch.fx` traces. Releases with the newer name also have the earlier one, which warns there."""
current_transform: Final = torch_name("torch._C._functorch.peek_interpreter_stack", _none, _UNSEEN)
"""Return the innermost transform of `torch.func` on this thread; None if none runs."""
torch_name("torch.autograd.forward_ad._current_level", -1, _UNSEEN)  # a variable, which is read at each call
forward_mode_level: Final = partial(getattr, forward_ad, "_current_level", -1)
"""Return the level of forward-mode differentiation; -1 outside of it."""
is_wrapped: Final = torch_name("torch._C._functorch.is_functorch_wrapped_tensor", _none, _UNREAD)
"""Return whether a tensor is the wrapper of a transform of `torch.func`, which has no memory."""
unwrapped_tensor: Final = torch_name("torch._C._functorch.get_unwrapped", torch.detach, _UNREAD)


def without_transforms() -> Any:
    """Return a context manager in which no transform of `torch.func` is active; call it only while one is."""
    path = "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack"  # a transform has loaded the module
    return pkgutil.resolve_name(path)()


def _frame_skipper() -> Any:
    skip = torch_name("torch._C._dynamo.eval_frame._FrameAction.SKIP", None)
    strategy = torch_name("torch._C._dynamo.eval_frame._FrameExecStrategy", None)
    set_strategy = torch_name("torch._C._dynamo.eval_frame.set_code_exec_strategy", None)
    if None in (skip, strategy, set_strategy):
        return torch_name(
            "torch._C._dynamo.eval_frame.skip_code", _none, "Dynamo may compile hooks that C++ code calls"
        )
    skipped = strategy(skip, skip)
    return lambda code: set_strategy(code, skipped)


skip_frames: Final = _frame_skipper()
"""Exclude a code object from compilation, and since torch 2.7 also the functions that its frames call."""


def mark_constant(function: Any) -> None:
    """Mark `function` so that Dynamo calls it while it compiles, and takes the result for a constant.

    `torch.compiler.assume_constant_result` does the same, but loads the compiler.
    """
    function._dynamo_marked_constant = True


def is_compiler_loaded() -> bool:
    """Return whether Dynamo is imported, which takes 2 s; if not, nothing is compiled."""
    return "torch._dynamo" in sys.modules


STACK_READER: Final = "torch._inductor.codecache"
"""Module that torch imports when a flight recorder writes stacks."""


# Devices and operations.

is_cuda_initialized: Final = partial(getattr, torch.cuda, "_initialized", True)
"""Return False only if `torch.cuda.is_initialized()` does, in a tenth of its time."""


def has_primary_context(device: int) -> bool:
    """Return whether this process has a context on a CUDA device; True in builds that have no such function."""
    return bool(getattr(torch._C, "_cuda_hasPrimaryContext", lambda _device: True)(device))


tree_map: Final = torch_name("torch.utils._pytree.tree_map", None)
tree_flatten_with_path: Final = torch_name("torch.utils._pytree.tree_flatten_with_path", None)
nested_tensor_class: Final = partial(loaded, "torch.nested._internal.nested_tensor", "NestedTensor")
"""Return the class of jagged tensors for isinstance()."""


# Optimizers.

_STEP: Final = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
_CALL: Final = torch.nn.Module._call_impl.__code__
_STATE_DICT: Final = "torch.distributed.checkpoint.state_dict"


def running_optimizer_steps() -> int:
    """Return the number of calls of `step` of torch optimizers that run on this thread, one inside of the other."""
    return sum(frame.f_code is _STEP for frame in _stack())


def has_step_hooks(optimizer: Any) -> bool:
    """Return whether an object is a torch optimizer that its class has constructed by `Optimizer.__init__`."""
    return isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer)


def makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` steps without an effect, to create its state for a checkpoint.

    torch sets all gradients and learning rates to 0 for this step.
    """
    rates = (group.get("lr") for group in optimizer.param_groups)
    if not all(isinstance(rate, torch.Tensor) or rate == 0 for rate in rates):  # a tensor may be on a device
        return False
    return any(frame.f_globals.get("__name__") == _STATE_DICT for frame in _stack())


def running_calls(modules: Sequence[torch.nn.Module], thread: int) -> int:
    """Return the number of calls of these modules that run on a thread, one inside of the other."""
    called = [frame.f_locals.get("self") for frame in _stack(thread) if frame.f_code is _CALL]
    return sum(any(item is module for module in modules) for item in called)


def _stack(thread: int | None = None) -> Iterator[FrameType]:
    frame = sys._getframe(2) if thread is None else sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


# DDP, FSDP1, FSDP2 and pipelines.

active_ddp: Final = torch_name("torch.nn.parallel.DistributedDataParallel._get_active_ddp_module", _none)
"""Function that returns the DDP module whose forward pass runs; None outside of one."""
comm_hooks: Final = attrgetter("_comm_hooks")
"""Return the communication hooks that the user has registered on a model in DDP."""

flat_handle: Final = attrgetter("_handle")
"""Return the object that manages the parameters of an FSDP1 unit; None if it has none."""
flat_parameter: Final = attrgetter("_handle.flat_param")
"""Return the flat parameter of an FSDP1 unit with parameters."""
flat_views: Final = attrgetter("_params")
"""Return the parameters in a flat parameter; None with `use_orig_params=False`."""
flat_infos: Final = attrgetter("_param_infos")
"""Return `module`, `module_name` and `param_name` of each parameter in a flat parameter."""
flat_shapes: Final = attrgetter("_shapes")
"""Return the shape of each whole parameter in a flat parameter."""
shared_infos: Final = attrgetter("_shared_param_infos")
"""Return the further names of parameters in a flat parameter; `prim_module` and `prim_param_name` are the first."""
reduces_gradients: Final = attrgetter("_sync_gradients")
"""Return whether an FSDP1 unit reduces gradients in the backward pass, which `no_sync()` delays."""
inter_node_group: Final = _optional("_inter_node_pg")
"""Return the process group over which an FSDP1 unit is replicated; None without hybrid sharding."""

fsdp2_state: Final = methodcaller("_get_fsdp_state")


def parameter_groups(module: Any) -> Iterable[Any]:
    """Return the parameter groups of a module of FSDP2. Before torch 2.12, a module has one group or None."""
    state = fsdp2_state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    return filter(None, (state._fsdp_param_group,)) if groups is None else groups


def mixed_precision_policy(module: Any) -> Any:
    """Return the `MixedPrecisionPolicy` of a module of FSDP2."""
    return getattr(fsdp2_state(module), "_mp_policy", None)


gathered_parameter: Final = _optional("_unsharded_param")
"""Return the gathered parameter of FSDP2's internal object for a parameter; None before the first forward pass."""
gathered_shape: Final = _optional("_orig_size")
"""Return the shape of the gathered parameter of FSDP2's internal object for a parameter."""

SHAPE_INFERENCE: Final = ("_forward_metadata_inference", "_backward_metadata_inference")
"""Methods of a pipeline stage that run forward and backward on uninitialized memory, before the first step."""


def is_stage(model: Any) -> bool:
    """Return whether `model` is a stage of a pipeline instead of a module."""
    return isinstance(model, loaded("torch.distributed.pipelining.stage", "_PipelineStageBase"))


# Process groups and flight recorders.


def default_store() -> Any:
    """Return the key-value store of the default process group. Another access would open another port."""
    return dist.distributed_c10d._get_default_store()


def group_names() -> Mapping[Any, str]:
    """Return the id of each process group of this rank."""
    return getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", None) or {}


def coalescing_groups() -> Mapping[Any, Any]:
    """Return the process groups for which torch now collects calls, to execute them together later."""
    return getattr(getattr(dist.distributed_c10d, "_world", None), "pg_coalesce_state", None) or {}


c10d: Final = partial(getattr, torch._C, "_distributed_c10d", None)
"""Return the module that implements process groups; None in a build without them."""


def dump_function(record: str) -> Any:
    """Return the function that returns a flight record; None if this torch lacks it.

    `record` is "fr_trace" (Gloo, since torch 2.8) or "nccl_trace" (in builds with NCCL or RCCL), and the same with the
    ending "_json".
    """
    return getattr(c10d(), f"_dump_{record}", None)


def handler_names() -> Sequence[str]:
    """Return the names of the handlers of torch's worker server; none before torch 2.5."""
    return getattr(c10d(), "_get_handler_names", tuple)()


def handler_of(name: str) -> Callable[[Any, Any], None]:
    """Return the handler with the name `name`, a function of a request and a response."""
    return c10d()._get_handler(name)  # type: ignore[no-any-return]  # untyped in torch


def add_handler(name: str, function: Callable[[Any, Any], None]) -> None:
    """Add a handler, which torch can neither remove nor replace; not before torch 2.10."""
    c10d()._register_handler(name, function)


def handler_types() -> tuple[Any, Any]:
    """Return the base classes of requests and responses. A request with contents cannot be made in Python."""
    return c10d()._Request, c10d()._Response


def has_worker_server() -> bool:
    """Return whether this torch has `new_worker_server` and `add_handler`."""
    return all(hasattr(c10d(), name) for name in ("_WorkerServer", "_register_handler"))


def new_worker_server(path: str) -> Any:
    """Start torch's worker server at the path of a Unix socket and return it; not before torch 2.5."""
    return c10d()._WorkerServer(path)
