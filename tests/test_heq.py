"""Hierarchical equality: rows, backbones, banks and methods."""

from pathlib import Path

import pytest
import torch

from plot_ot.errors import PlotError
from plot_ot.files.writing import write_atomically
from plot_ot.studies.study import Study
from plot_ot.subjects import ModuleSubject
from plot_ot.tasks import HierarchicalEquality, SeedFailed, heq

SEED, CACHE = 1003, Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def backbone() -> heq.Backbone:
    return heq.load_backbone(SEED, CACHE)


@pytest.mark.parametrize("cell", heq.CELLS)
def test_cell_rows_lie_in_their_cell(cell):
    values = heq.causal_model().run(heq.cell_rows(cell, 500, torch.Generator().manual_seed(0)))
    assert values["z_WX"].eq(bool(cell[0])).all()
    assert values["z_YZ"].eq(bool(cell[1])).all()


@pytest.mark.parametrize("sampler", heq.SAMPLERS)
def test_pools_have_distinct_rows(sampler):
    pool = heq.draw_pool(sampler, 1000, torch.Generator().manual_seed(0))
    assert len(torch.unique(pool, dim=0)) == len(pool) == 1000


def test_the_network_has_the_papers_850_parameters():
    assert sum(p.numel() for p in heq.build_net().parameters()) == 850


def test_training_is_deterministic_and_judges_all_four_cells():
    one, two = (heq.train_backbone(SEED, rows=1 << 14, epochs=2) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.net.parameters(), two.net.parameters(), strict=True))
    assert len(one.cell_accuracy) == 4
    assert not one.accepted  # two short epochs cannot know the cell (1, 1)


def test_the_cached_backbone_is_accepted_and_right_on_fresh_rows(backbone):
    assert backbone.accepted
    generator = torch.Generator().manual_seed(99)
    for cell in heq.CELLS:
        rows = heq.cell_rows(cell, 2000, generator)
        assert (backbone.answers(rows) == (cell[0] == cell[1])).double().mean() > 0.995


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path):
    whole = (CACHE / f"heq-{SEED}.safetensors").read_bytes()
    write_atomically(tmp_path / f"heq-{SEED}.safetensors", whole[:-100])
    with pytest.raises(PlotError, match=r"heq-1003.safetensors is damaged.*Delete it"):
        heq.load_backbone(SEED, tmp_path)


def test_a_backbone_wrong_in_a_cell_fails_its_seed(monkeypatch, backbone):
    wrong = heq.Backbone(SEED, backbone.net, backbone.table, 30, (1.0, 1.0, 1.0, 0.914))
    monkeypatch.setattr(heq, "load_backbone", lambda *_: wrong)
    with pytest.raises(SeedFailed, match=r"11: 0\.9140"):
        HierarchicalEquality().prepare(SEED, CACHE)


@pytest.mark.parametrize("sampler", heq.SAMPLERS)
def test_banks_have_the_papers_quotas_and_share_no_input(backbone, sampler):
    splits, rates = heq.draw_splits(backbone, sampler, size=400)
    wx, yz = splits.fit.changed.values()
    assert int((wx | yz).sum()) == 200
    changed = torch.stack(list(splits.calibration.changed.values())).sum(dim=0)
    counts = torch.bincount(changed, minlength=3).tolist()
    assert counts == ([0, 400, 0] if sampler == "uniform" else [100, 200, 100])
    for (variable, kind), bank in splits.test.items():
        assert bank.changed[variable].eq(kind == "sensitivity").all()
    assert set(splits.shared_sources.values()) == {0}
    assert set(rates) == {"00", "01", "10", "11"}
    assert all(r is None or r > 0.99 for r in rates.values())


def test_copying_the_source_almost_passes_uniform_banks_and_is_at_chance_on_balanced_ones(backbone):
    def copied(sampler: str) -> float:
        splits, _ = heq.draw_splits(backbone, sampler, size=400)
        return sum(float((b.source_answer == b.labels[v]).double().mean()) for (v, _), b in splits.test.items()) / 4

    assert copied("uniform") > 0.95
    assert abs(copied("balanced") - 0.5) < 0.06


def test_the_fast_subject_records_what_hooks_record(backbone):
    rows = heq.uniform_rows(50, torch.Generator().manual_seed(0))
    fast = backbone.subject().record(rows)
    slow = ModuleSubject(backbone.net, {"layer1": "1", "layer2": "3", "layer3": "5"}, rows, encode=backbone.encode)
    for name, activation in slow.record(rows).activations.items():
        torch.testing.assert_close(fast.activations[name], activation)


@pytest.fixture(autouse=True)
def few_random_handles(monkeypatch):
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 3)


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(HierarchicalEquality("balanced", "tenths", 300).prepare(SEED, CACHE))


@pytest.mark.parametrize(("method", "least"), [("plot", 0.95), ("plot-layered", 0.95), ("das", 0.95)])
def test_methods_recover_both_variables_on_balanced_banks(study, method, least):
    task = HierarchicalEquality("balanced", "tenths", 300)
    unit, handles = study.run(task.methods()[method], task.random_method)
    average = sum(r["accuracy"] for r in unit["records"]) / 4
    assert average >= least
    assert all(v["status"].found for v in unit["verdicts"])
    assert set(handles) == set(heq.VARIABLES)
    own = {c["handle"]: c["accuracy"] for c in unit["cross"] if c["handle"] == c["labels"]}
    other = {c["handle"]: c["accuracy"] for c in unit["cross"] if c["handle"] != c["labels"]}
    assert all(own[v] > other[v] for v in own)


def test_every_method_charges_its_recording_and_names_its_parts(study):
    task = HierarchicalEquality("balanced", "tenths", 300)
    unit, _ = study.run(task.methods()["full-vector"], task.random_method)
    [runtime] = unit["runtimes"]
    assert runtime["parts"]["recording"] == study.recording_seconds > 0
    assert runtime["seconds"] == pytest.approx(sum(runtime["parts"].values()))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: HierarchicalEquality("unifrom"), "Did you mean 'uniform'"),
        (lambda: HierarchicalEquality(strengths="fifths"), "Choose from: units, tenths, union"),
        (lambda: HierarchicalEquality(size=3), "at least 20"),
    ],
)
def test_bad_options_are_refused(make, said):
    with pytest.raises(PlotError, match=said):
        make()
