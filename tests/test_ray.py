"""The same studies on a real Ray cluster of two nodes, both on this machine's loopback: the same bits, also when
workers are killed and a node is lost in the middle."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plot_ot.edits import EditBatch, Frame
from plot_ot.engine import Crew, Recipe, SharedRecording, Unit
from plot_ot.errors import PlotError
from plot_ot.stages.calibrate import pair_weights, scored
from plot_ot.studies.prepared import Prepared
from plot_ot.studies.study import Study
from plot_ot.subjects import MLPSubject, Store, Subject
from small_studies import HEQ_METHODS, MCQA_METHODS, bits, heq, mcqa, run_all

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # no phoning, loopback only
ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from plot_ot.engine.ray_engine import RayEngine, _in_order  # noqa: E402

SHARD = 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and another node, both bound to loopback."""
    here = {"num_cpus": 2, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args=here)
    started.add_node(num_cpus=2, node_ip_address="127.0.0.1")
    ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
    yield started
    ray.shutdown()
    started.shutdown()


@pytest.fixture(scope="module")
def engine(cluster: Cluster) -> Iterator[RayEngine]:
    with RayEngine(workers=2) as made:
        yield made


@pytest.fixture(scope="module")
def equality() -> tuple[Prepared, dict[str, object]]:
    prepared = heq()
    return prepared, bits(run_all(prepared, HEQ_METHODS, shard=SHARD))


@pytest.fixture(scope="module")
def questions() -> Prepared:
    pytest.importorskip("transformers")
    task = mcqa()
    return replace(task.prepare(1000, Path()), recipe=task.network_recipe())


def processes(engine: RayEngine) -> list[int]:
    return ray.get([w.process.remote() for w in engine.workers])


class Disturbed:
    """An engine to which something happens after so many results, while other units are under way."""

    def __init__(self, engine: RayEngine, after: Sequence[int], happens: Callable[[], None]) -> None:
        self.engine, self.after, self.happens = engine, set(after), happens
        self.results = 0
        self.disturbances = 0

    def crew(self, subject: Subject, recipe: Recipe | None = None) -> Crew:
        return _DisturbedCrew(self, self.engine.crew(subject, recipe))


class _DisturbedCrew:
    def __init__(self, engine: Disturbed, inner: Crew) -> None:
        self.engine, self.inner = engine, inner

    def record(self, shards: Sequence[Any]) -> Store:
        return self.inner.record(shards)

    def map(self, recording: SharedRecording, units: Sequence[Unit]) -> Iterator[Any]:
        for k, result in enumerate(self.inner.map(recording, units)):
            self.engine.results += 1
            if k + 1 < len(units) and self.engine.after and self.engine.results >= min(self.engine.after):
                self.engine.after.remove(min(self.engine.after))
                self.engine.disturbances += 1
                self.engine.happens()
            yield result


def test_results_come_in_the_order_of_the_plan() -> None:
    ends = [(2, "c"), (0, "a"), (3, "d"), (1, "b")]
    assert list(_in_order(iter(ends))) == ["a", "b", "c", "d"]


def test_an_address_where_nobody_is() -> None:
    with pytest.raises(PlotError, match=r"no Ray cluster at '127.0.0.1:1' .*ray start --head"):
        RayEngine("127.0.0.1:1")


@pytest.mark.long
def test_a_study_is_the_same_bits_as_in_process(engine: RayEngine, equality: tuple[Prepared, dict]) -> None:
    prepared, expected = equality
    assert bits(run_all(prepared, HEQ_METHODS, engine, SHARD)) == expected


def test_a_language_model_loaded_by_its_recipe_gives_the_same_bits(engine: RayEngine, questions: Prepared) -> None:
    some = [m for m in MCQA_METHODS if m.name in ("plot-native", "das")]
    assert bits(run_all(questions, some, engine, SHARD)) == bits(run_all(questions, some, shard=SHARD))


@pytest.mark.long
def test_every_stage_on_a_language_model_gives_the_same_bits_while_workers_die(
    engine: RayEngine, questions: Prepared
) -> None:
    """A worker that was killed loads its model and records its shards again."""
    expected = bits(run_all(questions, MCQA_METHODS, shard=SHARD))
    victims = iter(processes(engine))
    disturbed = Disturbed(engine, [3, 30], lambda: os.kill(next(victims), signal.SIGKILL))
    assert bits(run_all(questions, MCQA_METHODS, disturbed, SHARD)) == expected
    assert disturbed.disturbances == 2


def test_workers_are_spread_over_nodes_that_only_this_machine_sees(engine: RayEngine) -> None:
    where = ray.get([w.node.remote() for w in engine.workers])
    assert len(set(where)) == 2
    assert {n["NodeManagerAddress"] for n in ray.nodes()} == {"127.0.0.1"}


def test_killed_workers_lose_nothing(engine: RayEngine, equality: tuple[Prepared, dict]) -> None:
    prepared, expected = equality
    first = processes(engine)
    victims = iter(first)
    disturbed = Disturbed(engine, [3, 40], lambda: os.kill(next(victims), signal.SIGKILL))
    assert bits(run_all(prepared, HEQ_METHODS, disturbed, SHARD)) == expected
    assert disturbed.disturbances == 2
    assert not set(processes(engine)) & set(first)  # both were really started again


@pytest.mark.long
def test_the_number_of_workers_does_not_matter(cluster: Cluster, equality: tuple[Prepared, dict]) -> None:
    prepared, expected = equality
    with RayEngine(workers=1) as engine:
        found = bits(run_all(prepared, HEQ_METHODS[:1], engine, SHARD))
    assert found["records"]["plot"] == expected["records"]["plot"]


def test_an_error_is_the_one_that_this_process_would_have_met(engine: RayEngine) -> None:
    prepared = heq()
    messages = []
    for by in (None, engine):
        calibration = Study(prepared, by, shard=SHARD).problem.calibration
        place = prepared.subject.places[0]
        far = [EditBatch(place, Frame.identity(place.width), torch.full((1, place.width), torch.inf))]
        weights = pair_weights(calibration, "z_WX", "balanced")
        with pytest.raises(PlotError) as e:
            scored(calibration, far, "z_WX", weights, prepared.readout)
        messages.append(str(e.value))
    assert "NaN or infinity" in messages[0]
    assert messages[0] == messages[1]


def test_a_bug_comes_back_as_itself(engine: RayEngine) -> None:
    broken = replace(heq().readout, decide=lambda outputs: 1 / 0)
    prepared = heq()
    calibration = Study(prepared, engine, shard=SHARD).problem.calibration
    place = prepared.subject.places[0]
    edit = [EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))]
    with pytest.raises(ZeroDivisionError):
        scored(calibration, edit, "z_WX", pair_weights(calibration, "z_WX", "balanced"), broken)


def test_another_network_than_the_drivers_is_refused(engine: RayEngine) -> None:
    prepared = replace(heq(), recipe=_another)
    with pytest.raises(PlotError, match="network is another than the driver's"):
        Study(prepared, engine, shard=SHARD)


@pytest.mark.long
def test_a_lost_node_loses_nothing(cluster: Cluster, engine: RayEngine, equality: tuple[Prepared, dict]) -> None:
    """The last test here: only the head is left after it."""
    prepared, expected = equality
    [doomed] = cluster.worker_nodes
    where = [w.node.remote() for w in engine.workers]
    assert doomed.node_id in ray.get(where)
    disturbed = Disturbed(engine, [10], lambda: cluster.remove_node(doomed, allow_graceful=False))
    assert bits(run_all(prepared, HEQ_METHODS, disturbed, SHARD)) == expected
    assert disturbed.disturbances == 1
    assert set(ray.get([w.node.remote() for w in engine.workers])) == {cluster.head_node.node_id}


_another: Recipe = lambda: MLPSubject(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)))  # noqa: E731
