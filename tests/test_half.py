"""F21: whatever is trained works on networks in float16 and bfloat16 too, of every kind of subject.

In a process of its own: on some processors bfloat16 products crash unless oneDNN is kept from an instruction set.
"""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import copy, sys, warnings
import torch
warnings.simplefilter("ignore")
torch.set_num_threads(1)
from plot_ot.signatures import as_readout
from plot_ot.stages.boundless import BoundlessSpec, TrainBoundless
from plot_ot.stages.choose import TrainDas
from plot_ot.stages.descent import OPTIMISERS, DasSpec
from plot_ot.stages.masks import MaskSpec, TrainMask
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import MLPSubject, ModuleSubject, SequentialSubject, record
from plot_ot.tasks import BinaryAddition, HierarchicalEquality

dtype = getattr(torch, sys.argv[1])
stages = [TrainDas((2,), DasSpec(o, batch=12, least=1, most=2)) for o in OPTIMISERS]
stages += [TrainBoundless((0.01,), spec=BoundlessSpec(batch=12, epochs=1))]
stages += [TrainMask(sparsities=(0.01,), spec=MaskSpec(batch=12, epochs=1))]
logic, adder = HierarchicalEquality(size=24).outline(1003), BinaryAddition(4, 2).outline(1000)
net, encode = copy.deepcopy(logic.subject.net).to(dtype), logic.subject.encode
half = lambda rows: encode(rows).to(dtype)
example, adder_net = logic.splits.fit.base[:1], adder.subject.net.to(dtype)
subjects = [
    (ModuleSubject(net, ["1"], example, encode=half), logic.splits, "softmax"),
    (SequentialSubject(net, ["1"], example, encode=half), logic.splits, "softmax"),
    (MLPSubject(net, encode=half), logic.splits, "softmax"),
    (adder.subject, adder.splits, "sigmoid"),
]
for subject, splits, how in subjects:
    fit, calibration = record(subject, splits.fit, splits.calibration)
    assert fit.base_at(subject.places[0]).dtype == dtype
    problem = Problem(subject, fit, calibration, fit.bank.variables[:1], as_readout(how))
    for stage in stages:
        [handle] = stage(problem, State.start(problem)).handles.values()
        assert 0 <= handle.chosen["calibration_score"] <= 1
        assert all(bool(torch.isfinite(e.gains).all()) for e in handle.edits)
print("all of them")
"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_learners_train_in_float32_whatever_the_network_computes_in(dtype):
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, dtype], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "all of them", done.stderr[-1500:]
