"""`plot-ot check` as a user meets it: what it shows of a good task, and what it says of a bad one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from plot_ot import cli
from plot_ot.abstract.banks import Bank
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.checking import check
from plot_ot.errors import PlotError
from refusals import assert_refused

TASK = """
import random
from plot_ot.abstract.hypothesis import Hypothesis

hypothesis = Hypothesis(
    template="{noun} {colour}.\\n{symbol0}. {colour0}\\n{symbol1}. {colour1}\\nAnswer:",
    answers=ANSWERS,
    positions={"first": "{symbol0}", "asked": "{colour}"},
    name="two lines",
)

@hypothesis.variable
def pointer(colour, colour0, colour1):
    return [colour0, colour1].index(colour)

@hypothesis.variable
def symbol(pointer, symbol0, symbol1):
    return (symbol0, symbol1)[pointer]

@hypothesis.output
def answer(symbol):
    return symbol

def draw(count, seed=1000):
    rng = random.Random(seed)
    for _ in range(count):
        (c0, c1), (s0, s1) = rng.sample(COLOURS, 2), rng.sample("ABCD", 2)
        asked, noun = rng.choice([c0, c1]), rng.choice(["a lemon is", "a wolf is"])
        yield dict(noun=noun, colour=asked, colour0=c0, colour1=c1, symbol0=s0, symbol1=s1)

print("the task's own words")
"""
COLOURS = 'COLOURS = ["red", "blue", "green", "pink"]\nANSWERS = "ABCD"\n'
PAIRS = "\npairs = list(zip(draw(400), draw(400, 1001)))\n"


def call(monkeypatch: Any, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plot-ot", "check", *words])
    monkeypatch.delenv("PLOT_OT_DEBUG", raising=False)
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture
def task(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Any:
    """Writes a task file, checks it, and gives exit code, standard output and standard error."""

    def run(text: str, *words: str) -> tuple[int, str, str]:
        path = tmp_path / "task.py"
        path.write_text(text)
        code = call(monkeypatch, str(path), *words)
        assert not (tmp_path / "__pycache__").exists()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return code, printed.out, printed.err

    return run


def executed() -> dict[str, Any]:
    """What the good task file defines."""
    space: dict[str, Any] = {}
    exec(COLOURS + TASK.replace("print", "str") + PAIRS, space)  # noqa: S102
    return space


def findings(task: Any, text: str, *words: str) -> dict[str, Any]:
    code, out, _ = task(text, "--json", *words)
    found = json.loads(out)
    assert code == (0 if found["ready"] else 1)
    assert found["ready"] == (not found["problems"])
    return found


def test_a_good_task_is_ready_and_its_tables_are_shown(task: Any) -> None:
    code, out, err = task(COLOURS + TASK + PAIRS, "--tokenizer", "tiny")
    assert code == 0
    assert out.rstrip().splitlines()[-1] == "ready"
    for word in ("pointer <- colour, colour0, colour1", "two lines", "400 pairs", "pointer+symbol", "calibration"):
        assert word in out
    for word in (
        "tell: pairs",
        "copying: the share",
        "Example prompt",
        "first: ",
        "from the end",
        "A = 'A'",
        "output variable",
        "swap pointer",
    ):
        assert word in out
    assert "the task's own words" in err


def test_the_numbers_are_those_of_the_bank(task: Any, tmp_path: Path) -> None:
    found = findings(task, COLOURS + TASK + PAIRS)
    space = executed()
    h: Hypothesis = space["hypothesis"]
    bank = Bank.from_pairs(h.causal, *(h.rows([p[k] for p in space["pairs"]]) for k in (0, 1)))
    assert found["pairs"] == len(bank)
    assert sum(found["families"]["all"].values()) == 400
    assert sum(sum(found["families"][s].values()) for s in ("fit", "calibration", "test")) == 400
    changes = {v: sum(b["power"]["sensitive"] for b in found["banks"] if b["variable"] == v) for v in bank.variables}
    assert changes == {v: int(bank.changed[v].sum()) for v in bank.variables}
    copied = {b["variable"]: b["copy_source"] for b in found["banks"] if b["split"] == "test"}
    assert copied["symbol"] == 1.0
    assert 0 < copied["pointer"] < 0.5
    for column, labels in (("base", bank.base_answer), ("swap pointer", bank.labels["pointer"])):
        assert found["answers"][column] == {a: n for k, a in enumerate("ABCD") if (n := int((labels == k).sum()))}
    example = found["example"]
    assert example["prompt"] == h.render(bank.base[:1])[0]
    assert {example["prompt"][a:b] for a, b in example["positions"].values()} == {
        space["pairs"][0][0]["symbol0"],
        space["pairs"][0][0]["colour"],
    }


def test_pairs_come_from_a_file_of_any_split(task: Any, tmp_path: Path) -> None:
    space = executed()
    rows = [{"base": b, "source": s, "family": "mine"} for b, s in space["pairs"]]
    cut = {"a lemon is": "fit", "a wolf is": "calibration"}
    for row in rows:
        row["split"] = "test" if row["base"]["colour"] == "pink" else cut[row["base"]["noun"]]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = findings(task, COLOURS + TASK, "--pairs", str(tmp_path / "p.jsonl"))
    assert found["ready"]
    assert found["families"]["all"] == {"mine": 400}
    assert found["families"]["test"] == {"mine": sum(r["split"] == "test" for r in rows)}
    rows[3]["split"] = "fit" if rows[3]["split"] == "test" else "test"
    assert any(row["base"] == rows[3]["base"] for row in rows if row is not rows[3])
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "share" in findings(task, COLOURS + TASK, "--pairs", str(tmp_path / "p.jsonl"))["problems"][0]


def test_inputs_alone_are_enough(task: Any) -> None:
    found = findings(task, COLOURS + TASK + "\ninputs = lambda: draw(600)\n")
    assert found["ready"]
    assert any("inputs without pairs" in n for n in found["notes"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TASK + PAIRS, ["task.py line 7", "NameError", "ANSWERS"]),
        ("def x(:\n", ["line 1", "SyntaxError"]),
        ("raise SystemExit(3)\n", ["line 1", "SystemExit"]),
        ("x = 1\n", ["must define `hypothesis`", "there is none"]),
        ("hypothesis = 3\npairs = [3]\n", ["must define `hypothesis`", "int"]),
        (COLOURS + TASK, ["neither `pairs` nor `inputs`", "--pairs"]),
        (COLOURS + TASK + "\npairs = []\n", ["empty"]),
        (COLOURS + TASK + "\ndef pairs():\n    return 1 / 0\n", ["line 36", "`pairs` failed", "ZeroDivisionError"]),
        (COLOURS + TASK + "\ndef pairs():\n    yield 1 / 0\n", ["pair 0 failed", "ZeroDivisionError"]),
        (COLOURS + TASK + "\npairs = [({'noun': 'x'}, {'noun': 'y'})]\n", ["pair 0, base lacks colour"]),
        (COLOURS + TASK + PAIRS.replace("400", "30"), ["at least 60"]),
        (COLOURS + TASK + "\npairs = list(zip(draw(400), draw(400)))\n", ["no pair changes 'pointer'"]),
        (
            COLOURS + TASK + "\npairs = [(b, s) for b, s in zip(draw(900), draw(900, 1)) if pointer(b['colour'], "
            "b['colour0'], b['colour1']) != pointer(s['colour'], s['colour0'], s['colour1'])]\n",
            ["every pair changes 'pointer'"],
        ),
        (COLOURS.replace("ABCD", "ABC") + TASK + PAIRS, ["'answer' returned 'D'", "not among the answers"]),
        (
            COLOURS + TASK.replace("{noun} {colour}.", "{noun}.").replace(', "asked": "{colour}"', "") + PAIRS,
            ["different answers", "leaves out an input"],
        ),
        (
            COLOURS.replace("blue", "red.\\nC. red") + TASK.replace('"{symbol0}"', "lambda d: '. red'") + PAIRS,
            ["'first'"],
        ),
    ],
)
def test_what_is_wrong_is_said_and_the_exit_code_is_one(task: Any, text: str, words: list[str]) -> None:
    code, out, _ = task(text)
    last = out.rstrip().splitlines()[-1]
    assert code == 1
    assert last.startswith("not ready: ")
    assert [w for w in words if w not in last] == [], last


def test_answers_are_checked_with_the_tokenizer(task: Any) -> None:
    text = COLOURS + TASK.replace("return symbol\n", "return symbol + '!'\n").replace(
        "=ANSWERS", "=['A!', 'B!', 'C!', 'D!']"
    )
    assert findings(task, text + PAIRS)["ready"]
    problems = findings(task, text + PAIRS, "--tokenizer", "tiny")["problems"]
    assert len(problems) == 1
    assert "A!, B!, C!, D!" in problems[0]


def test_a_saved_tokenizer_is_read_from_its_directory(task: Any, tmp_path: Path) -> None:
    from plot_ot.models.tiny import build_tokenizer

    build_tokenizer().save_pretrained(tmp_path / "words")
    found = findings(task, COLOURS + TASK + PAIRS, "--tokenizer", str(tmp_path / "words"))
    assert found["tokens"] == {a: [a] for a in "ABCD"}
    assert {n: t[1] for n, t in found["example"]["tokens"].items()} == {
        n: found["example"]["prompt"][a:b] for n, (a, b) in found["example"]["positions"].items()
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.py"], ["no task file", "none.py"]),
        (["{task}", "--tokenizer", "./nowhere"], ["no directory", "nowhere"]),
        (["{task}", "--tokenizer", "{folder}"], ["tokenizer", "cannot be read"]),
    ],
)
def test_what_cannot_be_looked_at_ends_in_one_line(
    words: list[str], said: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    path = tmp_path / "task.py"
    path.write_text(COLOURS + TASK + PAIRS)
    assert call(monkeypatch, *(w.format(task=path, folder=tmp_path) for w in words)) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert [w for w in said if w not in err.replace("\n", "")] == []


def test_debug_shows_where_the_task_fails(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "task.py"
    path.write_text(TASK)
    with pytest.raises(Exception, match="ANSWERS") as error:
        call(monkeypatch, str(path), "--debug")
    assert isinstance(error.value.__cause__, NameError)


# -- as a function ----------------------------------------------------------------------------------------------


def test_causal_models_and_tensors_can_be_checked() -> None:
    causal = CausalModel(
        ["a", "b", "c"],
        {"p": lambda a, b: a == b, "q": lambda b, c: b == c, "y": lambda p, q: p == q},
        "y",
    )
    rows = torch.randint(4, (500, 3), generator=torch.Generator().manual_seed(1000))
    assert check(causal, rows).ready
    assert check(causal, (rows, rows.flip(0))).pairs == 500
    found = check(causal, [({"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 1})] * 100)
    assert any("99 pairs stand there more than once" in n for n in found.notes)
    assert not found.ready
    with_letters = [({"a": "x", "b": 1, "c": 1},) * 2]
    assert_refused(lambda: check(causal, with_letters, strict=True), ["pair 0, base", "'a' is 'x'"])
    assert "'a' is 'x'" in check(causal, with_letters).verdict


def test_a_variable_that_pairs_cannot_tell_from_another_is_undecided() -> None:
    """Two names for one value: no pair can say which of them a swap was."""
    h = Hypothesis(answers=range(8))
    h.variable(name="one", parents=["a"])(lambda a: a % 4)
    h.variable(name="two", parents=["one"])(lambda one: 3 - one)
    h.output(name="y", parents=["two", "b"])(lambda two, b: two + 4 * b)
    found = check(h, [{"a": a, "b": b} for a in range(100) for b in (0, 1)])
    assert [p.split(" would ")[0] for p in found.problems] == ["'one'", "'two'"]
    assert all("swapping" in p for p in found.problems)


def test_a_prompt_that_ends_in_a_space_is_caught() -> None:
    pytest.importorskip("transformers")
    from test_hypothesis import fast

    h = Hypothesis(template="say {a}: ", answers=["one", "two"])
    h.variable(name="v", parents=["a"])(lambda a: a % 2)
    h.output(name="y", parents=["v"])(lambda v: ("one", "two")[v])
    words = fast([*(f" {n}" for n in range(100)), "say", ":", " ", " one", " two", "one", "two"])
    found = check(h, [{"a": n} for n in range(100)], tokenizer=words)
    assert any("Remove the space" in p for p in found.problems)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["missing.py", "--model", "tiny"], "There is no task file missing.py."),
        (["task.py", "--model", "tiny", "--method", "dsa"], "Unknown method 'dsa'. Did you mean 'das'?"),
        (["task.py", "--model", "tiny", "--layers", "x"], "expected numbers such as 10-20"),
        (["task.py"], "Which network? Give --model"),
        (["task.py", "--model", "tiny"], "a language model needs a Hypothesis with a template"),
    ],
)
def test_localize_refuses_before_a_model_is_loaded(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("plot_ot.api.load_subject", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "task.py").write_text(
        "import torch\nimport plot_ot\n"
        "hypothesis = plot_ot.CausalModel(['a'], {'v': lambda a: a, 'y': lambda v: v}, 'y')\n"
        "inputs = torch.zeros(3, 1, dtype=torch.long)\n"
    )
    found = CliRunner().invoke(cli.app, ["localize", *options])
    assert isinstance(found.exception, PlotError)
    assert words in str(found.exception)
    assert not (tmp_path / "runs").exists()


def test_too_few_base_inputs_for_any_verdict_are_foretold() -> None:
    """A perfect handle needs 15 base inputs to be shown to work, and 30 to be shown to leave the rest alone."""
    h = Hypothesis(answers=range(4))
    h.variable(name="one", parents=["a"])(lambda a: a % 2)
    h.variable(name="two", parents=["b"])(lambda b: b % 2)
    h.output(name="y", parents=["one", "two"])(lambda one, two: 2 * one + two)
    inputs = [{"a": a, "b": b} for a in range(40) for b in range(40)]
    few, many = check(h, inputs[:62]), check(h, inputs)
    assert any("leave the rest alone" in note and "at least 30 are needed" in note for note in few.notes)
    assert not any("base inputs" in note for note in many.notes)


def test_a_misspelt_model_of_a_task_gets_a_suggestion() -> None:
    pytest.importorskip("transformers")
    from plot_ot.cli.task_files import load_tokenizer

    with pytest.raises(PlotError, match=r"no directory tny with a tokenizer\. Did you mean 'tiny'\? Models known"):
        load_tokenizer("tny")
    with pytest.raises(PlotError, match=r"with a tokenizer\.$"):  # a path is a path
        load_tokenizer("./nothere")
