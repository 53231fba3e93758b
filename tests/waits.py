"""How often each part of a study makes the CPU wait for a GPU: `python tests/waits.py` prints the table of docs/gpu.md.

Studies run on the counterfeit GPU (`counterfeit.py`). A batch is one call of the subject's `resume`, or of its network
while it is recorded; waits are numbers, shapes and copies that Python needs, uploads what is copied to the GPU.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn

import half_precision as half
from counterfeit import counterfeit
from plot_ot.judging.judges import Judge
from plot_ot.stages.problem import Clock
from plot_ot.studies.study import Study
from plot_ot.subjects import Subject

METHODS = {
    "mlp": ("plot", "plot-newton", "das by riemannian", "linearised"),
    "gru": ("plot", "plot-newton", "das by riemannian"),
    "decoder": ("plot", "plot-newton", "das by riemannian", "linearised"),
}


@dataclass
class Part:
    batches: int = 0
    waits: int = 0
    uploads: int = 0

    def per_batch(self) -> tuple[float, float]:
        return self.waits / max(1, self.batches), self.uploads / max(1, self.batches)


def network_of(subject: Subject) -> nn.Module:
    for name in ("net", "module", "model"):
        if hasattr(subject, name):
            return getattr(subject, name)
    return subject.decoder.model


def counted(kind: str) -> dict[str, Part]:
    """Every part of the study's methods, by the library's own names of them."""
    parts: dict[str, Part] = {}
    with counterfeit() as gpu, contextlib.ExitStack() as patches:
        torch.manual_seed(1000)
        task = half.task_of(kind, "float32")
        prepared = half.prepared(kind, task, torch.float32)
        net = network_of(prepared.subject)
        net.to("cuda")
        ran: Counter[str] = Counter()

        @contextlib.contextmanager
        def part(_: object, name: str) -> Iterator[None]:
            before, at = ran.total(), (gpu.count.waits, gpu.count.uploads)
            yield
            here = parts.setdefault(name, Part())
            here.batches += ran.total() - before
            here.waits += gpu.count.waits - at[0]
            here.uploads += gpu.count.uploads - at[1]

        def tallied(run: object) -> object:
            def resume(*args: object, **kwargs: object) -> object:
                ran["resumed"] += 1
                return run(*args, **kwargs)

            return resume

        owner = type(prepared.subject)
        patches.enter_context(mock.patch.object(owner, "resume", tallied(owner.resume)))
        verdicts = Judge.verdicts
        patches.enter_context(
            mock.patch.object(Judge, "verdicts", lambda *a: _within(part(None, "verdict"), verdicts, *a))
        )
        trunk = prepared.subject.decoder.trunk if kind == "decoder" else net
        trunk.register_forward_pre_hook(lambda *_: ran.update(["recorded"]))
        patches.enter_context(mock.patch.object(Clock, "part", part))
        study = Study(prepared)
        known = {**task.methods(), **half.learners()}
        for name in METHODS[kind]:
            before = {k: Part(p.batches, p.waits, p.uploads) for k, p in parts.items()}
            study.run(known[name], task.random_method)
            if name == "linearised":  # its signatures are another part
                then, now = before.get("signatures", Part()), parts["signatures"]
                parts["linearised"] = Part(
                    now.batches - then.batches, now.waits - then.waits, now.uploads - then.uploads
                )
                parts["signatures"] = then
    return parts


def _within(manager: object, run: object, *args: object) -> object:
    with manager:
        return run(*args)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| network | part | batches | waits | uploads | waits per batch | uploads per batch |")
    for kind in sys.argv[1:] or METHODS:
        for name, p in counted(kind).items():
            if p.batches or p.waits:
                waits, uploads = p.per_batch()
                print(f"| {kind} | {name} | {p.batches} | {p.waits} | {p.uploads} | {waits:.2f} | {uploads:.2f} |")
