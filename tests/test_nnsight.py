"""With the real nnsight: its models as subjects, and its own runs, also packed as for a remote one, beside ours."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

import decoders
from foreign import KINDS, SETS, handle, run_page, subject_of, tokenizer
from plot_ot import (
    CausalModel,
    LanguageModel,
    Method,
    PlotError,
    Splits,
    Subject,
    draw_pairs,
    load_subject,
    record_pairs,
)
from plot_ot.exchange import NnsightSubject
from plot_ot.models.foreign import opened_up
from plot_ot.planner import MACHINES, Scene, predict
from plot_ot.sites import whole_places
from plot_ot.stages.coupling import Localize

nnsight = pytest.importorskip("nnsight")
OPTIONS = {"kinds": KINDS, "positions": decoders.POSITIONS}


def envelope(family: str, folder) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nnsight renames its classes
        return nnsight.LanguageModel(decoders.network(family), tokenizer=tokenizer(folder))


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "llama", "qwen2"])
def test_a_handle_in_nnsight_does_what_it_does_here(family: str, tmp_path) -> None:
    model = envelope(family, tmp_path)
    ours, plain = subject_of(opened_up(model)[0]), subject_of(decoders.network(family))
    assert ours.identity() == plain.identity()
    there = NnsightSubject(model, decoders.encode, decoders.ANSWERS, **OPTIONS, remote="local")
    assert there.identity() == plain.identity()
    assert there.places == plain.places
    for names in SETS if family in ("gpt2", "gemma2") else SETS[-1:]:
        made = handle(plain, names)
        expected = made.apply(plain, decoders.BASE, decoders.SOURCE)
        for subject in (ours, there):
            assert decoders.relative(made.apply(subject, decoders.BASE, decoders.SOURCE), expected) < 1e-5


def test_recordings_are_the_same(tmp_path) -> None:
    model = envelope("llama", tmp_path)
    plain = subject_of(decoders.network("llama"))
    there = NnsightSubject(model, decoders.encode, **OPTIONS, remote=False, at_once=4)
    [expected] = record_pairs(plain.watching(vocabulary=True), (decoders.BASE, decoders.SOURCE))
    [found] = record_pairs(there, (decoders.BASE, decoders.SOURCE))
    assert decoders.relative(found.base_outputs, expected.base_outputs) < 1e-5
    for place in plain.places:
        assert decoders.relative(found.source_at(place), expected.source_at(place)) < 1e-5


def test_load_subject_takes_nnsights_model_and_its_tokenizer(tmp_path) -> None:
    model = envelope("llama", tmp_path)
    loaded = load_subject(model)
    assert isinstance(loaded, LanguageModel)
    assert loaded.tokenizer is model.tokenizer
    assert next(loaded.model.parameters()) is next(model._module.parameters())


def test_what_nnsight_cannot_do_is_said(tmp_path) -> None:
    model = envelope("llama", tmp_path)
    there = NnsightSubject(model, decoders.encode, decoders.ANSWERS, layers=[1])
    assert isinstance(there, Subject)
    assert not there.differentiable
    [recording] = record_pairs(there, (decoders.BASE, decoders.SOURCE))
    wanted = recording.base_at(there.places[0])[None].requires_grad_()
    with pytest.raises(PlotError, match="Gradients do not come back"):
        there.resume(recording.store, recording.base_rows, there.places[0], wanted, {})
    with pytest.raises(PlotError, match="no edit stays open"), there.intervene({}):
        pass
    for options, said in (
        ({"remote": "far"}, "False, True or 'local'"),
        ({"at_once": 0}, "at least 1"),
        ({"kinds": ("nonsense",)}, "nonsense"),
    ):
        with pytest.raises(PlotError, match=said):
            NnsightSubject(model, decoders.encode, decoders.ANSWERS, **options)
    with pytest.raises(PlotError, match="Expected nnsight's LanguageModel; found LlamaForCausalLM"):
        NnsightSubject(decoders.network("llama"), decoders.encode)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_model_without_its_weights_here_runs_where_they_are(family: str, tmp_path) -> None:
    network = decoders.network(family)
    network.save_pretrained(tmp_path)
    tokenizer(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"attn_implementation": "eager"} if family == "gemma2" else {}
        model = nnsight.LanguageModel(str(tmp_path), **options)
    assert all(p.device.type == "meta" for p in model._module.parameters())
    there = NnsightSubject(model, decoders.encode, decoders.ANSWERS, **OPTIONS, remote="local")
    assert all(p.device.type == "meta" for p in model._module.parameters())  # looking at it loads nothing
    plain = subject_of(network)
    assert there.far
    assert there.identity().startswith("nnsight-")
    assert there.places == plain.places
    made = handle(plain, SETS[-1])
    expected = made.apply(plain, decoders.BASE, decoders.SOURCE)
    far = replace(made, subject=there.identity())
    assert decoders.relative(far.apply(there, decoders.BASE, decoders.SOURCE), expected) < 1e-5


@pytest.mark.parametrize("far", [False, True])
def test_a_plan_runs_nothing_and_counts_whole_passes(far: bool, tmp_path, monkeypatch) -> None:
    model = envelope("llama", tmp_path)
    if far:
        model._module.to("meta")
    there = NnsightSubject(model, decoders.encode, decoders.ANSWERS, **OPTIONS, remote="local")
    monkeypatch.setattr(NnsightSubject, "_run", None)  # no trace
    causal = CausalModel(["a", "b"], {"z": lambda a: a % 2, "y": lambda z, b: (z + b) % 2}, "y")
    rows = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    monkeypatch.setattr(there, "encode", lambda some: (some.repeat(1, 5), torch.ones(len(some), 10).long()))
    monkeypatch.setattr(there, "positions", {name: lambda some: -2 for name in there.positions})
    bank = draw_pairs(causal, rows, "mixed", 30, torch.Generator().manual_seed(0), variable="z", variables=["z"])
    assert there.parameters == subject_of(decoders.network("llama")).parameters
    scene = Scene.of_subject(there, Splits(bank, bank, {}), len(decoders.ANSWERS))
    patches = Method("patches", "whole places", (Localize((whole_places,)),))
    plan = predict(patches, scene, MACHINES["h100"])
    whole = 10 * decoders.DEPTH  # tokens through blocks, wherever the edit is
    distinct = len(torch.cat([bank.base, bank.source]).unique(dim=0))
    assert plan.parts["recording"].forward == whole * distinct
    assert all(scene.through(p) == whole for p in there.places)
    assert plan.parts["signatures"].forward == whole * sum(2 * scene.classes(scene.fit, [p]) for p in there.places)


def test_weights_that_are_not_loaded_are_refused(tmp_path) -> None:
    model = envelope("llama", tmp_path)
    model._module.to("meta")
    with pytest.raises(PlotError, match=r"has not loaded its weights.*NnsightSubject"):
        load_subject(model)
    assert torch.get_default_device().type == "cpu"


@pytest.mark.filterwarnings("ignore")
def test_the_page_about_it_runs() -> None:
    run_page("needs: nnsight")
