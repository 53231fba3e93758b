"""Print the oldest versions that pyproject.toml allows, as pip constraints: for the library and its extra `hf`.

PyTorch is left to constraints.txt: its oldest allowed release exists for few machines without gigabytes of CUDA.
"""

from __future__ import annotations

import re
from pathlib import Path

LEAST = re.compile(r'"([A-Za-z0-9._-]+)>=([0-9.]+)"')
LISTS = re.compile(r"^(?:dependencies|hf) = \[(.*?)\]$", flags=re.DOTALL | re.MULTILINE)


def main() -> None:
    """One line a dependency."""
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    core, extra = LISTS.findall(project)
    for name, version in LEAST.findall(core + extra):
        if name != "torch":
            print(f"{name}=={version}")


if __name__ == "__main__":
    main()
