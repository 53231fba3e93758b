"""The public surface: what docs/api.md names, can be imported, is documented and hides no module."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import plot_ot
from test_docs import DOCS, PAGES, ROOT, TUTORIAL, blocks, module_of, named

ENTRIES = re.findall(r"^::: (plot_ot[\w.]*)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M)
ROOMS = re.findall(r"^## `plot_ot\.(\w+)`$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M)
README = ROOT / "README.md"
NAMESPACES = {"plot_ot": plot_ot, **{f"plot_ot.{r}": importlib.import_module(f"plot_ot.{r}") for r in ROOMS}}


def public(namespace: types.ModuleType) -> dict[str, object]:
    return {name: getattr(namespace, name) for name in namespace.__all__ if name != "__version__"}


@pytest.mark.parametrize("where", NAMESPACES)
def test_every_public_name_is_in_the_reference_and_has_a_docstring(where):
    for name, thing in public(NAMESPACES[where]).items():
        same = [e for e in ENTRIES if e.rsplit(".", 1)[1] == name]
        assert any(getattr(NAMESPACES[e.rsplit(".", 1)[0]], name) is thing for e in same), (
            f"docs/api.md: {where}.{name}"
        )
        if isinstance(thing, type | types.FunctionType) and thing.__module__.startswith("plot_ot"):
            assert thing is plot_ot.neurons or thing.__doc__, f"{where}.{name}"  # `neurons` is a constant, commented


def test_every_name_in_the_reference_can_be_imported():
    assert len(set(ENTRIES)) == len(ENTRIES) > 100
    for entry in ENTRIES:
        where, name = entry.rsplit(".", 1)
        assert where in NAMESPACES, f"{entry}: {where} is no documented namespace"
        assert name in NAMESPACES[where].__all__, entry


@pytest.mark.parametrize("where", NAMESPACES)
def test_no_public_name_hides_a_module(where):
    namespace = NAMESPACES[where]
    modules = {m.name for m in pkgutil.iter_modules(namespace.__path__)}
    assert modules.isdisjoint(namespace.__all__)
    for name in modules - {"__main__"}:
        assert isinstance(importlib.import_module(f"{where}.{name}"), types.ModuleType)
        assert isinstance(getattr(namespace, name), types.ModuleType), f"{where}.{name} is not the module"


def imports(code: str) -> list[tuple[str, str | None]]:
    """(module, name) of every import of this package; the name is None where a module as such is imported."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, a.name) for a in node.names]
        elif isinstance(node, ast.Import):
            found += [(a.name, None) for a in node.names]
    return [f for f in found if f[0].split(".")[0] == "plot_ot"]


def documented_code() -> list[tuple[str, str]]:
    cells = json.loads(TUTORIAL.read_text(encoding="utf-8"))["cells"]
    pages = [(named(page), module_of(page, blocks(page, "python"))) for page in PAGES]
    return [*pages, *(("tutorial", "".join(c["source"])) for c in cells if c["cell_type"] == "code")]


def test_documentation_imports_public_names_only():
    seen = 0
    for page, code in documented_code():
        for module, name in imports(code):
            assert module in NAMESPACES, f"{page} imports from {module}"
            assert name is None or name in NAMESPACES[module].__all__ or f"{module}.{name}" in NAMESPACES, (page, name)
            seen += 1
    assert seen > 40


def test_dotted_names_in_the_text_of_the_documentation_exist():
    for page in PAGES:
        for dotted in re.findall(r"`(plot_ot(?:\.\w+)+)", page.read_text(encoding="utf-8")):
            names = dotted.split(".")
            at = 2 if ".".join(names[:2]) in NAMESPACES else 1
            thing = NAMESPACES[".".join(names[:at])]
            assert len(names) == at or names[at] in thing.__all__, f"{named(page)}: {dotted}"
            for name in names[at:]:
                thing = getattr(thing, name)


UNTYPED = (
    "allow-redefinition, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code=no-redef"
)


def test_the_first_examples_pass_mypy_strict(tmp_path):
    """README, first page, quick start as they stand, the tutorial but for annotations; one process: mypy is large."""
    pytest.importorskip("mypy")
    cells = [c for c in json.loads(TUTORIAL.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    pages = (README, DOCS / "index.md", DOCS / "quick-start.md")
    strict = {p.stem.replace("-", "_"): module_of(p, blocks(p, "python")) for p in pages}
    modules = {f"{name.lower()}.py": f"{code}# mypy: allow-redefinition\n" for name, code in strict.items()}
    modules["tutorial.py"] = "\n".join("".join(c["source"]) for c in cells) + f"\n# mypy: {UNTYPED}\n"
    for name, code in modules.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    config = ROOT / "pyproject.toml"
    assert "\nstrict = true\n" in config.read_text(encoding="utf-8").split("[tool.mypy]")[1].split("\n[")[0]
    # with the linter's own settings, what it knows of the package is not computed again
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--no-error-summary"]
    command += ["--cache-dir", str(ROOT / ".mypy_cache")]
    files = [str(tmp_path / name) for name in modules]
    said = subprocess.run([*command, *files], capture_output=True, text=True, cwd=ROOT, check=False)
    wrong = [line for line in said.stdout.splitlines() if Path(line.split(":")[0]).name in modules]
    assert not wrong, "\n".join(wrong)
    assert not said.stderr, said.stderr
