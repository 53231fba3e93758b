"""F21: every method works on networks in float16 and bfloat16, of every kind of subject."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from half_precision import KINDS

SCRIPT = Path(__file__).parent / "half_precision.py"
EVERY = {"plot", "das by riemannian", "das by adam", "das by oblique", "boundless", "mask", "linearised"}
PLANTED = ("plot-native", "plot-closed-form", "plot-newton")
"""Methods that find all of the planted network."""
OF_KIND = {"das-natural", "plot-newton", "plot-closed-form", "brute-force", "full-vector"}


def run(kind: str, dtype: str, *names: str) -> dict[str, list[str]]:
    """What every method came to, by name; whatever else goes wrong ends the script."""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    words = [sys.executable, str(SCRIPT), kind, dtype, *([",".join(names)] if names else [])]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]
    return {line.partition(": ")[0]: line.partition(": ")[2].split() for line in done.stdout.splitlines()}


def check(kind: str, dtype: str, *names: str) -> None:
    found = run(kind, dtype, *names)
    assert (set(names) or EVERY | OF_KIND) <= set(found)
    assert not {name for name, words in found.items() if "refused:" in words}
    if kind == "decoder":  # the planted network is found in half precision, too
        for name in PLANTED:
            assert [float(x) for x in found[name]] == [1.0] * 4, name


@pytest.mark.parametrize(
    ("kind", "dtype", "names"),
    [
        ("decoder", "bfloat16", (*PLANTED, "plot-pca-das", "das-natural", "mask", "linearised")),
        ("module", "float16", ("das", "das-natural", "das by oblique", "boundless", "mask")),
        ("gru", "bfloat16", ()),
    ],
)
def test_f21_methods_run_in_half_precision(kind, dtype, names):
    """Families of methods on some kinds of networks; all on all in `make test-long`."""
    check(kind, dtype, *names)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_f21_every_method_runs_in_half_precision_on_every_kind_of_network(kind, dtype):
    check(kind, dtype)
