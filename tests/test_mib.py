"""`plot-ot mib` on stand-ins of the benchmark's four model classes: all 26 cells, scored again from the files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mib_standins as standins
from hub import local_hub
from plot_ot import PlotError, PlotWarning
from plot_ot.cli import app
from plot_ot.exchange.torch_files import rotation_in
from plot_ot.mib import CELLS, Cell, Settings, highest_and_average, plan_submission, submit
from plot_ot.mib.cells import MODELS, cells_of
from plot_ot.mib.data import read_cities, read_split
from plot_ot.mib.heads import HeadStudy, LinearModel
from plot_ot.mib.prompts import Prompts
from plot_ot.mib.questions import question, signals
from plot_ot.mib.residual import find_units
from plot_ot.mib.scoring import answered, unit_scores
from plot_ot.models import LanguageModel
from plot_ot.planner import MACHINES

CPU = MACHINES["h100"].changed(gpu=False)
QUICK = ["--epochs", "3", "--dimensions", "4", "--places", "2", "--quiet"]


@pytest.fixture(scope="module")
def models() -> dict[str, LanguageModel]:
    return {kind: LanguageModel.live(*standins.taught(kind)) for kind in standins.CLASSES}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return standins.write_data(tmp_path_factory.mktemp("mib") / "data")


@pytest.fixture(scope="module")
def submission(models, data, tmp_path_factory) -> Path:
    """All four models into one folder, each by the command."""
    folder = tmp_path_factory.mktemp("submission")
    for kind, found in models.items():
        with pytest.MonkeyPatch.context() as patch:
            if kind == "Qwen2ForCausalLM":  # transformers reads any tokenizer beside a Qwen2 model as Qwen's own
                patch.setattr("plot_ot.api.load_subject", lambda *_, found=found, **__: found)
            at = folder / "models" / kind
            found.model.save_pretrained(at)
            found.tokenizer.save_pretrained(at)
            given = ["--data", str(data), "--cities", str(data / "cities.json"), "--out", str(folder / "out")]
            done = CliRunner().invoke(app, ["mib", "--model", str(at), *given, *QUICK, "--json"])
        assert done.exit_code == 0, done.exception or done.output
        assert set(json.loads(done.stdout)) == {c.folder for c in CELLS if c.model == kind}
    return folder / "out"


def scores(submission: Path) -> dict[str, dict[str, Any]]:
    told = json.loads((submission / "scores.json").read_text())["cells"]
    return {Cell(t["task"], t["model"], t["variable"]).folder: t for t in told}


# -- the files --------------------------------------------------------------------------------------------------------


def test_there_are_26_cells_and_each_has_a_folder(submission: Path) -> None:
    assert len(CELLS) == 26
    assert {p.name for p in submission.iterdir() if p.is_dir()} == {c.folder for c in CELLS}
    assert "ravel_task_LlamaForCausalLM_Continent" in {c.folder for c in CELLS}
    assert set(scores(submission)) == {c.folder for c in CELLS}


def test_every_layer_and_token_has_a_triplet(submission: Path) -> None:
    for cell in CELLS:
        names = {p.name for p in (submission / cell.folder).iterdir()}
        if cell.task == "ioi_task":
            continue
        tokens = question(cell.task, standins.CITIES).tokens
        units = [f"ResidualStream(Layer-{k},Token-{t})" for k in range(standins.DEPTH) for t in tokens]
        assert names == {f"{u}_{part}" for u in units for part in ("featurizer", "inverse_featurizer", "indices")}


def test_indirect_objects_have_a_flat_folder_of_heads_of_the_models_own_width(submission: Path, models) -> None:
    for kind, found in models.items():
        widths = {"Gemma2ForCausalLM": 16}  # its heads are wider than the residual's share
        config = found.model.config
        for variable in ("output_token", "output_position"):
            folder = submission / f"ioi_task_{kind}_{variable}"
            assert all(p.is_file() for p in folder.iterdir())
            featurizers = [p for p in folder.iterdir() if p.name.endswith(")_featurizer")]
            assert len(featurizers) == 4
            for p in featurizers:
                assert p.name.startswith("AttentionHead(Layer-")
                assert ",Token-all)" in p.name
                saved = torch.load(p, weights_only=True)
                if saved["model_info"]["featurizer_class"] == "SubspaceFeaturizerModule":
                    basis = rotation_in(saved["state_dict"], "rotate.", widths.get(kind, 8))
                    assert basis.shape[0] == widths.get(kind, config.hidden_size // config.num_attention_heads)
                else:
                    assert saved["model_info"]["n_features"] == widths.get(kind, 8)


def test_linear_models_stand_under_the_names_of_the_classes(submission: Path) -> None:
    told = json.loads((submission / "ioi_linear_params.json").read_text())
    assert list(told) == list(MODELS)
    for kind, entry in told.items():
        assert entry["model_name"] == MODELS[kind]
        assert {"bias", "token_coeff", "position_coeff", "score"} < set(entry)


# -- scored again by hand ---------------------------------------------------------------------------------------------


def saved_projection(folder: Path, unit: str, width: int) -> torch.Tensor:
    """What a triplet swaps, as a matrix, from its files alone."""
    saved = torch.load(folder / f"{unit}_featurizer", weights_only=True)
    assert json.loads((folder / f"{unit}_indices").read_text()) is None
    if saved["model_info"]["featurizer_class"] == "IdentityFeaturizerModule":
        return torch.eye(width)
    basis = rotation_in(saved["state_dict"], "rotate.", width)
    return basis @ basis.T


def blocks(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def token_index(words: Any, example: Any, name: str) -> int:
    if name not in example.ends:
        return len(words(example.prompt)["input_ids"]) - 1
    end, more = example.ends[name]
    return len(words(example.prompt[:end])["input_ids"]) - 1 + more


@pytest.mark.parametrize(
    "folder",
    [
        "4_answer_MCQA_Qwen2ForCausalLM_answer",
        "4_answer_MCQA_Gemma2ForCausalLM_answer_pointer",
        "ARC_easy_LlamaForCausalLM_answer",
        "arithmetic_Gemma2ForCausalLM_ones_carry",
        "arithmetic_LlamaForCausalLM_ones_carry",
        "ravel_task_Gemma2ForCausalLM_Country",
    ],
)
def test_plain_hooks_and_the_files_give_the_same_scores(folder: str, submission: Path, models, data: Path) -> None:
    told = scores(submission)[folder]
    found, asked = models[told["model"]], question(told["task"], standins.CITIES)
    model, words = found.model, found.tokenizer
    test = read_split(asked, str(data), "test")
    for unit, by_family in list(told["units"].items())[-2:]:
        layer, name = int(unit.split("-")[1].split(",")[0]), unit.split("Token-")[1].rstrip(")")
        projection = saved_projection(submission / folder, unit, standins.WIDTH)
        hits: dict[str, list[bool]] = {}
        for pair in test:
            seen: list[torch.Tensor] = []

            def keep(_: Any, __: Any, out: Any, seen: list = seen) -> None:
                seen.append(out[0] if isinstance(out, tuple) else out)

            source = torch.tensor([words(pair.source.prompt)["input_ids"]])
            hook = blocks(model)[layer].register_forward_hook(keep)
            with torch.no_grad():
                model(source)
            hook.remove()
            vector = seen[0][0, token_index(words, pair.source, name)]
            at, p = token_index(words, pair.base, name), projection

            def swap(_: Any, __: Any, out: Any, vector: Any = vector, at: int = at, p: Any = p) -> Any:
                h = (out[0] if isinstance(out, tuple) else out).clone()
                h[0, at] += (vector - h[0, at]) @ p.T
                return (h, *out[1:]) if isinstance(out, tuple) else h

            ids = words(pair.base.prompt)["input_ids"]
            for _ in range(told["new_tokens"]):  # the whole text again for every token: no cache to trust
                hook = blocks(model)[layer].register_forward_hook(swap)
                with torch.no_grad():
                    ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
                hook.remove()
            written = words.decode(ids[-told["new_tokens"] :], skip_special_tokens=True)
            hits.setdefault(pair.family, []).append(asked.swapped(pair.base, pair.source, told["variable"]) in written)
        assert {f: sum(h) / len(h) for f, h in hits.items()} == pytest.approx(by_family)


@pytest.mark.parametrize("kind", standins.CLASSES)
def test_plain_hooks_on_heads_give_the_same_squared_error(kind: str, submission: Path, models, data: Path) -> None:
    told = scores(submission)[f"ioi_task_{kind}_output_token"]
    folder, asked = submission / f"ioi_task_{kind}_output_token", question("ioi_task")
    model, words = models[kind].model, models[kind].tokenizer
    linear = json.loads((submission / "ioi_linear_params.json").read_text())[kind]
    errors: dict[str, list[float]] = {}
    for pair in read_split(asked, str(data), "test"):
        base, source = (torch.tensor([words(e.prompt)["input_ids"]]) for e in (pair.base, pair.source))
        seen: dict[int, torch.Tensor] = {}
        attention = [b.attn if hasattr(b, "attn") else b.self_attn for b in blocks(model)]
        out_of = [a.c_proj if hasattr(a, "c_proj") else a.o_proj for a in attention]
        hooks = [
            m.register_forward_pre_hook(lambda _, args, k=k, seen=seen: seen.__setitem__(k, args[0]))
            for k, m in enumerate(out_of)
        ]
        with torch.no_grad():
            model(source)
        for hook in hooks:
            hook.remove()

        def swap(_: Any, args: Any, k: int, seen: dict = seen) -> Any:
            z = args[0].clone()
            width = z.shape[-1] // 4
            for layer, head in told["heads"]:
                if layer == k:
                    p = saved_projection(folder, f"AttentionHead(Layer-{layer},Head-{head},Token-all)", width)
                    at = slice(head * width, (head + 1) * width)
                    z[..., at] += (seen[k][..., at] - z[..., at]) @ p.T
            return (z, *args[1:])

        hooks = [m.register_forward_pre_hook(lambda m, args, k=k: swap(m, args, k)) for k, m in enumerate(out_of)]
        with torch.no_grad():
            logits = model(base).logits[0, -1]
        for hook in hooks:
            hook.remove()
        a, b, c = pair.base.values["names"]
        io, s = (b, a) if c == a else (a, b)
        first = {n: words(n, add_special_tokens=False)["input_ids"][0] for n in (io, s)}
        token = 1 if pair.source.values["output_token"] == pair.base.values["output_token"] else -1
        target = linear["bias"] + linear["token_coeff"] * token + linear["position_coeff"]
        errors.setdefault(pair.family, []).append(float(logits[first[io]] - logits[first[s]] - target) ** 2)
    assert {f: sum(e) / len(e) for f, e in errors.items()} == pytest.approx(told["families"], rel=1e-3)
    assert told["highest"] == told["average"] == pytest.approx(sum(told["families"].values()) / 3)


def test_highest_and_average_are_the_benchmarks() -> None:
    units = {
        "a": {"one": 0.2, "two": 0.4},  # 0.3 at layer 0
        "b": {"one": 0.9, "two": 0.1},  # 0.5 at layer 0: the best there
        "c": {"one": 1.0, "two": 0.8},  # 0.9 at layer 1
        "d": {"one": 0.0, "two": 0.2},  # 0.1 at layer 2
    }
    highest, average = highest_and_average(units, {"a": 0, "b": 0, "c": 1, "d": 2})
    assert highest == pytest.approx(0.9)
    assert average == pytest.approx((0.5 + 0.9 + 0.1) / 3)
    for cell, told in {"x": units}.items():
        assert highest_and_average(told, dict.fromkeys(told, 3)) == (pytest.approx(0.9),) * 2, cell


def test_a_linear_model_is_recovered_and_signals_are_what_they_are() -> None:
    s = torch.tensor([[1, 1], [-1, 1], [1, -1], [-1, -1]]).repeat(5, 1).float()
    found = LinearModel.fitted(s, 0.5 + s @ torch.tensor([1.5, -2.0]))
    assert (found.bias, found.position, found.token) == pytest.approx((0.5, 1.5, -2.0))
    assert found.score == pytest.approx(1.0)
    base = {"output_position": 1, "output_token": "Mary"}
    assert signals(base, {}) == (1, 1)
    assert signals(base, {"output_token": "John"}) == (1, -1)
    assert signals(base, {"output_position": 0}) == (-1, 1)


# -- the points where the first outside user got stuck ----------------------------------------------------------------


def test_sums_of_several_tokens_are_not_cut_to_one(models, data: Path, tmp_path, submission: Path) -> None:
    gemma = models["Gemma2ForCausalLM"]
    cells = cells_of("Gemma2ForCausalLM", "arithmetic", None)
    with pytest.raises(PlotError, match=r"answers take 3 tokens.*may write 1: give --new-tokens 3"):
        submit(gemma, cells, tmp_path, Settings(str(data), new_tokens=1))
    told = scores(submission)
    assert told["arithmetic_Gemma2ForCausalLM_ones_carry"]["new_tokens"] == 3
    assert told["arithmetic_LlamaForCausalLM_ones_carry"]["new_tokens"] == 1


def test_padding_does_not_shift_positions(models, data: Path) -> None:
    gpt2 = models["GPT2LMHeadModel"]
    prompts = Prompts(gpt2, question("ioi_task"))
    texts = ["After Mary and John went to the park, John gave a book to", "gave a book to", "Mary and John"]
    examples = [
        question("ioi_task").read({"prompt": t, "metadata": {"subject": "x", "indirect_object": "y"}}) for t in texts
    ]
    together = prompts.written(prompts.rows(examples), 2)
    assert together == [prompts.written(prompts.rows([e]), 2)[0] for e in examples]


def test_heads_of_another_models_defaults_are_refused(models, data: Path) -> None:
    pairs = read_split(question("ioi_task"), str(data), "train")
    for kind, found in models.items():
        study = HeadStudy.recorded(found, Prompts(found, question("ioi_task")), pairs[:6], 1 << 28)
        with pytest.raises(PlotError, match=r"2 blocks of 4 heads each; there is no head 7\.3"):
            study.require([(7, 3), (7, 9), (8, 6), (8, 10)])
        assert set(study.choose(4)) <= set(study.heads), kind
        assert study.width == (16 if kind == "Gemma2ForCausalLM" else 8)


def test_too_few_answered_pairs_are_told_as_such(models, data: Path) -> None:
    """A model that answers little leaves no pair that changes the variable: the message says what to give."""
    llama, asked = models["LlamaForCausalLM"], question("4_answer_MCQA")
    prompts = Prompts(llama, asked)
    pairs = answered(prompts, read_split(asked, str(data), "train"), 1)
    alone = [replace(p, source=p.base) for p in pairs[:6]]
    with pytest.raises(PlotError, match=r"answers 6 training pairs.*changes 'answer_pointer'.*--pairs"):
        find_units(prompts, alone, "answer_pointer", method="full-vector")


# -- parts ------------------------------------------------------------------------------------------------------------


def test_both_ways_to_score_agree(models, data: Path) -> None:
    llama, asked = models["LlamaForCausalLM"], question("4_answer_MCQA")
    prompts = Prompts(llama, asked)
    pairs = answered(prompts, read_split(asked, str(data), "train"), 1)
    subject, units = find_units(prompts, pairs, "answer", method="full-vector")
    test = read_split(asked, str(data), "test")
    scored = unit_scores([u.handle for u in units[-3:]], subject, prompts, test, 1)
    for unit, by_tokens in zip(units[-3:], scored, strict=True):
        rows = [prompts.rows([getattr(p, side) for p in test]) for side in ("base", "source")]
        with unit.handle.on(subject, rows[1], base=rows[0]):
            texts = prompts.written(rows[0], 1)
        hits = [asked.swapped(p.base, p.source, "answer") in t for p, t in zip(test, texts, strict=True)]
        by_hand = {f: [h for h, p in zip(hits, test, strict=True) if p.family == f] for f in by_tokens}
        assert by_tokens == pytest.approx({f: sum(h) / len(h) for f, h in by_hand.items()})


def test_training_never_looks_at_test_pairs_and_ranks_by_transport(models, data: Path) -> None:
    llama, asked = models["LlamaForCausalLM"], question("4_answer_MCQA")
    prompts = Prompts(llama, asked)
    pairs = read_split(asked, str(data), "train")
    options = {"dimensions": 4, "epochs": 4}
    whole, some, every = (
        find_units(prompts, pairs, "answer_pointer", method=m, places=1, **options)[1]
        for m in ("full-vector", "plot-das", "das")
    )
    assert not any(u.how.startswith("DAS") for u in whole)
    assert sum(u.how.startswith("DAS") for u in some) <= 1
    assert [u.place for u in whole] == [u.place for u in some] == [u.place for u in every]
    for least, middle, most in zip(whole, some, every, strict=True):  # a rotation that does worse is never taken
        assert least.calibration <= middle.calibration <= most.calibration
    assert sum(m.calibration for m in every) > sum(w.calibration for w in whole)
    with pytest.raises(PlotError, match="nonsense"):
        find_units(prompts, pairs, "answer", method="nonsense")


@pytest.mark.parametrize(
    ("task", "entry", "values", "expected"),
    [
        ("arithmetic", {"prompt": "Q: How much is 47 plus 85? A: "}, {"ones_carry": 1}, "132"),
        ("arithmetic", {"prompt": "Q: How much is 41 plus 5? A: "}, {"ones_carry": 0}, "046"),
        (
            "ioi_task",
            {"prompt": "After the lunch, Mary and John went to the park. Mary gave a book to"},
            {"output_position": 1, "output_token": "John"},
            "John",
        ),
        (
            "ioi_task",
            {"prompt": "Then ...", "metadata": {"subject": "Ann", "indirect_object": "Bob"}},
            {"output_position": 1, "output_token": "Bob"},
            "Bob",
        ),
        (
            "ravel_task",
            {"entity": "Lyon", "attribute": "Language", "prompt": "Lyon speaks"},
            {"Country": "France"},
            " French",
        ),
        ("ravel_task", {"entity": "Lyon", "attribute": "wikipedia", "prompt": "Lyon is"}, {"Country": "France"}, ""),
    ],
)
def test_entries_are_read_as_the_benchmark_reads_them(task: str, entry: dict, values: dict, expected: str) -> None:
    asked = question(task, standins.CITIES)
    example = asked.read(entry)
    assert {k: example.values[k] for k in values} == values
    assert asked.expected(example.values, {}) == expected


def test_swaps_say_what_the_causal_models_say() -> None:
    mcqa, sums, ravel = (question(t, standins.CITIES) for t in ("4_answer_MCQA", "arithmetic", "ravel_task"))
    first, second = (mcqa.read(e) for e in standins.pool("4_answer_MCQA")[:2])
    pointer = second.values["answer_pointer"]
    assert mcqa.swapped(first, second, "answer_pointer") == f" {first.values['symbols'][pointer]}"
    assert mcqa.swapped(first, second, "answer") == second.values["answer"]
    carrying, not_carrying = (sums.read({"prompt": f"{a} plus {b}"}) for a, b in ((47, 85), (41, 51)))
    assert sums.swapped(carrying, not_carrying, "ones_carry") == "122"
    assert sums.swapped(not_carrying, carrying, "ones_carry") == "102"
    paris, tokyo = (
        ravel.read({"entity": c, "attribute": "Country", "prompt": f"{c} is in"}) for c in ("Paris", "Tokyo")
    )
    assert ravel.swapped(paris, tokyo, "Country") == " Japan"
    assert ravel.swapped(paris, tokyo, "Language") == " France"


def test_an_answer_of_several_tokens_is_asked_for_token_by_token(models) -> None:
    gemma, asked = models["Gemma2ForCausalLM"], question("arithmetic")
    prompts = Prompts(gemma, asked)
    example = asked.read(standins.pool("arithmetic")[0])
    tokens = prompts.answer_tokens(example, asked.expected(example.values, {}))
    assert len(tokens) == 3
    subject = prompts.subject([[t] for t in sorted(set(tokens))], None, 1 << 28)
    rows = torch.tensor([[prompts.row(example, tokens[:j])] for j in range(3)])
    store = subject.record(rows)
    for name in ("block_output.0@last", "block_output.1@op2_last"):  # the prompt's own tokens, whatever follows
        assert torch.allclose(store.activations[name][0], store.activations[name][2], atol=1e-5)
    assert store.top_token.tolist() == tokens  # the model knows this sum by heart


# -- costs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "task", "variable"),
    [
        ("LlamaForCausalLM", "ioi", None),  # two cells that share their heads
        ("LlamaForCausalLM", "mcqa", "answer"),
        ("LlamaForCausalLM", "ravel", "Country"),  # some prompts ask for nothing, and run all the same
        ("Gemma2ForCausalLM", "arithmetic", None),  # answers of three tokens, written under each handle
    ],
)
def test_a_submission_runs_the_tokens_that_its_plan_has(
    kind: str, task: str, variable: str | None, models, data: Path, tmp_path, monkeypatch
) -> None:
    found, seen = models[kind], {"forward": 0, "backward": 0}
    found.model.save_pretrained(tmp_path / "model")
    found.tokenizer.save_pretrained(tmp_path / "model")
    # trained everywhere and to the last epoch, at the head that a plan expects: nothing is left to guess
    settings = Settings(str(data), standins.CITIES, method="das", epochs=2, dimensions=4, head_count=1)
    monkeypatch.setattr(HeadStudy, "choose", _choosing_the_expected(HeadStudy.choose))

    def count(_: Any, __: Any, out: Any) -> None:
        h = out[0] if isinstance(out, tuple) else out
        tokens = h.shape[0] * h.shape[1]
        seen["forward"] += tokens
        if h.requires_grad:
            h.register_hook(lambda _: seen.update(backward=seen["backward"] + tokens))

    hooks = [b.register_forward_hook(count) for b in blocks(found.model)]
    submit(found, cells_of(kind, task, variable), tmp_path / "out", settings)
    for hook in hooks:
        hook.remove()
    with monkeypatch.context() as patch:
        patch.setattr("plot_ot.models.named.load_model", None)  # nothing is loaded
        plan = plan_submission(str(tmp_path / "model"), CPU, settings, task=task, variable=variable)
    costs = [c for row in plan.rows for c in row.parts.values()]
    assert sum(c.backward for c in costs) == seen["backward"] > 0
    # a new subject also tries on one prompt whether it can be resumed and whether a trie gives the same
    assert 0.9 * seen["forward"] <= sum(c.forward for c in costs) <= seen["forward"]
    assert [row.name for row in plan.rows[1:]] == [c.folder for c in cells_of(kind, task, variable)]
    assert all(row.seconds["lowest"] <= row.seconds["expected"] <= row.seconds["highest"] for row in plan.rows)


def _choosing_the_expected(choose: Any) -> Any:
    def chosen(study: HeadStudy, count: int) -> Any:
        choose(study, count)
        return [study.heads[len(study.heads) // (count + 1)]]

    return chosen


def test_what_is_asked_for_changes_the_plan(models, data: Path, tmp_path) -> None:
    llama = models["LlamaForCausalLM"]
    llama.model.config.save_pretrained(tmp_path)  # no weights, no tokenizer
    usual = Settings(str(data), standins.CITIES)

    def responses(task: str, **changed: Any) -> float:
        plan = plan_submission(str(tmp_path), CPU, replace(usual, **changed), task=task)
        assert plan.counted
        return sum(row.responses for row in plan.rows)

    for task in ("mcqa", "ioi"):
        assert responses(task, method="full-vector") < responses(task) < responses(task, epochs=80), task
    every = responses("mcqa", method="das")  # there are six places, where plot-das trains too: it also ranks them
    assert responses("mcqa", places=1) < every < responses("mcqa")
    assert responses("ioi", heads=[(0, 1)]) < responses("ioi")
    with pytest.raises(PlotError, match=r"no head 7\.3"):
        responses("ioi", heads=[(7, 3)])


def test_the_command_explains_without_weights(data: Path) -> None:
    words = ["mib", "--data", str(data), "--cities", str(data / "cities.json"), "--explain", "--machine", "h100"]
    told = CliRunner().invoke(app, [*words, "--model", "google/gemma-2-2b", "--json"])
    assert told.exit_code == 0, told.exception
    rows = json.loads(told.stdout)["rows"]
    assert {c.folder for c in CELLS if c.model == "Gemma2ForCausalLM"} < set(rows)
    shown = CliRunner().invoke(app, [*words, "--model", MODELS["LlamaForCausalLM"], "--task", "arithmetic"])
    assert "counted in words and signs" in " ".join(shown.stdout.split())
    assert "arithmetic_LlamaForCausalLM_ones_carry" in shown.stdout.replace("\n", "")
    for wrong, said in (
        ([*words, "--model", "google/gemma-2-2b", "--machine", "h10"], "Did you mean 'h100'"),
        (["mib", "--model", "google/gemma-2-2b", "--machine", "h100"], "--machine is what --explain plans for"),
        (["explain", "mib"], "plot-ot mib --explain"),
    ):
        assert said in str(CliRunner().invoke(app, wrong).exception)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_is_not_in_the_track_is_refused(models, data: Path, tmp_path) -> None:
    with pytest.raises(PlotError, match="no model of class PhiForCausalLM"):
        cells_of("PhiForCausalLM", "all", None)
    with pytest.raises(PlotError, match="no cell of ARC_easy for GPT2LMHeadModel"):
        cells_of("GPT2LMHeadModel", "arc", None)
    with pytest.raises(PlotError, match="nonsense"):
        cells_of("GPT2LMHeadModel", "nonsense", None)
    with pytest.raises(PlotError, match="ones_carry"):
        cells_of("LlamaForCausalLM", "mcqa", "ones_carry")
    with pytest.raises(PlotError, match="ravel_city_entity"):
        question("ravel_task")
    cell = cells_of("Qwen2ForCausalLM", "mcqa", "answer")
    (tmp_path / cell[0].folder).mkdir()
    with pytest.raises(PlotError, match="is there already"):
        submit(models["Qwen2ForCausalLM"], cell, tmp_path, Settings(str(data)))


def test_what_is_missing_is_said_before_anything_runs(models, data: Path, tmp_path, monkeypatch) -> None:
    llama, cells = models["LlamaForCausalLM"], cells_of("LlamaForCausalLM", "all", None)
    monkeypatch.setattr("plot_ot.mib.submission.answered", None)  # would be the first to run the model
    with pytest.raises(PlotError, match="RAVEL needs the attributes"):
        submit(llama, cells, tmp_path, Settings(str(data)))
    assert not any(tmp_path.iterdir())


def test_of_several_tasks_one_that_the_model_cannot_do_is_left_out(models, data: Path, tmp_path, monkeypatch) -> None:
    def knows_only_choices(prompts: Prompts, pairs: Any, new_tokens: int) -> Any:
        return pairs if prompts.task.name == "4_answer_MCQA" else []

    monkeypatch.setattr("plot_ot.mib.submission.answered", knows_only_choices)
    qwen, quick = models["Qwen2ForCausalLM"], Settings(str(data), method="full-vector")
    with pytest.warns(PlotWarning, match=r"ioi_task is left out.*answers no training pair"):
        made = submit(qwen, cells_of("Qwen2ForCausalLM", "all", None), tmp_path, quick)
    assert {m["task"] for m in made} == {"4_answer_MCQA"}
    assert not (tmp_path / "ioi_linear_params.json").exists()
    with pytest.raises(PlotError, match="answers no training pair of ioi_task"):
        submit(qwen, cells_of("Qwen2ForCausalLM", "ioi", None), tmp_path, quick)


def test_data_that_does_not_fit_is_refused(tmp_path, data: Path) -> None:
    asked = question("4_answer_MCQA")
    folder = tmp_path / "data"
    folder.mkdir()
    with pytest.raises(PlotError, match="There is no train data"):
        read_split(asked, str(folder), "train")
    for missing in ("nodata", "./owner/name", "/data/none", "a/b/c"):
        with pytest.raises(PlotError, match=f"There is no file or folder {missing}, and a data set on the hub"):
            read_split(asked, missing, "train")
    (folder / "train.jsonl").write_text('{"prompt": "The lemon is yellow. What?"}')
    with pytest.raises(PlotError, match=r"train\.jsonl, entry 0: not an entry of 4_answer_MCQA"):
        read_split(asked, str(folder), "train")
    entry = standins.pool("4_answer_MCQA")[0]
    (folder / "train.jsonl").write_text(json.dumps(entry))
    with pytest.raises(PlotError, match="has no counterfactuals"):
        read_split(asked, str(folder), "train")
    (folder / "train.jsonl").write_text("{")
    with pytest.raises(PlotError, match="damaged"):
        read_split(asked, str(folder), "train")
    (tmp_path / "cities.json").write_text('{"Paris": {"Country": "France"}}')
    with pytest.raises(PlotError, match="Continent, Country, Language"):
        read_cities(tmp_path / "cities.json")
    families = {p.family for p in read_split(asked, str(data), "train")}
    assert families == {"answerPosition", "randomLetter", "answerPosition_randomLetter"}  # `noun` is left out


def test_data_come_from_the_hub_too(monkeypatch, tmp_path, data: Path) -> None:
    asked = question("4_answer_MCQA")
    with local_hub(monkeypatch, tmp_path / "cache") as hub:
        at = data / "copycolors_mcqa"
        files = {p.relative_to(at).as_posix(): p.read_bytes() for p in at.rglob("*.jsonl")}
        hub.files["datasets/mib-bench/copycolors_mcqa"] = {**files, "2_answer_choices/train.jsonl": b"{"}
        assert read_split(asked, None, "train") == read_split(asked, str(data), "train")
        with pytest.raises(PlotError, match="ann/nothing"):
            read_split(asked, "ann/nothing", "train")


def test_the_command_says_what_is_wrong(data: Path, tmp_path) -> None:
    for more, said in (
        (["--method", "magic"], "magic"),
        (["--heads", "7-3"], "expected layers and heads such as 7.3,8.10"),
        (["--cities", str(tmp_path / "none.json")], "missing"),
    ):
        done = CliRunner().invoke(app, ["mib", "--model", str(tmp_path), "--data", str(data), *more])
        assert isinstance(done.exception, PlotError)
        assert said in str(done.exception)
