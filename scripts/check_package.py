"""Check what `python -m build` made: a wheel that is small and whole, and a source distribution whose tests run.

    python scripts/check_package.py dist

Every test of the source distribution is collected, and those of one file are run, with the Python of this environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

LARGEST = 3_000_000
IN_WHEEL = ("plot_ot/py.typed", "plot_ot/report/assets/page.html.j2", "plot_ot/models/assets/tiny/tokenizer.json")
IN_SOURCE = (
    *("tests/conftest.py", "tests/nets.py", "tests/data/heq-1003.safetensors", "tests/truth/known.py"),
    *("benchmarks/pages.py", "docs/quick-start.md", "adapters/smollm2/planted-1000/planted.json"),
    "models/tiny/planted-1001.safetensors",
    *("Makefile", "constraints.txt", "CITATION.cff", "examples/pointer.py"),
)


def main() -> None:
    """Refuse a folder without exactly one of each, a file that is missing, or a wheel that has grown."""
    folder = Path(sys.argv[1])
    [wheel], [source] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    size = wheel.stat().st_size
    if size > LARGEST:
        sys.exit(f"{wheel.name} has {size:,} bytes; at most {LARGEST:,} are meant.")
    _refuse_missing(wheel, IN_WHEEL, zipfile.ZipFile(wheel).namelist())
    with tarfile.open(source) as archive:
        _refuse_missing(source, IN_SOURCE, [name.partition("/")[2] for name in archive.getnames()])
    _run_tests(source)
    print(f"{wheel.name}: {size:,} bytes; {source.name}: {source.stat().st_size:,} bytes.")


def _run_tests(source: Path) -> None:
    """Collect all tests of the unpacked source distribution, and run those of the transport."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
        [home] = Path(folder).iterdir()
        own = os.environ | {"PYTHONPATH": str(home / "src")}
        for words in (["--collect-only"], ["tests/test_transport.py"]):
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
            done = subprocess.run(command, cwd=home, env=own, capture_output=True, text=True, check=False)  # noqa: S603
            if done.returncode:
                sys.exit(f"{source.name}: its tests do not run.\n{done.stdout[-3000:]}{done.stderr[-1000:]}")


def _refuse_missing(archive: Path, wanted: tuple[str, ...], found: list[str]) -> None:
    missing = sorted(set(wanted) - set(found))
    if missing:
        sys.exit(f"{archive.name} lacks {', '.join(missing)}.")


if __name__ == "__main__":
    main()
