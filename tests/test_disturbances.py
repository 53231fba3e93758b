"""Random sequences of kills, changes, damage, resuming and saving: a run ends like a clean one, or is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from disturbances import campaign

pytest.importorskip("fcntl")
SCRIPT = Path(__file__).parent / "disturbances.py"
RUNS = int(os.environ.get("PLOT_OT_DISTURBED_RUNS", "2000"))


def test_disturbed_runs_end_like_clean_ones_or_are_refused(tmp_path):
    found = campaign(24, 1006, tmp_path, lambda words: None)
    assert found.failures == []
    assert found.counts["refused"]
    assert found.counts["equal"]


@pytest.mark.long
def test_thousands_of_disturbed_runs_end_like_clean_ones_or_are_refused():
    done = subprocess.run([sys.executable, str(SCRIPT), str(RUNS), "2000"], capture_output=True, text=True)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert int(re.findall(r"'runs': (\d+)", done.stdout)[-1]) > 0
