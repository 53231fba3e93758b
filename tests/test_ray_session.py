"""F26: a cluster that this process starts is its own, and one that the environment names is not joined silently."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from plot_ot.engine.units import Shard
from plot_ot.errors import PlotError, PlotWarning
from plot_ot.subjects import Place, Store
from plot_ot.subjects.protocol import Share

pytest.importorskip("ray")

from plot_ot.engine.ray_engine import RayEngine, _RayCrew, _values_or_errors

OWN = """
import os, stat, sys
from pathlib import Path
from plot_ot.engine.ray_engine import RayEngine

def started():
    with RayEngine(workers=1, threads=1) as engine:
        import ray
        folder = Path(ray._private.worker._global_node.get_temp_dir_path()).parent
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, oct(folder.stat().st_mode)
        assert token.parent == folder
        assert stat.S_IMODE(token.stat().st_mode) == 0o600, oct(token.stat().st_mode)
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert ray.get(engine.workers[0].process.remote()) != os.getpid()
    assert not folder.exists()
    assert not any(name.startswith("RAY_AUTH") for name in os.environ)

started()
started()  # another of the same process
assert not (Path.home() / ".ray").exists()
print("all of it")
"""


def test_f26_a_cluster_of_this_machine_has_a_folder_and_a_token_of_its_own(tmp_path):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env = {**kept, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, "-c", OWN], env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "all of it", done.stderr[-2000:]


def test_f26_an_address_from_the_environment_is_said(monkeypatch):
    monkeypatch.setattr("plot_ot.engine.ray_engine._initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with (
        pytest.warns(PlotWarning, match=r"Joining the Ray cluster at '127.0.0.1:1', as RAY_ADDRESS says"),
        pytest.raises(PlotError, match=r"no Ray cluster at '127\.0\.0\.1:1'"),
    ):
        RayEngine()


@pytest.mark.parametrize("answer", [None, {"value": 1}, "done"])
def test_f26_an_answer_that_is_none_is_refused(answer):
    with pytest.raises(PlotError, match="A worker answered with"):
        list(_values_or_errors(iter([answer]), []))


def test_f26_a_recording_of_other_inputs_or_shapes_is_refused():
    inputs = torch.arange(6).reshape(3, 2)
    shard = Shard(inputs, torch.arange(3), Share())
    subject = SimpleNamespace(recorded=(Place("a", 4, 1),))
    crew = _RayCrew([], subject, None, [])  # type: ignore[arg-type]
    good = Store(inputs, {"a": torch.zeros(3, 4)}, torch.zeros(3, 2))
    assert crew._checked(good, shard) is good
    bad = [
        None,
        Store(inputs + 1, good.activations, good.outputs),
        Store(inputs, {"a": torch.zeros(3, 5)}, good.outputs),
        Store(inputs, {"b": torch.zeros(3, 4)}, good.outputs),
        Store(inputs, good.activations, torch.zeros(2, 2)),
    ]
    for store in bad:
        with pytest.raises(PlotError, match="something else than a recording of the 3 inputs"):
            crew._checked(store, shard)
