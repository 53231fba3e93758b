"""Methods on a network in half precision, of one kind of subject: `python half_precision.py KIND TYPE [NAMES]`.

A process of its own: on some processors bfloat16 products crash unless oneDNN is kept from an instruction set.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from plot_ot.errors import PlotError
from plot_ot.handles import Handle
from plot_ot.judging import bench
from plot_ot.methods import Method, MethodKind
from plot_ot.signatures import as_readout
from plot_ot.sites import blocks
from plot_ot.stages.boundless import BoundlessSpec, TrainBoundless
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate, TrainDas
from plot_ot.stages.coupling import Localize
from plot_ot.stages.descent import OPTIMISERS, DasSpec
from plot_ot.stages.masks import MaskSpec, TrainMask
from plot_ot.studies.prepared import Prepared
from plot_ot.studies.study import Study
from plot_ot.studies.task import Task
from plot_ot.subjects import MLPSubject, ModuleSubject, SequentialSubject
from plot_ot.tasks import BinaryAddition, HierarchicalEquality, MultipleChoice
from plot_ot.tasks.text_data import Sizes

KINDS = ("mlp", "sequential", "module", "gru", "decoder")
SHORT = DasSpec(batch=12, least=1, most=2)


def learners() -> dict[str, Method]:
    """Methods that no task of the registry lists, and every optimiser."""
    stages = {
        **{f"das by {o}": (TrainDas((2,), replace(SHORT, optimiser=o)),) for o in OPTIMISERS},
        "boundless": (TrainBoundless((0.01,), spec=BoundlessSpec(batch=12, epochs=1)),),
        "mask": (TrainMask(sparsities=(0.01,), spec=MaskSpec(batch=12, epochs=1)),),
        "linearised": (Localize((blocks(4),), signatures="jacobian"), Calibrate(Search((1, 2), (1.0,)))),
    }
    return {name: Method(name, "", some) for name, some in stages.items()}


def task_of(kind: str, dtype: str) -> Task:
    if kind == "decoder":
        sizes = Sizes(24, 12, 12, 12)
        return MultipleChoice("planted-1000", dtype=dtype, sizes=sizes, das_epochs=2, das_sizes=2, das_every=3)
    return BinaryAddition(4, 2, bases=16) if kind == "gru" else HierarchicalEquality(size=24, strengths="units")


def prepared(kind: str, task: Task, dtype: torch.dtype) -> Prepared:
    """The task's network in half precision, untrained where training would take long."""
    if kind == "decoder":
        return task.prepare(1000, Path())
    outline = task.outline(1003)
    if kind == "gru":
        subject, how = outline.subject, "sigmoid"
        subject.net.to(dtype)
    else:
        net, encode = copy.deepcopy(outline.subject.net).to(dtype), outline.subject.encode
        example, how = outline.splits.fit.base[:1], "softmax"
        known = {"mlp": MLPSubject, "sequential": SequentialSubject, "module": ModuleSubject}[kind]
        given = (net,) if kind == "mlp" else (net, ["1", "3"], example)
        subject = known(*given, encode=lambda rows: encode(rows).to(dtype))
    return Prepared(task.name, kind, 1003, subject, outline.splits, as_readout(how))


def check(name: str, handles: Mapping[str, Handle], study: Study, dtype: torch.dtype) -> None:
    """Handles are in full precision whatever the network computes in, act on it, and come back from a file."""
    for handle in handles.values():
        for edit in handle.edits:
            assert edit.gains.dtype in (torch.float32, torch.float64), (name, edit.gains.dtype)
        with tempfile.TemporaryDirectory() as folder:
            handle.save(Path(folder) / "handle.safetensors")
            again = Handle.load(Path(folder) / "handle.safetensors")
        fit = study.prepared.splits.fit
        found = again.apply(study.prepared.subject, fit.base[:4], fit.source[:4])
        assert bool(torch.isfinite(found).all()), name


def main() -> None:
    kind, dtype = sys.argv[1], getattr(torch, sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bench.RANDOM_HANDLES = 2
    torch.manual_seed(1000)
    task = task_of(kind, sys.argv[2])
    methods = {**task.methods(), **learners()}
    chosen = sys.argv[3].split(",") if len(sys.argv) > 3 else list(methods)
    study = Study(prepared(kind, task, dtype))
    assert {w.dtype for w in study.prepared.subject.weights().values()} == {dtype}
    judged = {"plot"}  # one verdict: its controls are searches by the same method
    for name in chosen:
        small = methods[name] if name in judged else replace(methods[name], kind=MethodKind.BASELINE)
        try:
            unit, handles = study.run(small, task.random_method)
        except PlotError as e:
            print(f"{name}: refused: {e}")
            continue
        check(name, handles, study, dtype)
        scores = " ".join(f"{r['accuracy']:.3f}" for r in unit["records"])
        print(f"{name}: {scores}" + (f" {[v['status'] for v in unit['verdicts']]}" if name in judged else ""))


if __name__ == "__main__":
    main()
