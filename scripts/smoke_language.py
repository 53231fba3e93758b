"""Use an installed plot-ot[hf] once: the README's first example must print what the README says it prints.

Its words must be the same, and its numbers within a tenth: other processors and versions round otherwise, and a pair or
two may fall to the other side.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


NUMBER = re.compile(r"\d+\.\d+")


def agrees(said: str, printed: str) -> bool:
    """Whether what was said begins with what the README prints, up to small differences in numbers."""
    lines = said.strip().splitlines()[: len(printed.strip().splitlines())]
    pairs = zip(NUMBER.findall("\n".join(lines)), NUMBER.findall(printed), strict=False)
    same = [NUMBER.sub("#", line) for line in lines] == [NUMBER.sub("#", x) for x in printed.strip().splitlines()]
    return same and all(abs(float(a) - float(b)) <= 0.1 for a, b in pairs)


def main() -> None:
    """Run the example and compare."""
    code, printed = re.findall(
        r"```python\n(.*?)```.*?<!-- printed -->\n```text\n(.*?)```", README.read_text("utf-8"), re.S
    )[0]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, str(README), "exec"), {"__name__": "__main__"})
    if not agrees(said.getvalue(), printed):
        sys.exit(f"The README's example printed\n{said.getvalue()}\nwhere the README says\n{printed}")
    print(printed.strip())


if __name__ == "__main__":
    main()
