"""The description that the package index shows: README.md, whose links lead to files of the repository, made to stand alone.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ADDRESS = ""
"""Where the repository's files can be read, ending in a slash; nothing while they have no public address."""
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<path>[^)\s]+)\)")
APART = (
    "*Files named here (`docs/...`) are in the source distribution: `pip download --no-deps --no-binary :all: plot-ot`.*"
)


def description(readme: str, address: str = ADDRESS) -> str:
    """The README with absolute links or, without an address, with the names of files where links were."""
    if address:
        return LINK.sub(lambda m: f"{m['picture']}[{m['text']}]({address}{m['path']})", readme)
    first, _, rest = readme.partition("\n")
    return f"{first}\n\n{APART}\n{LINK.sub(_named, rest)}"


def _named(link: re.Match[str]) -> str:
    """A picture becomes its description, a link its text and the file's name."""
    if link["picture"]:
        return f"*{link['text']}.*"
    return link["text"] if link["text"] in link["path"] else f"{link['text']} (`{link['path']}`)"


if __name__ == "__main__":
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(long_description=description(readme), long_description_content_type="text/markdown")
