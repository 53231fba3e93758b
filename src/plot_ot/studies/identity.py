"""What a unit of work is of: digests of the network, its banks, and a method's settings, so that nothing gets mixed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from plot_ot.abstract.banks import Bank
from plot_ot.files.seals import digest
from plot_ot.files.writing import Json
from plot_ot.methods import Method
from plot_ot.studies.prepared import Prepared, Sweep


def unit_of(prepared: Prepared) -> Json:
    """The network and the banks of a prepared seed."""
    return {"subject": subject_of(prepared), "banks": banks_digest(prepared)}


def subject_of(prepared: Prepared) -> dict[str, str]:
    """The network: its name, the digest of its weights and structure, and what else the task is made from."""
    return {"name": prepared.subject_name, "identity": prepared.subject.identity(), **prepared.sources}


def banks_digest(prepared: Prepared) -> str:
    """A digest of every pair with its labels, of all banks."""
    splits = prepared.splits
    banks = {"fit": splits.fit, "calibration": splits.calibration}
    banks |= {f"test {v} {kind}": bank for (v, kind), bank in splits.test.items()}
    banks |= {f"transfer {v} {kind}": bank for (v, kind), bank in prepared.transfer.items()}
    return digest({name: _bank(bank) for name, bank in banks.items()})


def _bank(bank: Bank) -> str:
    tensors = [bank.base, bank.source, bank.base_answer, bank.source_answer, bank.family]
    tensors += [t for v in bank.variables for t in (bank.changed[v], bank.labels[v])]
    found = hashlib.sha256("\n".join((bank.name, *bank.variables, *bank.families)).encode())
    for t in tensors:
        found.update(tensor_bytes(t))
    return found.hexdigest()[:16]


def tensor_bytes(tensor: Tensor) -> bytes:
    """A tensor's shape, type and content."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return f"{tuple(tensor.shape)}:{tensor.dtype}".encode() + flat.view(torch.uint8).numpy().tobytes()


# -- methods ----------------------------------------------------------------------------------------------------------


def method_digest(method: Method | Sweep) -> str:
    """A digest of all settings of a method: two methods of one name may differ."""
    return digest(settings(method))


def settings(value: Any) -> Any:
    """The settings inside a stage, a menu or a specification as plain values, functions by name and what they hold."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)  # 1, 1.0 and True are different settings, and JSON has no infinity
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: settings(getattr(value, f.name)) for f in fields(value) if f.name != "summary"}
        return {"kind": _name(type(value)), **own}
    if isinstance(value, Mapping):
        return {str(settings(k)): settings(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(str(settings(v)) for v in value)
    if isinstance(value, Tensor):
        return hashlib.sha256(tensor_bytes(value)).hexdigest()
    if isinstance(value, FunctionType):
        held = [settings(c.cell_contents) for c in value.__closure__ or ()]
        return {"kind": _name(value), "holds": held, "defaults": settings(value.__defaults__), **_code(value)}
    if isinstance(value, Iterable) and not isinstance(value, type):
        return [settings(v) for v in value]
    return {"kind": _name(value if isinstance(value, type) else type(value)), **_state(value)}


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__name__)}"


def _code(function: FunctionType) -> Json:
    """What a function of the user's own does; ours are known by the version."""
    if function.__module__.partition(".")[0] == "plot_ot":
        return {}
    consts = [c for c in function.__code__.co_consts if isinstance(c, (int, float, str, tuple, type(None)))]
    return {"code": hashlib.sha256(function.__code__.co_code + repr(consts).encode()).hexdigest()}


def _state(value: Any) -> Json:
    """What a plain object or a partial function holds."""
    if hasattr(value, "func") and hasattr(value, "args"):
        return {"of": settings(value.func), "args": settings(value.args), "keywords": settings(value.keywords)}
    return {"holds": settings(vars(value))} if hasattr(value, "__dict__") else {}
