"""Pairs from lists, generators, files and tables: the same table from all of them, and errors that name the row."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.abstract.pairs import LONGEST_LINE, PairTable, read_inputs, read_pairs
from refusals import assert_refused

PAIRS = [
    ({"word": "red", "n": 1}, {"word": "blue", "n": 2}),
    ({"word": "7", "n": -3}, {"word": 'a, "b"\nc', "n": 0}),
    ({"word": "", "n": 10}, {"word": "é", "n": 10}),
]
LABELLED = [
    {"base": b, "source": s, "family": f"f{k % 2}", "split": ("fit", "calibration", "test")[k]}
    for k, (b, s) in enumerate(PAIRS)
]
FLAT = [
    {f"{side}.{n}": v for side in ("base", "source") for n, v in row[side].items()}
    | {k: row[k] for k in ("family", "split")}
    for row in LABELLED
]


def same(table: PairTable, labelled: bool = True) -> None:
    """The table holds exactly the pairs above."""
    assert list(zip(table.base, table.source, strict=True)) == PAIRS
    assert [type(v) for row in table.base for v in row.values()] == [str, int] * 3
    assert table.family == (("f0", "f1", "f0") if labelled else None)
    assert table.split == (("fit", "calibration", "test") if labelled else None)
    assert len(table.where) == len(table) == 3


def jsonl(path: Path, rows: list[Any], mark: str = "", end: str = "\n") -> Path:
    path.write_bytes((mark + end.join(json.dumps(r) for r in rows) + end).encode())
    return path


def as_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    import csv

    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_lists_tuples_and_generators() -> None:
    same(read_pairs(PAIRS), labelled=False)
    same(read_pairs([list(p) for p in PAIRS]), labelled=False)
    same(read_pairs(tuple(LABELLED)))
    same(read_pairs(p for p in FLAT))
    same(read_pairs({"fit": LABELLED_PLAIN[:1], "calibration": LABELLED_PLAIN[1:2], "test": iter(LABELLED_PLAIN[2:])}))


LABELLED_PLAIN = [{k: v for k, v in row.items() if k != "split"} for row in LABELLED]


def test_files(tmp_path: Path) -> None:
    same(read_pairs(jsonl(tmp_path / "a.jsonl", LABELLED)))
    same(read_pairs(str(jsonl(tmp_path / "b.jsonl", FLAT, mark="\ufeff", end="\r\n\n"))))
    same(read_pairs(jsonl(tmp_path / "c.JSONL", PAIRS)), labelled=False)
    table = read_pairs(as_csv(tmp_path / "a.csv", FLAT))
    same(table)
    assert table.notes == ("'n' was read as integers",)
    assert [w.split()[-1] for w in table.where] == ["2", "4", "5"]  # a cell of the second row goes over two lines


def test_tables() -> None:
    pandas = pytest.importorskip("pandas")
    same(read_pairs(pandas.DataFrame(FLAT)))
    same(read_pairs(pandas.DataFrame(LABELLED)))


def test_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(LABELLED)
    same(read_pairs(whole))
    same(read_pairs(datasets.Dataset.from_list(FLAT)))
    parts = {
        n: whole.filter(lambda r, n=n: r["split"] == n).remove_columns("split") for n in ("fit", "calibration", "test")
    }
    same(read_pairs(datasets.DatasetDict(parts)))


def test_splits_limits_and_endless_generators() -> None:
    table = read_pairs(LABELLED, split="calibration")
    assert (table.base, table.family, table.split) == ((PAIRS[1][0],), ("f1",), ("calibration",))
    assert len(read_pairs(LABELLED, split="fit")) == 1
    endless = ({"n": k} for k in count())
    table = read_pairs(endless, limit=5)
    assert [r["n"] for r in table.base] == [0, 1, 2, 3, 4]
    assert table.source == ()
    assert "first 5 rows" in table.notes[0]
    assert next(endless) == {"n": 5}
    assert_refused(lambda: read_pairs(PAIRS, split="fit"), ["do not say which split", "'fit'"])
    assert_refused(lambda: read_pairs(LABELLED, split="train"), ["Unknown split 'train'", "fit, calibration, test"])
    assert_refused(lambda: read_pairs(PAIRS, limit=0), ["limit", "0"])


def test_a_generator_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plot_ot.abstract.pairs.MOST_ROWS", 50)
    assert_refused(lambda: read_pairs({"n": k} for k in count()), ["more than 50", "limit="])
    assert len(read_pairs({"n": k} for k in range(50))) == 50


def test_inputs_alone(tmp_path: Path) -> None:
    inputs = [b for b, _ in PAIRS]
    assert read_inputs(inputs) == read_inputs(jsonl(tmp_path / "a.jsonl", inputs)) == inputs
    assert read_inputs(as_csv(tmp_path / "a.csv", inputs)) == inputs
    assert_refused(lambda: read_inputs(PAIRS), ["pair 0", "read_pairs"])


def test_numbers_in_csv_are_only_what_reads_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("base.a,source.a,base.b,source.b,base.c,source.c\n1,x,007,3,-0,1\n2,3,4,5,1,2\n")
    row = read_pairs(path).base[0]
    assert row == {"a": "1", "b": "007", "c": "-0"}


def test_tables_become_banks() -> None:
    h = Hypothesis(answers=[False, True])
    h.variable(name="long")(lambda word: len(word) > 1)
    h.output(name="y")(lambda long, n: long and n > 0)
    bank = read_pairs(LABELLED).bank(h, name="mine")
    assert bank.families == ("f0", "f1")
    assert bank.family.tolist() == [0, 1, 0]
    assert bank.changed["long"].tolist() == [False, True, False]
    assert bank.labels["long"].tolist() == [1, 0, 0]
    causal = CausalModel(["a", "b"], {"z": lambda a: a > 0, "y": lambda z, b: z & (b > 0)}, "y")
    pairs = [({"a": 0, "b": 1}, {"b": 0, "a": 1})]
    base, source = read_pairs(pairs).rows(causal)
    assert torch.equal(torch.cat([base, source]), torch.tensor([[0, 1], [1, 0]]))
    assert read_pairs(pairs).bank(causal).labels["z"].tolist() == [True]
    assert_refused(lambda: read_pairs([({"a": 1}, {"a": 2})]).bank(causal), ["pair 0, base", "expected a, b"])
    assert_refused(
        lambda: read_pairs([({"a": "1", "b": 2},) * 2]).bank(causal), ["'a' is '1'", "integers", "Hypothesis"]
    )
    assert_refused(lambda: read_pairs([({"a": 1}, {"a": 2})]).bank(h), ["pair 0, base lacks word, n"])


# -- refusals ---------------------------------------------------------------------------------------------------

GOOD = PAIRS[0]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ["empty", "at least one pair"]),
        ([GOOD, 3], ["pair 1", "3 (int)", "expected (base, source)"]),
        ([GOOD, {"n": 1}], ["pair 1 is an input alone", "pair 0 is a pair"]),
        ([{"n": 1}, GOOD], ["pair 1 is a pair", "pair 0 is an input alone"]),
        ([{"base": {"n": 1}}], ["pair 0", "neither of `source`", "'base'"]),
        ([{"base": {"n": 1}, "base.n": 1, "source.n": 2}], ["both of `base`"]),
        ([{"base": 3, "source": {"n": 1}}], ["pair 0, base must be a dict", "3"]),
        ([{"base": {}, "source": {"n": 1}}], ["pair 0, base must be a dict", "empty"]),
        ([{"base": {"n": 1}, "source": {"m": 1}}], ["same inputs", "m, n"]),
        ([{"base": {"n": 1}, "source": {"n": 1}, "id": 7}], ["unknown id", "family and split"]),
        ([{"base": {"n": 1}, "source": {"n": None}}], ["pair 0, source, 'n' is missing", "None"]),
        ([{"base": {"n": float("nan")}, "source": {"n": 1}}], ["pair 0, base, 'n' is missing", "nan"]),
        ([({"n": {"k": 1}}, {"n": 1})], ["pair 0, base, 'n'", "dict"]),
        ([({1: 2}, {1: 3})], ["names", "key 1"]),
        (
            [LABELLED[0], {k: LABELLED[1][k] for k in ("base", "source", "split")}],
            ["pair 1 has no `family`", "all or in none"],
        ),
        ([LABELLED[0] | {"split": "train"}], ["pair 0", "unknown split 'train'", "calibration"]),
        ([LABELLED[0] | {"family": 3}], ["`family` must be a name", "3"]),
        ({"train": PAIRS}, ["Unknown split 'train'"]),
        ({}, ["empty"]),
        ({"fit": LABELLED}, ["do not name a split themselves"]),
        ({"fit": LABELLED_PLAIN, "test": PAIRS}, ["families", "all or none"]),
        (3, ["Cannot read pairs from int", ".jsonl"]),
    ],
)
def test_bad_rows_are_named(rows: Any, words: list[str]) -> None:
    assert_refused(lambda: read_pairs(rows), words)


def test_a_generator_that_fails_is_named() -> None:
    def failing() -> Any:
        yield GOOD
        raise KeyError("colour")

    assert_refused(lambda: read_pairs(failing()), ["pair 1 failed", "KeyError", "colour"])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"", ["a.jsonl is empty"]),
        ("a.jsonl", b"\xef\xbb\xbf\n\n", ["is empty"]),
        ("a.jsonl", b'{"n": 1}\n{"n": }\n', ["line 2", "not JSON"]),
        ("a.jsonl", b'{"n": 1}\n\n{"n": 1, "n": 2}\n', ["line 3", "'n' stands there twice"]),
        ("a.jsonl", b'{"n": NaN}\n', ["line 1", "NaN"]),
        ("a.jsonl", b"[" * 100_000, ["line 1", "not JSON"]),
        ("a.jsonl", b'{"n": 1}\n[1, 2, 3]\n', ["line 2", "[1, 2, 3]"]),
        ("a.jsonl", b'{"n": "\xff"}\n', ["line 1", "UTF-8"]),
        ("a.jsonl", b'{"n": "' + b"x" * LONGEST_LINE + b'"}', ["line 1", "longer than"]),
        ("a.csv", b"", ["is empty"]),
        ("a.csv", b"base.n,source.n\n", ["is empty"]),
        ("a.csv", b"base.n,source.n\n1,2\n1,2,3\n", ["line 3", "3 cells", "2"]),
        ("a.csv", b"base.n,base.n\n1,2\n", ["line 1", "differ"]),
        ("a.csv", b"base.n,\n1,2\n", ["line 1", "names"]),
        ("a.csv", b'base.n,source.n\n"1,2\n', ["no CSV"]),
        ("a.csv", b"base.n;source.n\n1;2\n", ["line 2", "neither of `source`"]),
        ("a.csv", b"base.n,source.n\n" + b"x" * 200_000 + b",1\n", ["line 2", "no CSV", "field"]),
        ("a.json", b"[]", ["suffix", ".jsonl", ".csv"]),
    ],
)
def test_bad_files_are_named_by_line(tmp_path: Path, name: str, content: bytes, words: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    assert_refused(lambda: read_pairs(tmp_path / name), words)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert_refused(lambda: read_pairs(tmp_path / "none.csv"), ["There is no file", "none.csv"])
    (tmp_path / "folder.csv").mkdir()
    assert_refused(lambda: read_pairs(tmp_path / "folder.csv"), ["There is no file"])


def test_columns_that_stand_twice_in_a_table() -> None:
    pandas = pytest.importorskip("pandas")
    assert_refused(lambda: read_pairs(pandas.DataFrame([[1, 2]], columns=["a", "a"])), ["column twice", "a, a"])
    missing = pandas.DataFrame({"base.n": [1, None], "source.n": [1, 2]})
    assert_refused(lambda: read_pairs(missing), ["table row 1, base, 'n' is missing"])
    typed = pandas.DataFrame({"base.n": pandas.array([1, None], dtype="Int64"), "source.n": [1, 2]})
    assert_refused(lambda: read_pairs(typed), ["table row 1, base, 'n' is missing"])
