"""What the documentation says must be so: its code runs, its commands, links and names exist."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import types
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from plot_ot.judging.status import Status
from plot_ot.transport import Degeneracy

ROOT = Path(__file__).parent.parent
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "plot_ot"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((DOCS / "results").glob("*.md"))]
TUTORIAL = DOCS / "tutorial.ipynb"
FENCE = re.compile(r"^(?:<!-- (?P<note>[\w: ]+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    text: str
    line: int
    note: str
    """`needs: hub`, `needs: gpu`: checked, not run. `needs: lens`, `needs: nnsight`: run by the tests of these tools.
    `printed`: what the code before prints, up to numbers."""

    @property
    def needs(self) -> bool:
        return self.note.startswith("needs: ")


def blocks(page: Path, *kinds: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [
        Block(m["kind"], m["text"], text[: m.start("text")].count("\n"), m["note"] or "") for m in FENCE.finditer(text)
    ]
    notes = {b.note for b in found} - {"", "printed", "needs: hub", "needs: gpu", "needs: lens", "needs: nnsight"}
    assert not notes, f"{named(page)}: what does {notes} mean?"
    return [b for b in found if b.kind in kinds]


def module_of(page: Path, chosen: list[Block]) -> str:
    """The blocks as one module in which every line has the number it has on the page."""
    lines: list[str] = []
    for b in chosen:
        lines += [""] * (b.line - len(lines)) + b.text.splitlines()
    return "\n".join(lines) + "\n"


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# -- code ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def page_module(tmp_path, monkeypatch) -> types.ModuleType:
    """A module to run a page in, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr(
        "plot_ot.judging.bench.RANDOM_HANDLES", 10
    )  # a control of every result; fewer draws change no sentence
    module = types.ModuleType("documentation_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=named)
def test_code_on_a_page_runs_from_top_to_bottom(page, page_module, capsys):
    here = [b for b in blocks(page, "python") if not b.needs]
    exec(compile(module_of(page, here), named(page), "exec"), vars(page_module))  # noqa: S102
    printed = [without_numbers(line) for line in capsys.readouterr().out.splitlines()]
    for b in blocks(page, "text"):
        for line in b.text.splitlines() if b.note == "printed" else ():
            start = without_numbers(line.removesuffix("..."))
            assert any(p.startswith(start) for p in printed), (
                f"{named(page)} says it prints {line!r}; it prints {printed}"
            )


def without_numbers(text: str) -> str:
    """Machines round differently; what is said about the numbers must stay."""
    return re.sub(r"\d+(\.\d+)?", "#", text)


def test_code_that_needs_a_hub_model_or_a_gpu_is_type_checked(tmp_path):
    pytest.importorskip("mypy")
    marked: dict[str, tuple[str, set[int]]] = {}
    for page in PAGES:
        code = blocks(page, "python")
        if not any(b.needs for b in code):
            continue
        module = tmp_path / f"page_{page.stem.replace('-', '_').lower()}.py"
        module.write_text(module_of(page, code) + "# mypy: allow-redefinition\n", encoding="utf-8")
        lines = {n for b in code if b.needs for n in range(b.line + 1, b.line + 1 + b.text.count("\n"))}
        marked[module.name] = named(page), lines
    assert marked, "no page has a block that is marked `needs`"
    config, cache = str(ROOT / "pyproject.toml"), str(ROOT / ".mypy_cache")
    call = [sys.executable, "-m", "mypy", str(tmp_path), "--config-file", config, "--cache-dir", cache]
    # a process of its own: what mypy learns of torch is 1.7 GB that every later test would keep and walk
    done = subprocess.run(
        [*call, "--no-error-summary"], capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT / "src")}
    )
    assert not done.stderr
    wrong = []
    for line in done.stdout.splitlines():
        found = re.match(r"(?P<file>[^:]+):(?P<line>\d+): error: (?P<what>.*)", line)
        if found and Path(found["file"]).name in marked:
            page_name, lines = marked[Path(found["file"]).name]
            if int(found["line"]) in lines and "import-untyped" not in line and "import-not-found" not in line:
                wrong.append(f"{page_name} line {found['line']}: {found['what']}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", TEXTS, ids=named)
def test_no_page_has_a_blank_that_was_to_be_filled_in(page):
    """`@@TABLE@@` stood on a page for weeks."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    assert not re.findall(r"@@\w*|\bT[O]DO\b|\bFIX[M]E\b|\bXX[X]\b", text)


def test_no_python_hides_in_an_unnamed_block():
    """Code without its language named would be neither coloured nor run."""
    for page in PAGES:
        for b in blocks(page, ""):
            assert not re.search(r"^(import|from) \w|plot-ot \w", b.text, re.M), f"{named(page)} line {b.line}"


def test_every_code_cell_of_the_tutorial_compiles_and_was_executed():
    notebook = json.loads(TUTORIAL.read_text(encoding="utf-8"))
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
    for c in cells:
        compile("".join(c["source"]), TUTORIAL.name, "exec")
        assert not [o for o in c["outputs"] if o["output_type"] == "error"]


@pytest.mark.long
def test_the_tutorial_runs(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(TUTORIAL, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()


# -- commands -----------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    """What stands in blocks, fenced or indented, as a call of plot-ot."""
    for page in TEXTS:
        text = page.read_text(encoding="utf-8").replace("\\\n", "  ")
        indented = re.findall(r"^    (?:\$ )?(plot-ot .*)$", text, re.M)
        fenced = [line.removeprefix("$ ") for b in blocks(page, "bash", "console") for line in b.text.splitlines()]
        for line in [*indented, *fenced]:
            words = shlex.split(line, comments=True) if line.startswith("plot-ot ") else []
            if words:
                yield f"{named(page)}: {line}", words[1:]


def test_every_command_in_the_documentation_is_one():
    """Names, options and types; nothing is run."""
    import typer

    from plot_ot.cli import app

    seen = 0
    for said, words in commands():
        command, name = typer.main.get_command(app), "plot-ot"
        context = command.make_context(name, ["--help"], resilient_parsing=True)
        while hasattr(command, "commands"):
            assert set(words[:1]) & set(command.commands), said
            name, command = words[0], command.commands[words[0]]
            context, words = context.__class__(command, info_name=name, parent=context), words[1:]
        try:
            command.parse_args(context, list(words))
        except Exception as e:
            raise AssertionError(f"{said}\n{type(e).__name__}: {e}") from e
        seen += 1
    assert seen > 20


def test_the_quick_starts_task_file_is_ready(tmp_path):
    """The first block of the page is the file that its commands take."""
    from typer.testing import CliRunner

    from plot_ot.cli import app

    (tmp_path / "task.py").write_text(blocks(DOCS / "quick-start.md", "python")[0].text, encoding="utf-8")
    said = CliRunner().invoke(app, ["check", str(tmp_path / "task.py"), "--tokenizer", "tiny"])
    assert (said.exit_code, said.output.splitlines()[-1]) == (0, "ready"), said.output


# -- links --------------------------------------------------------------------------------------------------------


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(page: Path) -> set[str]:
    """What headings are called in links, by the rule of Python's Markdown."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    ascii_only = (unicodedata.normalize("NFKD", h).encode("ascii", "ignore").decode() for h in headings)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in ascii_only}


@pytest.mark.parametrize("page", TEXTS, ids=named)
def test_links_inside_the_repository_lead_somewhere(page):
    text = without_code(page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if path == "tutorial.md" and page.parent == DOCS:
            there = TUTORIAL  # the site makes the page of the notebook
        assert there.exists(), f"{named(page)}: {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{named(page)}: {target}; there are {sorted(anchors(there))}"


def test_every_page_is_in_the_sites_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in [*DOCS.glob("*.md"), *(DOCS / "results").glob("*.md")]:
        assert f": {page.relative_to(DOCS).as_posix()}\n" in menu, f"{named(page)} is not in mkdocs.yml"


def test_the_menu_is_short_where_a_reader_looks():
    """A8: nineteen results in one list, and a reference on one page."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for group in ("Start", "Understand", "Use", "Extend", "Results"):
        [entries] = re.findall(rf"^  - {group}:\n((?:      .*\n)+)", menu, re.M)
        assert 1 < len(re.findall(r"^      - ", entries, re.M)) <= 8, group


def test_the_reference_is_cut_into_pages_that_hold_all_of_it():
    path = ROOT / "scripts" / "split_reference.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    whole = (DOCS / "api.md").read_text(encoding="utf-8")
    pages = module.split_reference(whole)
    entries = re.findall(r"^::: (\S+)$", whole, re.M)
    assert [e for page in pages.values() for e in re.findall(r"^::: (\S+)$", page, re.M)] == entries
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for name, page in pages.items():
        assert f": {name}\n" in menu, f"{name} is not in mkdocs.yml"
        assert page.startswith("# ")
        assert len(re.findall(r"^::: ", page, re.M)) <= 60, (
            f"{name} has grown too long: give docs/api.md another heading"
        )


# -- the package index --------------------------------------------------------------------------------------------


def test_the_package_indexs_page_has_no_link_that_leads_nowhere():
    """A6: links relative to the repository are dead on the page of the package index."""
    path = ROOT / "setup.py"
    spec = importlib.util.spec_from_file_location("package_setup", path)
    assert spec is not None
    assert spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = re.compile(r"\]\((?!https?:|#)")
    assert len(relative.findall(readme)) > 10
    alone, addressed = setup.description(readme), setup.description(readme, "https://example.org/plot/")
    assert not relative.search(alone)
    assert "five pictures (`docs/five-pictures.md`)" in alone
    assert not relative.search(addressed)
    assert "](https://example.org/plot/docs/figures/pointer.png)" in addressed
    code = [b.text for b in blocks(ROOT / "README.md", "python", "bash", "text", "bibtex")]
    assert all(text in alone for text in code)


# -- names, warnings and errors -----------------------------------------------------------------------------------


def test_every_degeneracy_and_every_status_is_explained():
    page = (DOCS / "trust.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", page, re.M | re.S))
    for flag in Degeneracy:
        assert flag in sections, f"docs/trust.md has no section '{flag}'"
        for part in ("**Symptom.**", "**Cause.**", "**Remedy.**"):
            assert part in sections[flag], f"'{flag}' lacks {part}"
    for status in (Status.UNDECIDED, Status.OUTPUT, Status.ABSENT):
        assert status in sections, f"docs/trust.md has no section '{status}'"
    extra = set(sections) - {*Degeneracy, *Status}
    assert not {s for s in extra if "`" not in s}, f"no such flag or status: {extra}"


# -- architecture -------------------------------------------------------------------------------------------------


def files_named(page: Path) -> Iterator[tuple[str, list[Path]]]:
    """Every file that a page names, and where it may be: in its room of the table, the package, or the root."""
    for line in FENCE.sub("", page.read_text(encoding="utf-8")).splitlines():
        room = re.match(r"\| `([\w/]+)/` \|", line)
        folders = [SOURCE / room[1]] if room else [SOURCE, SOURCE.parent, ROOT]
        for name in re.findall(r"`([\w./-]+\.(?:py|md|js|j2))`", line):
            yield name, [folder / name for folder in folders]


def test_the_architecture_names_files_that_exist():
    named_files = list(files_named(DOCS / "architecture.md"))
    missing = [name for name, places in named_files if not any(p.is_file() for p in places)]
    assert not missing
    assert len(named_files) > 100


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "architecture.md"], ids=named)
def test_files_of_the_package_that_a_page_names_exist(page):
    rooms = {p.name for p in SOURCE.iterdir()} | {"plot_ot", "tests", "benchmarks", "scripts", "docs"}
    ours = [(name, places) for name, places in files_named(page) if "/" in name and name.split("/")[0] in rooms]
    assert not [name for name, places in ours if not any(p.is_file() for p in places)]


def test_the_architecture_lists_every_room_in_the_order_of_the_imports():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    listed = [
        name.removesuffix("/").removesuffix(".py") for name in re.findall(r"^\| `([\w/]+(?:/|\.py))` \|", page, re.M)
    ]
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("layers = [")[2].partition("]")[0]
    assert [name for name in listed if "/" not in name] == re.findall(r'"(\w+)"', contract)
    rooms = {p.parent.relative_to(SOURCE).as_posix() for p in SOURCE.rglob("*.py")} - {"."}
    assert rooms <= set(listed)
