"""Print the oldest versions that pyproject.toml allows, as pip constraints: `make test-minimum` installs exactly these.

PyTorch is left to constraints.txt: its oldest allowed release exists for few machines without gigabytes of CUDA.
"""

from __future__ import annotations

import re
from pathlib import Path

LEAST = re.compile(r'"([A-Za-z0-9._-]+)>=([0-9.]+)"')


def main() -> None:
    """One line a dependency of the library itself."""
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    [core] = re.findall(r"^dependencies = \[(.*?)^\]", project, flags=re.DOTALL | re.MULTILINE)
    for name, version in LEAST.findall(core):
        if name != "torch":
            print(f"{name}=={version}")


if __name__ == "__main__":
    main()
