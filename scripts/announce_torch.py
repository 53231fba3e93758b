"""Say what installing PyTorch will download, before it is downloaded: `make` calls this first.

On Linux the default build of PyTorch brings several gigabytes of CUDA libraries, even where there is no GPU to use
them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec

CUDA = "nvidia-"


def main() -> None:
    """Ask pip what it would install for torch, and speak only if that is CUDA on a machine without a GPU."""
    if find_spec("torch") or shutil.which("nvidia-smi"):
        return
    asked = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", "torch", *sys.argv[1:]],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:  # the installation itself will say what is wrong
        return
    names = [entry["metadata"]["name"] for entry in json.loads(asked.stdout)["install"]]
    if any(name.startswith(CUDA) for name in names):
        print(
            "This machine shows no NVIDIA GPU, but the build of PyTorch that pip has found comes with several gigabytes "
            "of CUDA libraries. To take the CPU build (about 200 MB) instead, stop here (Ctrl-C) and run make again "
            "with the variable\n"
            "    PIP_EXTRA_INDEX_URL\n"
            "set to PyTorch's index of CPU builds, which pytorch.org shows under 'Get started' (Linux, Pip, CPU). "
            "Going on with CUDA ..."
        )


if __name__ == "__main__":
    main()
