"""Run docs/tutorial.ipynb and keep its outputs.

    python scripts/run_tutorial.py          (about a minute of one core)

The charts of a result are megabytes of HTML and change with every run: they are left out, the table above them stays.
So are the traces of progress bars.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial.ipynb"
CHARTS = re.compile(r"<details><summary>Charts</summary>.*?</details>", re.S)


def main() -> None:
    """Execute in a directory of its own, then write the notebook back."""
    notebook = nbformat.read(TUTORIAL, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran says nothing
        if "outputs" in cell:
            cell.outputs = joined(cell.outputs)
        for output in cell.get("outputs", []):
            shown = output.get("data", {})
            if "text/html" in shown:
                shown["text/html"] = CHARTS.sub("", shown["text/html"])
                shown.pop("text/plain", None)  # all its tensors
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, TUTORIAL)


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Without what progress bars leave behind, and what was printed in one piece."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        if "text/html" in output.get("data", {}) and not output.data["text/html"].strip():
            continue
        if found and output.output_type == "stream" and found[-1].get("name") == output.name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


if __name__ == "__main__":
    main()
