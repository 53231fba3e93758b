"""Hooks of the documentation site: the notebook becomes a page with its saved outputs, the reference several pages."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from split_reference import split_reference

NOTEBOOK = "tutorial.ipynb"
REFERENCE = "api.md"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put `tutorial.md` and its pictures in the place of the notebook, and pages by topic in that of the reference."""
    source = Path(config.docs_dir) / NOTEBOOK
    page, pictures = markdown(json.loads(source.read_text(encoding="utf-8")))
    files.append(File.generated(config, NOTEBOOK.replace(".ipynb", ".md"), content=page))
    for name, picture in pictures.items():
        files.append(File.generated(config, name, content=picture))
    whole = files.get_file_from_path(REFERENCE)
    if whole is not None:
        files.remove(whole)
        for name, part in split_reference(whole.content_string).items():
            files.append(File.generated(config, name, content=part))
    return files


def markdown(notebook: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            parts += _shown(output, pictures)
    return "\n\n".join(parts) + "\n", pictures


def _shown(output: dict[str, Any], pictures: dict[str, bytes]) -> Iterator[str]:
    """The richest form of an output that a page can hold."""
    data = output.get("data", {})
    if "image/png" in data:
        name = f"tutorial-{len(pictures) + 1}.png"
        pictures[name] = base64.b64decode("".join(data["image/png"]))
        yield f"![What the code above draws]({name})"
    elif "text/html" in data:
        html = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]))  # Markdown would end the block at an empty line
        yield f'<div class="notebook-output">\n{html}\n</div>'
    else:
        text = "".join(output.get("text") or data.get("text/plain", ""))
        yield f"```text\n{ESCAPES.sub('', text).rstrip()}\n```"
