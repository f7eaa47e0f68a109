"""A stand-in for a CUDA device: real arithmetic on the CPU under the rules of a GPU.

`install` makes ``torch.cuda`` say that there is a GPU. A tensor on it is a `Shadow`, whose device is ``cuda:0`` to all
code, and whose numbers lie in an ordinary tensor. Every operation goes through `_run`, which

- refuses what CUDA refuses: operands on both devices, a generator of the other device, ``.numpy()`` without ``.cpu()``;
- counts what the host waits for: a number that is read (``.item()``, ``nonzero``, a mask as an index), a copy from the
  device, a copy to it from memory that is not pinned; `events` says at which lines of the product;
- computes on the CPU, so that results can be compared with the CPU's.

Autograd, autocast, GradScaler, fused AdamW, checkpointing and inference mode work as they are. It cannot show kernels,
their rounding, speed, memory, NCCL, or races between streams.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)

# kind -> place -> how often
events: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
PACKAGE = ("/pipeline/", "/mining/", "/train/", "/cli/")
recording = True
# transformers makes models on "meta" before it fills them: off while it loads one.
meta_is_cuda = True


def note(kind: str) -> None:
    if recording:
        events[kind][_place()] += 1


def _place() -> str:
    """The innermost line of the package under test on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in PACKAGE) and "site-packages" not in name:
            short = "/".join(name.split("/")[-2:])
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class Shadow(torch.Tensor):
    """C++ is told "meta": the autograd engine asks the driver about CUDA devices, and of meta tensors it asks nothing.
    Autocast for CUDA is let in by its dispatch key. Python sees ``cuda:0``."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, outer_size: Any = None, outer_stride: Any = None) -> Shadow:
        assert not isinstance(inner, Shadow)
        assert inner.device.type == "cpu", f"a number was lost: {inner.device}"
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device("meta"),
            requires_grad=False,
            _extra_dispatch_keys=torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA),
        )
        out.inner = inner
        return out

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def numpy(self, **_: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to host memory first."
        )

    def tolist(self) -> Any:
        note("wait: tolist")
        return self.inner.tolist()

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        same = (device is None or device.type == "cuda") and dtype in (None, self.dtype)
        if same and not copy and (memory_format is None or self.is_contiguous(memory_format=memory_format)):
            return self
        options: dict[str, Any] = {"dtype": dtype or self.dtype, "non_blocking": non_blocking, "copy": copy}
        if memory_format is not None:
            options["memory_format"] = memory_format
        # Named as C++ knows it; without a device a change of type stays where it is.
        return super().to(torch.device("meta") if device is None or device.type == "cuda" else device, **options)

    def cuda(self, *_: Any, **__: Any) -> torch.Tensor:
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            value = Shadow(torch.tensor(value, dtype=self.dtype))
        elif not isinstance(value, Shadow) and value.dim():
            raise WrongDevice("a tensor on the cpu is put into one on cuda:0")
        super().__setitem__(index, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            copied: torch.Tensor = Shadow(self.inner.clone())
            memo[id(self)] = (
                torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied
            )
        return memo[id(self)]

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Shadow({self.inner!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> Shadow:
        return Shadow(inner["inner"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as a CPU tensor; `torch.load` below puts it back by `map_location`.
        return (_restored, (self.inner, isinstance(self, torch.nn.Parameter), self.requires_grad))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _restored(inner: torch.Tensor, parameter: bool, requires_grad: bool) -> torch.Tensor:
    out: torch.Tensor = Shadow(inner)
    if parameter:
        return torch.nn.Parameter(out, requires_grad)
    return out.requires_grad_(requires_grad) if requires_grad else out


class WrongDevice(RuntimeError):
    pass


# May take tensors of both devices, and move data between them.
MOVES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default, aten.lift_fresh.default, aten.copy.default}
# Index tensors may lie on the CPU (and are copied over).
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
# Where the first argument says on which device they happen.
INTO_FIRST = {aten.copy_.default, aten._index_put_impl_.default, aten.index_put_.default}
# The size of the result is known on the device alone.
WAITS = {
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.unique_consecutive.default: "unique",
    aten._local_scalar_dense.default: "item",
    aten.equal.default: "equal",
    aten.is_nonzero.default: "item",
    aten.repeat_interleave.Tensor: "repeat_interleave",
}


def _is_cuda(device: Any) -> bool:
    # What C++ makes after the pattern of a Shadow is to be on "meta".
    return device is not None and torch.device(device).type in (("cuda", "meta") if meta_is_cuda else ("cuda",))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with every tensor changed; operations take tensors and lists of them, and nothing deeper."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(item, change) for item in value])
    return value


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, Shadow) else tensor


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    # In inference mode compound operations come as they are.
    if _compound(func):
        with Mode():
            return func.decompose(*args, **kwargs)
    tensors = _tensors(args, kwargs)
    shadows = [x for x in tensors if isinstance(x, Shadow)]
    plain = [x for x in tensors if not isinstance(x, Shadow)]
    to_device = kwargs.get("device")
    _check(func, args, shadows, plain)
    _count(func, args, kwargs, shadows)

    on_cuda = bool(shadows) if to_device is None else _is_cuda(to_device)
    if func in INTO_FIRST:
        on_cuda = isinstance(args[0], Shadow)
    _check_generator(func, kwargs.get("generator"), on_cuda)
    inner_args = [_mapped(value, _inner) for value in args]
    inner_kwargs = {name: _mapped(value, _inner) for name, value in kwargs.items()}
    if _is_cuda(to_device):
        inner_kwargs["device"] = torch.device("cpu")
    if "pin_memory" in inner_kwargs:
        inner_kwargs["pin_memory"] = False
    out = func(*inner_args, **inner_kwargs)
    if not on_cuda:
        return out
    shared = {id(x.inner): x for x in shadows} if _writes(func) else {}
    # A view of an ordinary tensor is an ordinary one, in inference mode as well.
    ordinary = torch.is_inference_mode_enabled() and any(not x.is_inference() for x in shadows) and _views(func)

    def wrapped(value: torch.Tensor) -> torch.Tensor:
        # Operations in place give back what they were given.
        if id(value) in shared:
            return shared[id(value)]
        with torch.inference_mode(False) if ordinary else contextlib.nullcontext():
            return Shadow(value)

    out = _mapped(out, wrapped)
    if not shadows or func in MOVES:
        return args[0] if func is aten.copy_.default else out
    if not (_views(func) or _writes(func)):
        return out
    return return_and_correct_aliasing(func, args, kwargs, out)


def _check_generator(func: Any, generator: Any, on_cuda: bool) -> None:
    if generator is not None and (generator._cdata in _on_device) != on_cuda:
        wanted, got = ("cuda", "cpu") if on_cuda else ("cpu", "cuda")
        raise WrongDevice(f"{func}: Expected a '{wanted}' device type for generator but found '{got}'")


@functools.cache
def _compound(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


@functools.cache
def _views(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


@functools.cache
def _writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _check(func: Any, args: Any, shadows: list[Any], plain: list[torch.Tensor]) -> None:
    if not shadows or not plain or func in MOVES:
        return
    wrong = plain
    if func in INDEXING:
        own, indices = args[0], [i for i in args[1] if i is not None]
        if not isinstance(own, Shadow) and any(isinstance(i, Shadow) for i in indices):
            raise WrongDevice(
                f"{func}: indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        by_id = {id(i) for i in indices}
        wrong = [x for x in plain if id(x) not in by_id]
        if (
            func is not aten.index.Tensor
            and len(args) > 2
            and not isinstance(own, Shadow)
            and isinstance(args[2], Shadow)
        ):
            raise WrongDevice(f"{func}: values on cuda:0 are put into a tensor on the cpu")
    # A number that lies in a CPU tensor without dimensions may join any tensor, where entries go in pairs.
    if torch.Tag.pointwise in func.tags or func in INDEXING:
        wrong = [x for x in wrong if x.dim() > 0]
        if all(x.dim() == 0 for x in shadows) and any(x.dim() > 0 for x in plain) and func not in INDEXING:
            wrong = plain
    if wrong:
        shapes = ", ".join(
            f"{'cuda:0' if isinstance(x, Shadow) else 'cpu'} {tuple(x.shape)}" for x in [*shadows, *plain]
        )
        raise WrongDevice(
            f"Expected all tensors to be on the same device, but found cuda:0 and cpu! ({func}: {shapes})"
        )


def _count(func: Any, args: Any, kwargs: dict[str, Any], shadows: list[Any]) -> None:
    if shadows and func in WAITS:
        note(f"wait: {WAITS[func]}")
    elif func in INDEXING and isinstance(args[0], Shadow):
        for index in (i for i in args[1] if i is not None):
            if index.dtype in (torch.bool, torch.uint8):
                note("wait: mask as index")
            elif not isinstance(index, Shadow):
                note("upload, unpinned: index")
    elif func is aten._to_copy.default:
        to = kwargs.get("device")
        source = isinstance(args[0], Shadow)
        if source and to is not None and not _is_cuda(to):
            note("wait: download")
        elif not source and _is_cuda(to):
            note("upload, unpinned" if not _pinned(args[0]) else "upload, pinned")
    elif func is aten.copy_.default and isinstance(args[0], Shadow) != isinstance(args[1], Shadow):
        note("wait: download" if isinstance(args[1], Shadow) else "upload, unpinned")


_pins: dict[int, StorageWeakRef] = {}


def _pinned(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    there = _pins.get(storage.data_ptr())
    return there is not None and not there.expired()


class Mode(TorchDispatchMode):
    """Takes what begins on the device: ``torch.zeros(..., device="cuda")``, ``.to("cuda")``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._pin_memory.default or func is aten.pin_memory.default:
            out = args[0].clone()
            _pins[out.untyped_storage().data_ptr()] = StorageWeakRef(out.untyped_storage())
            return out
        if func is aten.is_pinned.default:
            return not isinstance(args[0], Shadow) and _pinned(args[0])
        asked = _is_cuda(kwargs.get("device")) or any(isinstance(x, torch.device) and _is_cuda(x) for x in args)
        if asked or "generator" in kwargs or any(isinstance(x, Shadow) for x in _tensors(args, kwargs)):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


_on_device: dict[int, Any] = {}


class ShadowGenerator(torch.Generator):
    """``torch.Generator("cuda")``: draws on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls, "cpu")
        # An operation sees another Python object of the same generator.
        _on_device[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA


_Generator = torch.Generator


class _AnyGenerator(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)

    def __call__(cls, device: Any = "cpu") -> Any:
        return ShadowGenerator() if _is_cuda(device) else _Generator(device)


class _GeneratorName(metaclass=_AnyGenerator):
    pass


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def synchronize(self) -> None:
        note("wait: synchronize")

    def wait_stream(self, other: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class _Properties:
    major, minor, name, total_memory, multi_processor_count = 9, 0, "shadow", 80 << 30, 132


# What autocast does on CUDA, operation by operation, by PyTorch's documentation ("CUDA Op-Specific Behavior").
_LOWER = [
    "linear",
    "matmul",
    "mm",
    "mv",
    "addmm",
    "addmv",
    "addr",
    "bmm",
    "baddbmm",
    "addbmm",
    "chain_matmul",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "_convolution",
    "prelu",
    "scaled_dot_product_attention",
]
_FP32 = [
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "exp",
    "expm1",
    "log",
    "log10",
    "log1p",
    "log2",
    "rsqrt",
    "reciprocal",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "cross_entropy_loss",
    "nll_loss",
    "nll_loss_nd",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "cosh",
    "acos",
    "asin",
    "cosine_similarity",
    "smooth_l1_loss",
    "mse_loss",
    "l1_loss",
    "softplus",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "dist",
    "cdist",
    "renorm",
]
_FP32_DTYPE = ["softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "cumprod", "prod", "prod.dim_int"]
_PROMOTE = [
    "cat",
    "stack",
    "addcmul",
    "addcdiv",
    "index_put",
    "scatter_add",
    "dot",
    "bilinear",
    "grid_sampler",
    "tensordot",
]
_NO_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_library = torch.library.Library("aten", "IMPL")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    eligible = isinstance(value, Shadow) and value.dtype in _FLOATS and value.dtype != dtype
    return value.to(dtype) if eligible else value


def _autocast(name: str, policy: str) -> None:
    packet, _, overload = name.partition(".")
    function = getattr(getattr(aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
            if policy == "dtype":
                first = args[0]
                if isinstance(first, Shadow) and first.dtype in _FLOATS and kwargs.get("dtype") is None:
                    kwargs = {**kwargs, "dtype": torch.float32}
                return function(*args, **kwargs)
            if policy == "promote":
                found = [x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Shadow)]
                to = torch.float32 if torch.float32 in found else torch.get_autocast_dtype("cuda")
            else:
                to = torch.get_autocast_dtype("cuda") if policy == "lower" else torch.float32
            args, kwargs = pytree.tree_map(lambda x: _cast(x, to), (args, kwargs))
            return function(*args, **kwargs)

    _library.impl(name, kernel, "AutocastCUDA", allow_override=True)


def _install_autocast() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for names, policy in ((_LOWER, "lower"), (_FP32, "fp32"), (_FP32_DTYPE, "dtype"), (_PROMOTE, "promote")):
            for name in names:
                packet, _, overload = name.partition(".")
                if hasattr(getattr(aten, packet, None), overload or "default"):
                    _autocast(name, policy)


_installed = contextlib.ExitStack()


def install() -> None:
    """From here on this process has a GPU, in all threads that are started later as well."""
    cuda: Any = torch.cuda
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: _Properties,
        "get_device_name": lambda device=None: "shadow",
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: note("wait: synchronize"),
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "Stream": _Stream,
        "empty_cache": lambda: None,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "device": lambda device: contextlib.nullcontext(),
        "_lazy_init": lambda: None,
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # type: ignore[attr-defined]
    torch.Generator = _GeneratorName  # type: ignore[misc, assignment]
    _install_autocast()
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)
    load = torch.load

    def load_shadows(*args: Any, map_location: Any = None, **kwargs: Any) -> Any:
        on = _is_cuda(map_location) if isinstance(map_location, (str, torch.device)) else None
        found = load(*args, map_location="cpu" if on else map_location, **kwargs)
        if on is None:
            return found
        inner = pytree.tree_map_only(Shadow, lambda x: x.inner, found)
        return pytree.tree_map_only(torch.Tensor, lambda x: x.to(CUDA), inner) if on else inner

    torch.load = load_shadows
    torch.serialization.add_safe_globals([_restored])
    _enter()
    run = threading.Thread.run

    def run_with_mode(self: threading.Thread) -> None:
        with Mode():
            run(self)

    threading.Thread.run = run_with_mode  # type: ignore[method-assign]


def _enter() -> None:
    _installed.enter_context(Mode())


def uninstall_mode() -> None:
    _installed.close()


def report(steps: int = 1) -> str:
    lines = []
    for kind in sorted(events):
        lines.append(f"{kind}: {sum(events[kind].values()) / steps:g}")
        lines += [f"    {count / steps:8g}  {place}" for place, count in events[kind].most_common()]
    return "\n".join(lines)
