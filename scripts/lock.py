"""Write what can be installed, and what is: requirements.lock, the end of constraints.txt, and sbom.cdx.json.

`make lock` runs it. requirements.lock has every package of every extra and group that Python 3.11 on Linux needs, with the hashes
of its files for all systems, and no address of an index. torch is left out on purpose: its builds (CPU, CUDA, ROCm) are different files
of one version, and which one is right is for the machine to say. What torch itself needs is in.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
LOCK, CONSTRAINTS, SBOM = ROOT / "requirements.lock", ROOT / "constraints.txt", ROOT / "sbom.cdx.json"
MARK = "# -- what else comes along: written by `make lock` --"
OF_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
"""What every build of torch needs."""
HEADER = f"""# Every package of every extra and group (Python 3.11, Linux) with the hashes of its files: written by `make lock`, not by hand.
# Not in here: torch, whose builds for CPU and GPU are different files of one version ({{torch}}). Install it first, then
#     pip install --require-hashes --no-deps -r {LOCK.name} && pip install --no-deps plot-ot
"""


def pins() -> dict[str, str]:
    """The versions of everything, by name, as requirements.lock has them, with their markers."""
    found = re.findall(r"^([\w.-]+)==(\S+?)((?: ;[^\\\n]*)?) *\\?$", LOCK.read_text(encoding="utf-8"), re.M)
    return {name: f"{name}=={version}{marker}" for name, version, marker in found}


def lock(kept: str) -> None:
    """Resolve all extras under the constraints, without torch."""
    with tempfile.TemporaryDirectory() as folder:
        without, more = Path(folder) / "without.txt", Path(folder) / "more.in"
        without.write_text("torch ; python_version < '3'\n", encoding="utf-8")
        more.write_text("\n".join(OF_TORCH), encoding="utf-8")
        words = ["uv", "pip", "compile", "pyproject.toml", str(more), "--all-extras", "--generate-hashes"]
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
        words += [word for group in groups for word in ("--group", group)]
        words += ["-c", str(CONSTRAINTS), "--overrides", str(without), "--python-version", "3.11", "--no-annotate"]
        words += ["--python-platform", "x86_64-manylinux_2_28"]
        words += ["--no-header", "--quiet"]
        done = subprocess.run([str(BIN / words[0]), *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(done.stderr)
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("torch==", "--"))]
    torch = re.search(r"^torch==(\S+)", kept, re.M)
    LOCK.write_text(HEADER.format(torch=torch[1] if torch else "any") + "\n".join(lines) + "\n", encoding="utf-8")


def bill() -> None:
    """The bill of materials of this environment, as CycloneDX, without anything about this machine."""
    words = [str(BIN / "cyclonedx-py"), "environment", "--output-reproducible", "--pyproject", "pyproject.toml"]
    done = subprocess.run([*words, sys.executable], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(done.stderr)
    told = json.loads(done.stdout)
    for part in [*told["components"], told["metadata"].get("component", {})]:
        links = [r for r in part.pop("externalReferences", []) if str(r["url"]).startswith("https://")]
        if links:
            part["externalReferences"] = links
    SBOM.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Keep what was pinned by hand, pin what comes along, and list what is here."""
    text = CONSTRAINTS.read_text(encoding="utf-8")
    kept = text.partition(MARK)[0].rstrip() + "\n"
    lock(kept)
    mine = {re.sub(r"[-_.]+", "-", n).lower() for n in re.findall(r"^([\w.-]+)==", kept, re.M)}
    rest = [line for name, line in pins().items() if re.sub(r"[-_.]+", "-", name).lower() not in mine]
    CONSTRAINTS.write_text(kept + "\n" + MARK + "\n" + "\n".join(rest) + "\n", encoding="utf-8")
    bill()


if __name__ == "__main__":
    main()
