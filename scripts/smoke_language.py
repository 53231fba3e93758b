"""Use an installed plot-ot[hf] once: the README's first example must print what the README says it prints."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def main() -> None:
    """Run the example and compare."""
    code, printed = re.findall(
        r"```python\n(.*?)```.*?<!-- printed -->\n```text\n(.*?)```", README.read_text("utf-8"), re.S
    )[0]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, str(README), "exec"), {"__name__": "__main__"})
    if printed.strip() not in said.getvalue():
        sys.exit(f"The README's example printed\n{said.getvalue()}\nwhere the README says\n{printed}")
    print(printed.strip())


if __name__ == "__main__":
    main()
