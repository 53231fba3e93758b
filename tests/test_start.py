"""Starting up: what is imported before anything is asked for, completion, and what a missing extra says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import plot_ot
from plot_ot import cli
from test_check import COLOURS, PAIRS, TASK

SRC = str(Path(plot_ot.__file__).parent.parent)
SLOW = ("torch", "numpy", "matplotlib", "plotly", "jinja2", "transformers")
LOOKING = """
import json, os, sys
sys.path.insert(0, {src!r})
try:
    {code}
except SystemExit:
    pass
told = [name for name in {slow!r} if name in sys.modules]
os.write(2, b"LOADED" + json.dumps(told).encode())
"""


def loaded(code: str, **environment: str) -> tuple[str, list[str]]:
    """What a fresh process prints for this line, and which slow packages it has imported in the end."""
    program = LOOKING.format(src=SRC, code=code, slow=SLOW)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"TERM": "dumb", **environment}, check=True
    )
    said, _, told = done.stderr.partition("LOADED")
    return done.stdout + said, json.loads(told)


def command(*words: str, **environment: str) -> tuple[str, list[str]]:
    argv = ["plot-ot", *words]
    return loaded(f"from plot_ot.cli import main; sys.argv = {argv!r}; main()", **environment)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "Where in this network"),
        (["-h"], "Where in this network"),
        (["run", "mcqa", "-h"], "--debug"),
        (["run", "ioi", "-h"], "--debug"),
        (["--version"], plot_ot.__version__),
        (["rnu"], "Did you mean 'run'?"),
        (["run", "heqq"], "heq"),
        (["run", "heq", "--sedes", "3"], "--seeds"),
        (["explain", "heq", "--machin", "h100"], "--machine"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_help_versions_and_typos_import_nothing_slow(words, said):
    printed, slow = command(*words)
    assert said in printed
    assert not slow


def test_shells_complete_commands_and_options():
    asked = {"_PLOT_OT_COMPLETE": "complete_bash", "COMP_WORDS": "plot-ot run heq --st", "COMP_CWORD": "3"}
    printed, slow = command(**asked)
    assert printed.split() == ["--strengths", "--start-over"]
    assert not slow
    printed, _ = command(**{**asked, "COMP_WORDS": "plot-ot ex", "COMP_CWORD": "1"})
    assert printed.split() == ["explain"]
    printed, _ = command(_PLOT_OT_COMPLETE="source_bash")  # --show-completion asks the process tree for the shell
    assert "_PLOT_OT_COMPLETE=complete_bash" in printed


def test_the_package_is_imported_without_torch_until_a_name_needs_it():
    assert loaded("import plot_ot; plot_ot.__version__; hasattr(plot_ot, '__wrapped__')")[1] == []
    assert "torch" in loaded("import plot_ot; plot_ot.localize")[1]


def test_names_modules_and_stars_are_there_as_ever():
    printed, _ = loaded("from plot_ot import *; import plot_ot; print(plot_ot.sites.neurons is neurons, Bank.__name__)")
    assert printed == "True Bank\n"
    assert set(plot_ot.public.__all__) <= set(dir(plot_ot))
    with pytest.raises(AttributeError, match="module 'plot_ot' has no attribute 'localise'"):
        plot_ot.localise  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'localise'"):
        from plot_ot import localise  # noqa: F401


@pytest.fixture
def without_hf(monkeypatch, tmp_path):
    for name in ("transformers", "tokenizers", "huggingface_hub", "peft", "gguf", "accelerate"):
        monkeypatch.setitem(sys.modules, name, None)  # what Python puts there for a package that cannot be imported
    monkeypatch.setenv("PLOT_OT_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "mcqa", "--pairs", "20"],
        ["run", "mcqa", "--model", "planted-1000"],
        ["run", "ioi", "--model", "HuggingFaceTB/SmolLM2-135M-Instruct"],
        ["localize", "task.py", "--model", "tiny"],
        ["check", "task.py", "--tokenizer", "tiny"],
        ["check", "task.py", "--tokenizer", "smollm2"],
    ],
    ids=" ".join,
)
def test_without_the_hf_extra_commands_name_it_in_one_line(without_hf, monkeypatch, capsys, tmp_path, words):
    (tmp_path / "task.py").write_text(COLOURS + TASK + PAIRS)
    monkeypatch.setattr(sys, "argv", ["plot-ot", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2
    assert "pip install 'plot-ot[hf]'" in said
    assert said.splitlines()[-1].startswith("error: ")
    assert len(said.splitlines()) <= 2  # the task file may print a line of its own


@pytest.mark.parametrize("name", ["tiny", "plain-1001", "owner/name"])
def test_without_the_hf_extra_loading_names_it(without_hf, name):
    with pytest.raises(plot_ot.PlotError, match=r"pip install 'plot-ot\[hf\]'"):
        plot_ot.load_subject(name)


def test_a_misspelt_model_is_suggested():
    pytest.importorskip("transformers")
    with pytest.raises(plot_ot.PlotError, match="Did you mean 'tiny'"):
        plot_ot.load_subject("tinny")
    with pytest.raises(plot_ot.PlotError, match="Did you mean 'smollm2'"):
        plot_ot.load_subject("smolm2")


def test_runs_show_tracebacks_on_request(monkeypatch):
    """`--debug` lets the error through that would else be one line."""
    monkeypatch.setattr(sys, "argv", ["plot-ot", "run", "heq", "--methods", "plott", "--debug"])
    with pytest.raises(plot_ot.PlotError, match="Did you mean 'plot'"):
        cli.main()


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("words", [[], ["run"], ["run", "heq"], ["localize"], ["explain"], ["show"]], ids=" ".join)
def test_help_fits_the_terminal_and_cuts_no_word(words, columns):
    """At 60 columns an option lost its end, and sentences stood in a column of ten letters."""
    printed, _ = command(*words, "--help", COLUMNS=str(columns))
    assert "…" not in printed
    assert "..." not in printed.replace("[ARGS]...", "").replace("}...", "").replace("DIRECTORIES...", "").replace(
        "cuda:1, ...", ""
    )
    assert max(map(len, printed.splitlines())) <= columns
    assert "│" not in printed
    assert "\\[" not in printed
    if not words:
        headings = ["Your own hypothesis:", "The studies that come with the package:", "What a run found:"]
        assert [line for line in printed.splitlines() if line in headings] == headings


def test_every_extra_that_a_message_or_page_names_exists():
    """`plot-ot[bench]` was named long after it had become a group of developers."""
    root = Path(SRC).parent
    declared = (root / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^([\w-]+) = \[", declared.partition("\n[")[0], re.M))
    assert "hf" in extras
    for path in [*Path(SRC).rglob("*.py"), *(root / "docs").rglob("*.md"), root / "README.md"]:
        for named in re.findall(r"plot-ot\[([\w,-]+)\]", path.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= extras, f"{path.name} names plot-ot[{named}]"
