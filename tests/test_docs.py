"""What the documentation says must be so: its code runs, its commands, links, errors and names exist."""

from __future__ import annotations

import ast
import re
import shlex
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import plot_ot

ROOT = Path(__file__).parent.parent
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "plot_ot"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((DOCS / "results").glob("*.md"))]
TUTORIAL = DOCS / "tutorial.ipynb"
FENCE = re.compile(r"^(?:<!-- needs: (?P<needs>\w+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    text: str
    line: int
    needs: str | None


def blocks(page: Path, *kinds: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [Block(m["kind"], m["text"], text[: m.start("text")].count("\n"), m["needs"]) for m in FENCE.finditer(text)]
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
def page_module(request, tmp_path, monkeypatch) -> Iterator[types.ModuleType]:
    """A module to run a page in, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    module = types.ModuleType("documentation_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=named)
def test_code_on_a_page_runs_from_top_to_bottom(page, page_module):
    here = [b for b in blocks(page, "python") if not b.needs]
    exec(compile(module_of(page, here), named(page), "exec"), vars(page_module))  # noqa: S102


def test_code_that_needs_a_hub_model_or_a_gpu_is_type_checked(tmp_path):
    api = pytest.importorskip("mypy.api")
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
    out, err, _ = api.run([str(tmp_path), "--config-file", config, "--cache-dir", cache, "--no-error-summary"])
    assert not err
    wrong = []
    for line in out.splitlines():
        found = re.match(r"(?P<file>[^:]+):(?P<line>\d+): error: (?P<what>.*)", line)
        if found and Path(found["file"]).name in marked:
            page_name, lines = marked[Path(found["file"]).name]
            if int(found["line"]) in lines and "import-untyped" not in line and "import-not-found" not in line:
                wrong.append(f"{page_name} line {found['line']}: {found['what']}")
    assert not wrong, "\n".join(wrong)


def test_no_python_hides_in_an_unnamed_block():
    """Code without its language named would be neither coloured nor run."""
    for page in PAGES:
        for b in blocks(page, ""):
            assert not re.search(r"^(import|from) \w|plot-ot \w", b.text, re.M), f"{named(page)} line {b.line}"


def test_every_code_cell_of_the_tutorial_compiles_and_was_executed():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(TUTORIAL, as_version=4)
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    for c in cells:
        compile(c.source, TUTORIAL.name, "exec")
        assert not [o for o in c.outputs if o.output_type == "error"]


@pytest.mark.long
def test_the_tutorial_runs(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(TUTORIAL, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()


# -- commands -----------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    for page in TEXTS:
        for b in blocks(page, "bash", "console"):
            for k, line in enumerate(b.text.replace("\\\n", "  ").splitlines()):
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words[:1] == ["plot-ot"]:
                    yield f"{named(page)} line {b.line + k + 1}: {line}", words[1:]


def test_every_command_in_the_documentation_is_one():
    """Names, options and types; nothing is run."""
    import typer

    from plot_ot.cli import app

    seen = 0
    for said, words in commands():
        command, name = typer.main.get_command(app), "plot-ot"
        context = command.make_context(name, ["--help"], resilient_parsing=True)
        while hasattr(command, "commands"):
            assert words and words[0] in command.commands, said
            name, command = words[0], command.commands[words[0]]
            context, words = context.__class__(command, info_name=name, parent=context), words[1:]
        try:
            command.parse_args(context, list(words))
        except Exception as e:
            raise AssertionError(f"{said}\n{type(e).__name__}: {e}") from e
        seen += 1
    assert seen > 20


# -- links --------------------------------------------------------------------------------------------------------


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as mkdocs does it."""
    slugify = __import__("markdown.extensions.toc", fromlist=["slugify"]).slugify
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {slugify(re.sub(r"[`*]", "", h), "-") for h in headings}


@pytest.mark.parametrize("page", TEXTS, ids=named)
def test_links_inside_the_repository_lead_somewhere(page):
    pytest.importorskip("markdown")
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


# -- names, warnings and errors -----------------------------------------------------------------------------------


def test_every_public_name_has_a_docstring_and_an_entry_in_the_reference():
    reference = (DOCS / "api.md").read_text(encoding="utf-8")
    entries = {m.rsplit(".", 1)[1] for m in re.findall(r"^::: (plot_ot\.[\w.]+)$", reference, re.M)}
    for name in set(plot_ot.__all__) - {"__version__"}:
        assert name in entries, f"docs/api.md lacks {name}"
        assert getattr(plot_ot, name).__doc__, name


def strings(path: Path) -> list[str]:
    """All texts of a source file; in f-strings `\\0` stands for what is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def flag_names() -> set[str]:
    """What couplings call their degeneracies: all that the source appends to `flags`, up to colon or number."""
    tree = ast.parse((SOURCE / "transport.py").read_text(encoding="utf-8"))
    [function] = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_degeneracies"]
    said = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            [text] = node.args
            first = text.values[0] if isinstance(text, ast.JoinedStr) else text
            said.append(first.value)
    return {re.split(r":| at ", s)[0] for s in said}


def test_every_degeneracy_and_every_verdict_is_explained():
    page = (DOCS / "trust.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", page, re.M | re.S))
    assert len(flag_names()) == 6
    for flag in flag_names():
        assert flag in sections, f"docs/trust.md has no section '{flag}'"
        for part in ("**Symptom.**", "**Cause.**", "**Remedy.**"):
            assert part in sections[flag], f"'{flag}' lacks {part}"
    verdicts = re.findall(r'Verdict\(variable, "([\w ]+)"', (SOURCE / "stages" / "verdict.py").read_text("utf-8"))
    assert len(verdicts) == 3
    for verdict in verdicts:
        assert verdict in sections, f"docs/trust.md has no section '{verdict}'"
    extra = set(sections) - flag_names() - set(verdicts)
    assert not {s for s in extra if "`" not in s}, f"no such flag or verdict: {extra}"


def documented_errors() -> list[tuple[str, str]]:
    """(page, message) of every row of the tables with a column `message`."""
    found = []
    for page in PAGES:
        for table in re.findall(r"^\| message \|.*\n\|[-| ]+\n((?:\|.*\n)+)", page.read_text(encoding="utf-8"), re.M):
            for row in table.splitlines():
                first = re.split(r"(?<!\\)\|", row)[1]
                found += [(named(page), m) for m in re.findall(r"`([^`]+)`", first)]
    return found


def test_every_documented_error_is_in_the_source():
    said = [s for path in SOURCE.rglob("*.py") for s in strings(path)]
    for page, message in documented_errors():
        # an ellipsis, a quoted name, a number or a single capital stands for anything
        parts = [re.escape(p) for p in re.split(r"\.\.\.|'\w'|\b[XY]\b|\b\d+\b|[{}\[\]'\"]", message)]
        pieces = [p.strip("\\ ") for p in parts if len(p.strip("\\ ,;:")) > 3]
        assert pieces, f"{page}: {message}"
        for piece in pieces:
            assert any(re.search(piece, s) for s in said), f"{page}: nothing says '{piece}' of '{message}'"
