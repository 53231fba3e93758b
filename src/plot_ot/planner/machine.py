"""Machines: how fast they multiply, how fast their memory is, and how much of it there is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from plot_ot.errors import PlotError, unknown


@dataclass(frozen=True)
class Machine:
    """A machine of one or more equal devices; the numbers are those of one device."""

    name: str
    flops: float
    """FLOP/s of large matrix products in the model's type."""
    bandwidth: float
    """Bytes/s to and from a device's memory."""
    memory: float
    """Bytes of a device's memory."""
    link: float
    """Bytes/s between the device and the host: what weights and keys that do not fit cross whenever they are needed."""
    call: float
    """Seconds that calling a block takes, however little it computes: Python, and the launches of its kernels."""
    single: float
    """FLOP/s in float32."""
    efficiency: float = 1.0
    """Which share of `flops` and `bandwidth` whole blocks reach."""
    devices: int = 1
    gpu: bool = True
    measured: bool = False

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "memory", "link", "call", "single", "efficiency"):
            if not getattr(self, name) > 0:
                raise PlotError(f"A machine's {name} must be above 0; found {getattr(self, name):g}.")
        if self.devices < 1:
            raise PlotError(f"A machine has at least one device; found {self.devices}.")

    @property
    def device(self) -> str:
        """The name that torch has for such a device."""
        return "cuda" if self.gpu else "cpu"

    def changed(self, **given: Any) -> Machine:
        """The same machine with some numbers replaced; None keeps a number."""
        return replace(self, **{k: v for k, v in given.items() if v is not None})


MACHINES = {
    # vendors' numbers for dense bfloat16 and HBM; 40 % of the peak is what large products reach in plain PyTorch, half
    # a millisecond what an eager block of transformers takes to be called: assumptions, to be replaced by your numbers
    "h100": Machine("h100", 989e12, 3.35e12, 80e9, 55e9, 5e-4, 67e12, 0.4),
    "a100": Machine("a100", 312e12, 2.04e12, 80e9, 25e9, 5e-4, 19.5e12, 0.5),
}
SHARE = 0.7
"""The share of the throughput of plain matrix products that resumed responses reach (docs/results/decoder_speed.md)."""
OPERATIONS = 40
"""The number of operations in a block as transformers writes it."""


def machine_by_name(
    name: str, *, dtype: str = "float32", cores: int = 1, rows: int = 512, width: int = 1024
) -> Machine:
    """A preset, or `this`: measured now, on products of `rows` x `width` vectors as a study makes them."""
    if name in MACHINES:
        return MACHINES[name]
    if name != "this":
        unknown("machine", name, [*MACHINES, "this"])
    return measure(dtype=dtype, cores=cores, rows=rows, width=width)


def measure(
    *,
    dtype: str = "float32",
    cores: int = 1,
    rows: int = 512,
    width: int = 1024,
    device: torch.device | None = None,
) -> Machine:
    """This machine, by a probe of well under a second: products, a copy, and small operations.

    It is probed on its GPU if it has one, or on the `device` you name.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        kind = getattr(torch, dtype)
        x = torch.randn(rows, width, device=device).to(kind)
        w = torch.randn(4 * width, width, device=device).to(kind)
        product = best_time(lambda: torch.nn.functional.linear(x, w), device, cores)
        x, w = x.float(), w.float()
        slow = product if kind is torch.float32 else best_time(lambda: torch.nn.functional.linear(x, w), device, cores)
        block = torch.zeros(1 << 26, dtype=torch.uint8, device=device)
        into = block.clone()
        copy = best_time(lambda: into.copy_(block), device, cores)
        small = torch.zeros(8, 8, device=device)
        operation = best_time(lambda: [small.add(1.0) for _ in range(100)], device, cores) / 100
    finally:
        torch.set_num_threads(threads)
    gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if gpu else _main_memory()
    work = 2.0 * rows * width * 4 * width
    return Machine(
        "this",
        work / product,
        2 * len(block) / copy,
        float(memory),
        25e9,
        OPERATIONS * operation,
        work / slow,
        SHARE,
        max(1, torch.cuda.device_count()) if gpu else 1,
        gpu,
        True,
    )


def best_time(work: Callable[[], object], device: torch.device, cores: int, seconds: float = 0.1) -> float:
    """The fastest of repeated runs: what disturbs them only ever makes them slower.

    On one core it is the CPU's seconds that count, so that others who use the machine do not. That clock is coarse on
    some machines, so that short work is repeated until it can be timed.
    """
    clock = time.process_time if device.type == "cpu" and cores == 1 else time.perf_counter
    best, end, times = float("inf"), time.perf_counter() + seconds, 1
    while time.perf_counter() < end or best == float("inf"):
        start = clock()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = clock() - start
        if taken < TIMED:
            times *= 2
        else:
            best = min(best, taken / times)
    return best


TIMED = 5e-3
"""Seconds below which a clock is not believed."""


def _main_memory() -> float:
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):  # not on every system
        return 8e9
