"""Multiple-choice questions: against readings of the prompt text itself, and hand-written examples."""

import json
import re

import pytest
import torch

from plot_ot.abstract.banks import distinct_rows
from plot_ot.errors import PlotError
from plot_ot.models.vocabulary import FAMILIAR, FRESH, LETTERS, LEXICON, Lexicon, Noun
from plot_ot.tasks.mcqa_data import (
    FAMILIES,
    LATER_LETTERS,
    VARIABLES,
    causal_model,
    draw_rows,
    draw_splits,
    examples,
    questions,
    sources,
)
from plot_ot.tasks.mcqa_file import read_questions
from plot_ot.tasks.mcqa_text import COL, COLOUR, OBJECT, SYM, TEMPLATE, answer_tokens, encoder, render, says
from plot_ot.tasks.text_data import CELLS, Sizes, TextBanks
from refusals import assert_refused


def generator(seed: int = 1000) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def always(rows: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(rows), dtype=torch.bool)


@pytest.fixture(scope="module")
def banks() -> TextBanks:
    return draw_splits(1000, always)


def read(prompt: str) -> tuple[str, list[str], list[str]]:
    """Colour asked for, symbols and colours in order, by reading the text: the oracle."""
    fact = re.search(r"(?:is|are) (\w+)[.?]\s", prompt)
    lines = re.findall(r"^([A-Z])\. (\w+)$", prompt, re.M)
    assert fact is not None
    return fact[1], [s for s, _ in lines], [c for _, c in lines]


def answer(prompt: str) -> tuple[int, str]:
    colour, symbols, colours = read(prompt)
    at = colours.index(colour)
    return at + 1, symbols[at]


def test_the_paper_prompt_letter_by_letter() -> None:
    row = torch.tensor([[0, 0, 0, 2, 0, 1, 2, 3, 0, 1, 2, 3]])
    assert render(row) == [
        "Question: A banana is yellow. What color is a banana?\nA. red\nB. blue\nC. yellow\nD. green\nAnswer:"
    ]
    row[0, 1] = 1
    assert render(row)[0].startswith("Question: Bananas are yellow. What color are bananas?\nA. red")


def test_the_lexicon_has_a_hundred_different_objects() -> None:
    assert len(LEXICON.nouns) == 100
    assert len({n.one for n in LEXICON.nouns} | {n.many for n in LEXICON.nouns}) == 200
    assert {n.one for n in LEXICON.nouns} >= {"an egg", "an umbrella", "a banana"}
    assert not set(FAMILIAR) & set(FRESH)


def test_the_causal_model_agrees_with_reading_the_prompt() -> None:
    rows = draw_rows(300, generator(), letters=range(26), templates=(0, 1, 2))
    values = causal_model().run(rows)
    for prompt, ap, at in zip(render(rows), values["answer_pointer"], values["answer_token"], strict=True):
        assert answer(prompt) == (int(ap), LETTERS[int(at)])


def test_the_right_option_is_anywhere_and_alone() -> None:
    rows = draw_rows(400, generator())
    assert ((rows[:, COL] == rows[:, [COLOUR]]).sum(dim=1) == 1).all()
    pointer = causal_model().run(rows)["answer_pointer"]
    assert torch.bincount(pointer, minlength=5)[1:].min() > 60


@pytest.mark.parametrize("options", [2, 3])
def test_fewer_options(options: int) -> None:
    rows = draw_rows(50, generator(), options=options, letters=range(26))
    assert all(len(read(p)[1]) == options for p in render(rows))
    causal = causal_model()
    for family in FAMILIES:
        other = sources(rows, family, generator())
        assert [LETTERS[int(x)] for x in causal.answer(other)] == [answer(p)[1] for p in render(other)]


def test_usual_facts() -> None:
    asked = questions(facts="usual")
    assert len(asked) == len(FAMILIAR)
    assert (LEXICON.nouns[0].one, asked[0].tolist()) == ("a banana", [0, 2])


def test_families_change_what_they_say() -> None:
    base = draw_rows(500, generator())
    lines = [list(zip(*read(p)[1:], strict=True)) for p in render(base)]
    causal = causal_model()
    for family, cells in FAMILIES.items():
        source = sources(base, family, generator(1001))
        assert (source[:, [0, 1, 2, 3]] == base[:, [0, 1, 2, 3]]).all()
        after = [list(zip(*read(p)[1:], strict=True)) for p in render(source)]
        for old, new in zip(lines, after, strict=True):
            symbols_kept = [s for s, _ in old] == [s for s, _ in new]
            colours_kept = [c for _, c in old] == [c for _, c in new]
            assert sorted(c for _, c in old) == sorted(c for _, c in new)
            if family == "answerPosition":
                assert symbols_kept
                assert not colours_kept
            elif family == "randomLetter":
                assert colours_kept
            elif family == "lineOrder":
                assert sorted(old) == sorted(new)
                assert old != new
        a, b = causal.run(base), causal.run(source)
        found = {tuple(bool(a[v][k] != b[v][k]) for v in VARIABLES) for k in range(len(base))}
        assert found == set(cells)


def test_the_example_table_by_hand() -> None:
    found = {e["family"]: [e[k] for k in e if k.endswith("answer") or k.startswith("swap")] for e in examples()}
    assert found == {  # base, source, AP swap, AT swap: AP gives the base's symbol at the source's line
        "answerPosition": ["C", "B", "B", "B"],
        "randomLetter": ["C", "P", "C", "P"],
        "answerPosition_randomLetter": ["C", "T", "B", "T"],
        "lineOrder": ["C", "C", "A", "C"],
    }
    for e in examples():
        assert (answer(e["base"])[1], answer(e["source"])[1]) == (e["base_answer"], e["source_answer"])


# -- banks ----------------------------------------------------------------------------------------------------


def test_bank_sizes_and_shares(banks: TextBanks) -> None:
    splits = banks.splits
    assert torch.bincount(splits.fit.family).tolist() == [50] * 4
    for bank in (splits.calibration, *(splits.test[v, k] for v in VARIABLES for k in ("sensitivity", "invariance"))):
        assert len(distinct_rows(torch.cat([bank.base, bank.source], dim=1))) == len(bank)
    for v in VARIABLES:
        assert int(splits.calibration.changed[v].sum()) == 100
        assert int((~splits.calibration.changed[v]).sum()) == 100
        for held_out in (splits.test, banks.transfer):
            assert len(held_out[v, "sensitivity"]) == len(held_out[v, "invariance"]) == 100
            assert held_out[v, "sensitivity"].changed[v].all()
            assert not held_out[v, "invariance"].changed[v].any()
            assert held_out[v, "sensitivity"].power(v).discriminating >= 70
    cells = torch.stack([splits.calibration.changed[v] for v in VARIABLES], dim=1).tolist()
    for cell in CELLS:
        inside = torch.tensor([tuple(c) == cell for c in cells])
        counts = torch.bincount(splits.calibration.family[inside], minlength=4)
        able = [f for f, name in enumerate(FAMILIES) if cell in FAMILIES[name]]
        assert inside.sum() == 50
        assert counts[able].max() - counts[able].min() <= 1
        assert counts.sum() == counts[able].sum()


def test_splits_share_no_question(banks: TextBanks) -> None:
    def asked(*parts: torch.Tensor) -> set[tuple[int, ...]]:
        return {tuple(r) for r in torch.cat(parts)[:, [OBJECT, COLOUR]].tolist()}

    s = banks.splits
    test = [x for b in s.test.values() for x in (b.base, b.source)]
    transfer = [x for b in banks.transfer.values() for x in (b.base, b.source)]
    parts = [asked(s.fit.base, s.fit.source), asked(s.calibration.base, s.calibration.source), asked(*test)]
    parts.append(asked(*transfer))
    for i, a in enumerate(parts):
        for b in parts[i + 1 :]:
            assert not a & b


def test_transfer_banks_are_fresh(banks: TextBanks) -> None:
    for bank in banks.transfer.values():
        for rows in (bank.base, bank.source):
            assert set(rows[:, OBJECT].tolist()) <= set(FRESH)
            assert set(rows[:, SYM].flatten().tolist()) <= set(LATER_LETTERS)
            assert 0 not in rows[:, TEMPLATE]
    assert set(banks.splits.fit.base[:, TEMPLATE].tolist()) == {0}


def test_same_seed_same_banks(banks: TextBanks) -> None:
    again, other = draw_splits(1000, always), draw_splits(1001, always)
    assert torch.equal(again.splits.fit.source, banks.splits.fit.source)
    assert all(torch.equal(again.transfer[k].base, banks.transfer[k].base) for k in banks.transfer)
    assert not torch.equal(other.splits.fit.source, banks.splits.fit.source)


def test_only_pairs_with_both_prompts_right_are_kept() -> None:
    asked = 0

    def right(rows: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        assert len(distinct_rows(rows)) == len(rows)
        asked += len(rows)
        return rows.sum(dim=1) % 3 != 0

    drawn = draw_splits(1000, right, Sizes(40, 20, 20, 20))
    s = drawn.splits
    for bank in (s.fit, s.calibration, *s.test.values(), *drawn.transfer.values()):
        assert right(distinct_rows(torch.cat([bank.base, bank.source]))).all()
    for split, families in drawn.passed.items():
        for family, (passed, tried) in families.items():
            assert 0 < passed < tried
            assert drawn.pass_rates[split][family] == passed / tried


def test_a_model_that_cannot_do_the_task_is_refused_early() -> None:
    asked = 0

    def at_chance(rows: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        asked += len(rows)
        return torch.rand(len(rows), generator=generator(asked)) < 0.25

    words = ["fit bank", "answerPosition", "of 50", "at least 10%", "least_pass_rate"]
    assert_refused(lambda: draw_splits(1000, at_chance), words)
    assert asked < 500


def test_the_papers_families_alone() -> None:
    paper = tuple(FAMILIES)[:3]
    drawn = draw_splits(1000, always, Sizes(30, 10, 10, 10), families=paper)
    assert drawn.splits.fit.families == paper
    assert drawn.splits.calibration.sensitive("answer_pointer").power("answer_pointer").against_others["answer_token"]


def test_base_prompts_of_ones_own() -> None:
    own = draw_rows(60, generator(), letters=range(26))
    drawn = draw_splits(1000, always, Sizes(20, 8, 8, 8), bases=own)
    known = {tuple(r) for r in own.tolist()}
    assert {tuple(r) for r in drawn.splits.calibration.base.tolist()} <= known


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: draw_splits(1000, always, families=("answerPosition",)), ["changes answer_pointer", "Add"]),
        (lambda: draw_splits(1000, always, families=("answerposition",)), ["answerposition", "Did you mean"]),
        (lambda: draw_splits(1000, always, bases=draw_rows(1, generator())), ["1 different questions", "too few"]),
        (lambda: draw_splits(1000, lambda rows: True), ["one boolean per row", "True"]),
        (lambda: Sizes(test=2), ["test bank", "found 2"]),
        (lambda: draw_rows(3, generator(), options=5), ["2 to 4", "found 5"]),
        (lambda: draw_rows(3, generator(), letters=(0, 1)), ["4 different letters", "pool of 2"]),
        (lambda: questions(facts="true"), ["true", "usual"]),
        (lambda: render(torch.zeros(1, 3)), ["12", "(1, 3)"]),
        (lambda: render(torch.tensor([[0, 0, 0, 2, 0, 1, 3, 4, 0, 1, 2, 3]])), ["Row 0", "right option"]),
        (lambda: render(torch.tensor([[0, 0, 0, 2, 0, 1, 2, 4, 0, 1, 2, 2]])), ["Row 0", "symbols", "differ"]),
        (lambda: render(torch.tensor([[100, 0, 0, 2, 0, 1, 2, 4, 0, 1, 2, 3]])), ["Row 0", "object"]),
    ],
)
def test_refusals(attempt: object, words: list[str]) -> None:
    assert_refused(attempt, words)  # type: ignore[arg-type]


# -- tokens ---------------------------------------------------------------------------------------------------


class Characters:
    """A tokenizer with one token per character; `joined` are texts with a token of their own."""

    pad_token_id, eos_token_id, unk_token_id = None, None, 0

    def __init__(self, joined: dict[str, int] | None = None) -> None:
        self.joined = joined or {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.joined[text]] if text in self.joined else [ord(c) for c in text]

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(t) for t in texts]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_encoder_pads_left_after_an_explicit_bos() -> None:
    rows = draw_rows(20, generator())
    for bos in (None, 7):
        ids, mask = encoder(Characters(), bos=bos)(rows)
        for row, kept, prompt in zip(ids, mask, render(rows), strict=True):
            start = ids.shape[1] - len(prompt) - (bos is not None)
            assert kept.tolist() == [0] * start + [1] * (ids.shape[1] - start)
            expected = ([] if bos is None else [bos]) + [ord(c) for c in prompt]
            assert row[start:].tolist() == expected


def test_answer_tokens_have_both_spellings() -> None:
    groups = answer_tokens(Characters({" A": 1000}))
    assert groups[0] == [1000, ord("A")]
    assert groups[25] == [ord("Z")]


def test_colliding_answers_are_refused_by_name() -> None:
    assert_refused(lambda: answer_tokens(Characters({" B": 500, " C": 500})), ["B and C", "share", "500"])
    assert_refused(lambda: answer_tokens(Characters({"Q": 0})), ["no single token", "Q"])


def test_an_answer_counts_stripped_and_case_folded() -> None:
    tokens = torch.tensor([ord(c) for c in "Bb C"])
    assert says(Characters(), tokens, torch.tensor([1, 1, 1, 1])).tolist() == [True, True, False, False]


# -- the public file ------------------------------------------------------------------------------------------


def entry(prompt: str, key: object, **more: object) -> dict[str, object]:
    _, symbols, colours = read(prompt)
    return {"prompt": prompt, "choices": {"label": symbols, "text": colours}, "answerKey": key, **more}


def written(path: object, entries: list[dict[str, object]], suffix: str) -> object:
    file = path / f"questions{suffix}"  # type: ignore[operator]
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(entries), file)
    elif suffix == ".jsonl":
        file.write_text("\n".join(json.dumps(e) for e in entries))
    else:
        file.write_text(json.dumps(entries))
    return file


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_the_public_format_is_read_back(tmp_path: object, suffix: str) -> None:
    lexicon = Lexicon((*LEXICON.nouns, Noun("grass", "grass")))
    base = draw_rows(12, generator())
    base[3, :4] = torch.tensor([len(LEXICON.nouns), 0, 0, int(base[3, COLOUR])])
    source = sources(base, "answerPosition_randomLetter", generator())
    key = causal_model().run(base)["answer_pointer"] - 1
    entries = []
    for b, s, k in zip(render(base, lexicon), render(source, lexicon), key, strict=True):
        other = entry(s, answer(s)[0] - 1)
        entries.append(entry(b, int(k), answerPosition_randomLetter_counterfactual=other))
    found = read_questions(written(tmp_path, entries, suffix))  # type: ignore[arg-type]
    assert torch.equal(found.rows, base)
    assert list(found.pairs) == ["answerPosition_randomLetter"]
    assert torch.equal(found.pairs["answerPosition_randomLetter"][1], source)
    assert render(found.rows, found.lexicon)[3].count("rass") == 2


def test_a_question_without_its_prompt_is_completed(tmp_path: object) -> None:
    prompt = render(draw_rows(1, generator()))[0]
    only = entry(prompt, answer(prompt)[1])
    only["question"] = str(only.pop("prompt")).split("\n")[0].removeprefix("Question: ")
    assert render(read_questions(written(tmp_path, [only], ".json")).rows) == [prompt]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": "What now?"}, ["entry 1", "expected 'Question:", "What now?"]),
        ({"answerKey": "Z"}, ["entry 1", "answerKey is 'Z'"]),
        ({"choices": {"label": list("ABC"), "text": ["red"] * 3}}, ["entry 1", "4 choices", "3 texts"]),
        ({"choices": {"label": list("ABCD"), "text": ["red", "teal", "blue", "pink"]}}, ["entry 1", "'teal'"]),
        ({"choices": {"label": list("ABC1"), "text": ["red", "green", "blue", "pink"]}}, ["entry 1", "'1'"]),
        ({"choices": None}, ["entry 1", "`choices` with `label`"]),
    ],
)
def test_entries_that_do_not_fit_are_refused(tmp_path: object, change: dict[str, object], words: list[str]) -> None:
    prompt = render(draw_rows(1, generator()))[0]
    good = entry(prompt, answer(prompt)[0] - 1)
    file = written(tmp_path, [good, good | change], ".json")
    assert_refused(lambda: read_questions(file), words)  # type: ignore[arg-type]


def test_files_that_cannot_be_read(tmp_path: object) -> None:
    path = tmp_path / "q.csv"  # type: ignore[operator]
    assert_refused(lambda: read_questions(path), ["q.csv", ".parquet"])
    assert_refused(lambda: read_questions(path.with_suffix(".json")), ["no file"])
    path.with_suffix(".json").write_text("{")
    assert_refused(lambda: read_questions(path.with_suffix(".json")), ["damaged"])
    path.with_suffix(".parquet").write_bytes(b"x")
    assert_refused(lambda: read_questions(path.with_suffix(".parquet")), ["damaged"])


def test_questions_come_from_a_data_set_on_the_hub(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    prompts = render(draw_rows(2, generator()))
    files = {}
    for name, prompt in zip(("four/train.jsonl", "four/test.jsonl"), prompts, strict=True):
        folder = tmp_path / name.split("/")[1].split(".")[0]  # type: ignore[operator]
        folder.mkdir()
        files[name] = written(folder, [entry(prompt, answer(prompt)[1])], ".jsonl")
    asked = []

    def listed(repo: str, repo_type: str) -> list[str]:
        asked.append((repo, repo_type))
        return ["README.md", *files]

    monkeypatch.setattr(hub, "list_repo_files", listed)
    monkeypatch.setattr(hub, "hf_hub_download", lambda repo, name, **_: str(files[name]))
    assert render(read_questions("owner/copycolors").rows) == [prompts[1], prompts[0]]  # by file name
    assert render(read_questions("owner/copycolors:four/train").rows) == [prompts[0]]
    assert asked == [("owner/copycolors", "dataset")] * 2
    with pytest.raises(PlotError, match="no questions under 'five'"):
        read_questions("owner/copycolors:five")


def test_a_data_set_that_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def fails(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(hub, "list_repo_files", fails)
    with pytest.raises(PlotError, match="is neither a local file nor a hub data set: no route\\. Check"):
        read_questions("owner/copycolors")
