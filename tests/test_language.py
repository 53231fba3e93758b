"""Studies of language models: the paper's grids at other scales, and the whole of MCQA on an embedded net."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plot_ot.cli.common import layer_numbers
from plot_ot.errors import PlotError
from plot_ot.files.run_reading import read_run
from plot_ot.judging.status import Status
from plot_ot.stages.choose import SelectPlaces, TrainDas
from plot_ot.studies.study import Study
from plot_ot.subjects.decoder.recording import record_prompts
from plot_ot.tasks import IndirectObject, MultipleChoice
from plot_ot.tasks.language import RESOLUTIONS, SUBSPACES, scaled
from plot_ot.tasks.text_data import Sizes

SMALL = Sizes(60, 24, 24, 8)
SEVEN = ("plot", "plot-native", "plot-pca", "plot-das", "plot-native-das", "plot-pca-das", "das")
SEED = 1003


@pytest.fixture(scope="module")
def task() -> MultipleChoice:
    return MultipleChoice(sizes=SMALL, das_sizes=3, das_every=2)


@pytest.fixture(scope="module")
def study(task) -> Study:
    return Study(task.prepare(SEED, Path()))


def test_the_papers_grids_at_the_papers_scale():
    assert scaled(RESOLUTIONS, 2304) == RESOLUTIONS
    assert scaled(SUBSPACES, 2304) == SUBSPACES


def test_the_papers_grids_at_smaller_scales():
    assert scaled(RESOLUTIONS, 576) == (32, 36, 48, 64, 72, 96, 144, 192)
    assert scaled(SUBSPACES, 64) == (1, 2, 3, 4, 7, 14, 21, 28, 43, 57, 64)
    assert scaled((1, 10, 20), 64) == (1,)


def test_the_seven_methods_and_a_shortlist_of_the_models_depth(task):
    methods = task.methods()
    assert [m for m in methods if m in SEVEN] == list(SEVEN)
    [select] = [s for s in methods["plot"].stages if isinstance(s, SelectPlaces)]
    assert select.shortlist == 1  # round(6 · 6 / 26)
    [das] = [s for s in methods["das"].stages if isinstance(s, TrainDas)]
    assert (das.dimensions, das.every) == ((1, 14, 64), 2)


def test_a_model_goes_with_the_last_task_that_holds_it():
    """E6: a process-wide cache kept models for ever."""
    first, second = (MultipleChoice("planted-1001") for _ in range(2))
    assert first.language_model is second.language_model
    gone = weakref.ref(first.language_model.model)
    del first
    gc.collect()
    assert gone() is second.language_model.model
    del second
    gc.collect()
    assert gone() is None


def test_the_filter_lets_through_what_the_net_answers(task):
    rows = task.data.draw_rows(40, torch.Generator().manual_seed(SEED))
    right = task.answers_correctly(rows)
    lm = task.language_model
    ids, mask = task.data.encoder(lm.tokenizer, bos=lm.bos)(rows)
    said = lm.model(input_ids=ids, attention_mask=mask).logits[:, -1].argmax(dim=1)
    letters = task.causal_model().answer(rows)
    expected = [lm.tokenizer.decode([t]) == task.data.LETTERS[a] for t, a in zip(said, letters, strict=True)]
    assert right.tolist() == expected
    assert right.double().mean() > 0.95


def test_no_prompt_runs_twice_to_be_filtered_and_recorded(monkeypatch):
    ran: list[torch.Tensor] = []

    def counted(subject, inputs, *rest):
        ran.append(inputs)
        return record_prompts(subject, inputs, *rest)

    monkeypatch.setattr("plot_ot.subjects.decoder.subject.record_prompts", counted)
    Study(MultipleChoice(sizes=Sizes(16, 8, 8, 8)).prepare(SEED, Path()))
    prompts = torch.cat([rows for rows in ran if rows.shape[1] > 1])  # one token alone is the subject's own trial
    assert len(prompts) == len(prompts.unique(dim=0)) > 64


@pytest.mark.parametrize("method", [*SEVEN, "plot-support-das", "plot-closed-form"])
def test_every_method_runs_and_finds_the_token(study, task, method):
    unit, handles = study.run(task.methods()[method], task.random_method)
    assert set(handles) == {"answer_pointer", "answer_token"}
    token = [r for r in unit["records"] if r["variable"] == "answer_token"]
    if method != "plot-pca":  # letters do not lie along a few principal components (the paper finds so, too)
        assert all(r["accuracy"] > 0.6 for r in token)
    assert all(0 <= r["vocabulary"] <= r["accuracy"] + 1e-9 for r in unit["records"])
    assert len(unit["transfer"]) == 4
    verdicts = {v["variable"]: v["status"] for v in unit["verdicts"]}
    assert verdicts["answer_token"] is Status.OUTPUT
    if method != "das":  # which here skips that block
        assert handles["answer_pointer"].places == ["block_output.2"]


def test_stage_a_ranks_the_planted_blocks_first(study, task):
    state, _ = task.methods()["plot"].run(study.problem)
    for c in state.trail[0].candidates["answer_pointer"]:
        assert c.coupling.ranking("answer_pointer")[0] == 2
        assert c.coupling.ranking("answer_token")[0] in (3, 4, 5)


def test_examples_say_what_the_prompts_and_answers_were(study, task):
    unit, _ = study.run(task.methods()["plot"], task.random_method)
    assert {e["family"] for e in unit["examples"]} <= set(task.data.FAMILIES)
    for e in unit["examples"]:
        start, end = e["position"]["base"]
        assert e["base_prompt"][start:end] == ":"
        assert e["right"] == (e["after"] == e["expected"])
        assert e["expected"] in task.data.LETTERS


def test_the_command_writes_a_run(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from plot_ot.cli import app

    words = f"run mcqa --methods plot --fit 40 --pairs 12 --first-seed {SEED} --no-figures --out {tmp_path / 'run'}"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    results = read_run(tmp_path / "run").results
    assert {r["method"] for r in results["records"]} == {"plot", "no-edit", "copy-source"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"phi": "mean"}, "Choose from: stack, family, probability"),
        ({"calibration": "test"}, "Choose from: balanced, paper"),
        ({"hint": "none"}, "Choose from: paper, practice"),
        ({"dtype": "int8"}, "Choose from: float32"),
        ({"das_sizes": 12}, "1 to 11 sizes"),
    ],
)
def test_unknown_options_are_refused(options, words):
    with pytest.raises(PlotError, match=words):
        MultipleChoice(**options)


def test_full_das_runs_at_every_nth_block_and_at_those_that_are_named():
    for name in ("das", "das-natural"):
        [stage] = MultipleChoice(das_every=3, das_also=(1, 2)).methods()[name].stages
        das = stage if name == "das" else stage.ways[0][0]
        assert (das.every, das.also) == (3, ("block_output.1", "block_output.2"))
    with pytest.raises(PlotError, match="also to run at block 6; the model has blocks 0 to 5"):
        MultipleChoice(das_also=(6,)).methods()
    for text in ("5-3", "a", "3,,4"):
        with pytest.raises(PlotError, match=r"--das-also is .*; expected numbers such as 10-20 or 3,5,7"):
            layer_numbers(text, "--das-also")


def test_an_embedded_net_takes_no_adapter():
    with pytest.raises(PlotError, match="takes no adapter"):
        _ = MultipleChoice(adapter="planted").language_model


def test_the_tasks_share_everything_but_their_data():
    assert IndirectObject().config().keys() == MultipleChoice().config().keys() - {"questions"}


def test_the_sweep_varies_beta_alone():
    task = MultipleChoice("tiny")
    swept = task.sweep()
    assert (swept.parameter, list(swept.variants)) == ("beta", [0.03, 0.1, 0.3, 1.0, 3.0])
    whole = task.methods()["plot"].stages
    for beta, method in swept.variants.items():
        first, *rest = method.stages
        assert first == replace(whole[0], transport=replace(whole[0].transport, beta=(beta,)))
        assert rest == list(whole[1:])
