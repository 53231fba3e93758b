"""Long campaigns: atheris drives the damage by what it reaches in our code, one process per loader.

As a script it is the campaign of one loader: only PlotError may come of what is loaded; anything else ends it. With a
word that a failure printed it tries that one file again: `python tests/test_fuzz_long.py LOADER WORD`.
"""

import os
import random
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

if __name__ != "__main__":
    import pytest

    pytest.importorskip("atheris")
    from damage import TRIED, packed
    from loaders import LOADERS

    @pytest.mark.long
    @pytest.mark.parametrize("loader", LOADERS, ids=str)
    def test_a_campaign_finds_nothing(loader, tmp_path):
        runs = int(os.environ.get("PLOT_OT_FUZZ_RUNS", "3000"))
        words = [sys.executable, __file__, loader.name, f"-runs={runs}", "-seed=1000", "-rss_limit_mb=4096"]
        done = subprocess.run([*words, "-timeout=120"], cwd=tmp_path, capture_output=True, text=True)
        told = re.sub(r"INFO: Instrumenting.*\n", "", done.stdout + done.stderr)
        tried = [packed(path.read_bytes()) for path in tmp_path.glob(f"*/{TRIED}")]
        assert done.returncode == 0, f"{told}\nThe last file, packed: {tried}"
        inputs = int(re.search(r"Done (\d+) runs", told)[1])  # libFuzzer may do a few more than it is told
        assert inputs >= runs
        print(f"{loader}: {inputs} inputs")


def campaign(name: str) -> None:
    """Damage one loader's file as atheris says."""
    import atheris

    with atheris.instrument_imports(include=["plot_ot"]):
        from loaders import LOADERS
    from damage import Bench, damaged

    warnings.simplefilter("ignore")
    loader = next(x for x in LOADERS if x.name == name)
    bench = Bench(loader, Path(tempfile.mkdtemp(dir=Path.cwd())))

    def once(data: bytes) -> None:
        given = atheris.FuzzedDataProvider(data)
        bench.try_it(damaged(bench.sound, lambda n: given.ConsumeIntInRange(0, n - 1)))

    corpus, draw = Path(tempfile.mkdtemp(dir=Path.cwd())), random.Random(1000)
    for k in range(100):  # from nothing, libFuzzer would spend its runs on inputs of a few bytes
        (corpus / str(k)).write_bytes(draw.randbytes(draw.randint(16, 256)))
    atheris.Setup([sys.argv[0], *sys.argv[2:], "-len_control=0", "-max_len=512", str(corpus)], once)
    atheris.Fuzz()


def again(name: str, word: str) -> None:
    """Try the file that a failure printed."""
    from damage import Bench, unpacked
    from loaders import LOADERS

    loader = next(x for x in LOADERS if x.name == name)
    print(Bench(loader, Path(tempfile.mkdtemp())).try_it(unpacked(word)) or "It was taken.")


if __name__ == "__main__":
    campaign(sys.argv[1]) if sys.argv[2].startswith("-") else again(*sys.argv[1:])
