"""Cut docs/api.md into the pages of the site: each top heading starts a page.

One file is easier to keep in step with the code; pages by topic are easier to read. The first page keeps the name
`api.md` and ends in a list of the others, each with its first sentence.
"""

from __future__ import annotations

import re


def split_reference(text: str) -> dict[str, str]:
    """The pages by file name, in the order of the reference."""
    first, *others = re.split(r"(?m)^(?=# )", text.strip() + "\n")[1:]
    pages = {f"api-{_slug(page)}.md": page for page in others}
    listed = [f"- [{_title(page)}]({name}): {_summary(page)}" for name, page in pages.items()]
    return {"api.md": f"{first.rstrip()}\n\n## By topic\n\n" + "\n".join(listed) + "\n", **pages}


def _title(page: str) -> str:
    return page.splitlines()[0].removeprefix("# ")


def _slug(page: str) -> str:
    return re.sub(r"\W+", "-", _title(page).lower()).strip("-")


def _summary(page: str) -> str:
    paragraph = page.split("\n\n")[1].replace("\n", " ")
    return paragraph if not paragraph.startswith((":", "#")) else ""
