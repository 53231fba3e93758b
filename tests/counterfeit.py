"""A counterfeit GPU: tensors that compute on the CPU, claim to be on `cuda:0` or `cuda:1`, and obey CUDA's rules.

    with counterfeit() as gpu:
        net.to("cuda")
        ...
    gpu.count.waits, gpu.count.uploads

Whatever mixes devices is refused where CUDA would refuse it, and what would make the CPU wait for the GPU is counted.
To torch the tensors are on `meta:0` and `meta:1`, devices with an index that nothing else uses; so torch's own C++ code
carries them through autograd and composite functions, and every kernel ends in `_dispatch` below with the devices it
would have had. A function mode turns `cuda:k` in what Python asks for into `meta:k`.
"""

from __future__ import annotations

import contextlib
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CPU = torch.device("cpu")
DEVICES = 2

# -- what CUDA does -------------------------------------------------------------------------------------------------

WAITS = {
    # a number that Python needs, or a shape that depends on numbers
    *("_local_scalar_dense", "equal", "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
    *("unique_dim_consecutive", "masked_select", "bincount"),
    # solvers look at the error codes of their decompositions
    *("_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_qr", "linalg_eig", "linalg_lstsq"),
}
"""Kernels after which the CPU waits until the GPU has done all that was asked of it."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Indices may be on the CPU; they are uploaded."""
FILLING = {"fill_", "fill", "masked_fill", "masked_fill_", "index_put", "index_put_", "_index_put_impl_"}
"""One number on the CPU may be written into a tensor on a GPU, besides the pointwise functions."""
COPIES = {"copy_", "_to_copy"}


class MixedDevices(RuntimeError):
    """What CUDA would refuse."""


class Counterfeit(Tensor):
    """A tensor that says it is on a GPU; its numbers are in `raw`."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, index: int) -> Counterfeit:
        assert raw.device == CPU, raw.device
        made = Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("meta", index),
        )
        made.raw, made.index = raw.detach(), index
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _dispatch(op, args, kwargs or {})

    device = property(lambda self: torch.device("cuda", self.index))
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    is_cpu = property(lambda self: False)

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def __repr__(self, **_: Any) -> str:
        return f"{self.cpu()!r} on {self.device}"

    def get_device(self) -> int:
        return self.index

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError("cannot pin a CUDA tensor: only dense CPU tensors can be pinned")

    def is_pinned(self, *_: Any) -> bool:
        return False

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        torch._C.TensorBase.data.__set__(self, new)
        self.raw, self.index = new.raw, new.index


def _dispatch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One kernel: refuse what CUDA refuses, count what it costs, compute on the CPU."""
    name, given = op._schema.name.removeprefix("aten::"), [x for x in tree_leaves((args, kwargs)) if _is_tensor(x)]
    target = _target(name, args, kwargs, given)
    if name in COPIES:
        _count_copy(name, args, kwargs, target)
    else:
        _refuse_mixing(op, name, args, given, target)
    _count_waits(op, name, args, kwargs)
    plain = lambda x: x.raw if isinstance(x, Counterfeit) else CPU if _is_ours(x) else x  # noqa: E731
    if target.type == "meta":  # a real meta tensor is asked for
        return op(*tree_map(plain, args), **tree_map(lambda x: x.raw if isinstance(x, Counterfeit) else x, kwargs))
    raw_args, raw_kwargs = tree_map(plain, args), tree_map(plain, kwargs)
    if raw_kwargs.get("pin_memory"):
        raw_kwargs["pin_memory"] = False
    found = op(*raw_args, **raw_kwargs)
    known = {id(x.raw): x for x in given if isinstance(x, Counterfeit)}
    known.update({id(x): x for x in given if not isinstance(x, Counterfeit)})  # written in place

    def outgoing(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in known:
            return known[id(x)]
        return x if target == CPU else Counterfeit(x, target.index)

    return tree_map(outgoing, found)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _is_ours(x: Any) -> bool:
    """A device as torch knows it that stands for a GPU."""
    return isinstance(x, torch.device) and x.type == "meta" and x.index is not None


def _claimed(device: torch.device) -> torch.device:
    return torch.device("cuda", device.index) if _is_ours(device) else device


def _target(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> torch.device:
    """Where the result will be."""
    if kwargs.get("device") is not None:
        return _claimed(kwargs["device"])
    if name in COPIES or name in INDEXING:
        return args[0].device
    return next((x.device for x in given if isinstance(x, Counterfeit)), CPU)


def _refuse_mixing(op: Any, name: str, args: tuple[Any, ...], given: list[Tensor], target: torch.device) -> None:
    if name.startswith(("new_", "empty_like", "zeros_like", "ones_like", "full_like", "rand")) and len(given) <= 1:
        return  # these only look at a shape and a type
    lone = torch.Tag.pointwise in op.tags or name in FILLING
    indices = {id(x) for x in tree_leaves(args[1])} if name in INDEXING else set()
    written = {
        id(a) for a, s in zip(args, op._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write
    }
    for x in given:
        on_cpu = x.device == CPU
        if x.device == target or (on_cpu and id(x) in indices):
            continue
        if on_cpu and lone and x.ndim == 0 and id(x) not in written:
            continue
        raise MixedDevices(
            f"Expected all tensors to be on the same device, but found {x.device} beside {target} in {name} "
            f"(shapes {[tuple(t.shape) for t in given]})"
        )


def _count_copy(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.device) -> None:
    source = args[1] if name == "copy_" else args[0]
    if source.device == target or target.type == "meta":
        return
    free = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
    COUNT.transfer(source, target, blocking=not free or (source.device == CPU and not _is_pinned(source)))


def _count_waits(op: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not any(isinstance(x, Counterfeit) for x in tree_leaves((args, kwargs))):
        return
    repeated = op._schema.name == "aten::repeat_interleave" and op._overloadname == "Tensor"
    if name in WAITS or (repeated and kwargs.get("output_size") is None):
        COUNT.wait(name)
    elif name in INDEXING:
        masks = [i for i in args[1] if isinstance(i, Counterfeit) and i.dtype in (torch.bool, torch.uint8)]
        filled = name != "index" and len(args) > 2 and args[2].numel() == 1  # that is masked_fill
        if masks and not filled:
            COUNT.wait("mask")
        for i in args[1]:
            if isinstance(i, Tensor) and i.device == CPU and args[0].device != CPU:
                COUNT.transfer(i, args[0].device, blocking=True)


# -- counting -------------------------------------------------------------------------------------------------------


class Count:
    """What was waited for and moved."""

    def __init__(self) -> None:
        self.by: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.paused = False
        self.watch: Callable[[str], None] | None = None

    @property
    def waits(self) -> int:
        """How often the CPU waited for a GPU: for numbers, for shapes, and for what it fetched."""
        return sum(n for what, n in self.by.items() if what not in ("upload", "between"))

    @property
    def uploads(self) -> int:
        """Copies from the CPU to a GPU that hold the CPU up: all that are not pinned and non-blocking."""
        return self.by["upload"]

    def wait(self, what: str) -> None:
        self.by[what] += 1
        if self.watch is not None:
            self.watch(what)

    def transfer(self, source: Tensor, target: torch.device, blocking: bool) -> None:
        what = "between" if CPU not in (source.device, target) else "upload" if source.device == CPU else "download"
        self.bytes[what] += source.numel() * source.element_size()
        if blocking:
            self.wait(what)

    def taken(self) -> Counter[str]:
        """What was counted since the last time, which starts again."""
        found, self.by = self.by, Counter()
        return found


COUNT = Count()


# -- generators -----------------------------------------------------------------------------------------------------


class Generator(torch.Generator):
    """A generator that may claim to be a GPU's."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        made.claims = torch.device(device)
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass


def _refuse_generator(generator: Any, device: Any, first: Any) -> None:
    """Generators are for one type of device; the one that is used is that of the result."""
    used = _claimed(device) if device is not None else first.device if _is_tensor(first) else CPU
    own = getattr(generator, "claims", CPU)
    if own.type != used.type:
        raise MixedDevices(f"Expected a '{used.type}' device type for generator but found '{own.type}'")


# -- modes ----------------------------------------------------------------------------------------------------------


class _Kernels(TorchDispatchMode):
    """Sees kernels that have no counterfeit among their arguments: what makes tensors, and uploads."""

    def __torch_dispatch__(self, op: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_ours(kwargs.get("device")) and not any(isinstance(x, Counterfeit) for x in tree_leaves(args)):
            return _dispatch(op, args, kwargs)
        return op(*args, **kwargs)


class _Python(TorchFunctionMode):
    """Turns the devices that Python asks for into those that torch is told."""

    def __torch_function__(self, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), dict(kwargs or {})
        if name == "cuda" and args and _is_tensor(args[0]):
            where = args[1] if len(args) > 1 else kwargs.get("device", "cuda")
            return args[0].to(_told(where))
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], Counterfeit):
            args = (args[0], _uploaded(args[1], _told(args[0].device)), *args[2:])
        if name == "pin_memory" and type(args[0]) is not Counterfeit:
            return _pinned(args[0].clone())
        if name == "is_pinned" and type(args[0]) is not Counterfeit:
            return _is_pinned(args[0])
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = _told(kwargs["device"])
        args = tuple(_told(a) if isinstance(a, torch.device) else a for a in args)
        if name == "to" and len(args) > 1 and isinstance(args[1], (str, int)):
            args = (args[0], _told(args[1]), *args[2:])
        if kwargs.get("generator") is not None:
            _refuse_generator(kwargs["generator"], kwargs.get("device"), args[0] if args else None)
        if name in ("tensor", "as_tensor", "asarray") and not _is_tensor(args[0]):
            args = (tree_map(lambda x: x.item() if isinstance(x, Counterfeit) else x, args[0]), *args[1:])
            if _is_ours(kwargs.get("device")):
                where = kwargs.pop("device")
                return function(*args, **kwargs).to(where)
        if kwargs.get("pin_memory") and kwargs.get("device") in (None, CPU):
            return _pinned(function(*args, **{**kwargs, "pin_memory": False}))
        return function(*args, **kwargs)


def _uploaded(index: Any, device: torch.device) -> Any:
    """An index in which lists of numbers are tensors on a GPU, as torch makes them."""
    if isinstance(index, tuple):
        return tuple(_uploaded(i, device) for i in index)
    return torch.tensor(index).to(device) if isinstance(index, list) else index


_PINNED: dict[int, Any] = {}
"""Memory that counts as pinned, kept so that no other takes its address."""


def _pinned(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    _PINNED[storage.data_ptr()] = storage
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _PINNED


def _told(device: Any) -> torch.device:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return device
    index = device.index or 0
    if index >= DEVICES:
        raise RuntimeError(f"CUDA error: invalid device ordinal ({device})")
    return torch.device("meta", index)


def _library() -> dict[str, Any]:
    """What `torch.cuda` is to say."""

    def waited(*_: Any) -> None:
        COUNT.wait("synchronize")

    said = types.SimpleNamespace(name="Counterfeit", total_memory=8 << 30, major=9, minor=0, multi_processor_count=1)
    return {
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": lambda: 0,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "synchronize": waited,
        "empty_cache": lambda: None,
        "get_device_name": lambda *_: said.name,
        "get_device_properties": lambda *_: said,
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: (said.total_memory, said.total_memory),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 1 << 20,
        "reset_peak_memory_stats": lambda *_: None,
        "is_bf16_supported": lambda *_: True,
        "device": lambda *_: contextlib.nullcontext(),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }


@contextlib.contextmanager
def counterfeit() -> Iterator[types.SimpleNamespace]:
    """While open there are two counterfeit GPUs; what comes out has the count, anew."""
    global COUNT
    before, COUNT = COUNT, Count()
    with contextlib.ExitStack() as stack:
        for name, value in _library().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        # a mode does not see what its own functions call: a backward pass may run Python, which asks for devices
        stack.enter_context(mock.patch.object(torch.autograd, "has_torch_function", return_value=False))
        stack.enter_context(mock.patch.object(Tensor, "backward", lambda self, *a: torch.autograd.backward(self, *a)))
        stack.enter_context(_Kernels())
        stack.enter_context(_Python())
        try:
            yield types.SimpleNamespace(count=COUNT)
        finally:
            COUNT = before
            _PINNED.clear()


def on_gpu(tensor: Tensor, index: int = 0) -> Counterfeit:
    """A tensor of the CPU as one of a GPU, uncounted."""
    return Counterfeit(tensor.detach().clone(), index)
