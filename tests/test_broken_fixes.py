"""Tests of what was mended can fail: with the fix undone, each does."""

import shutil
from pathlib import Path

import pytest

from broken_fixes import FIXES, ROOT, noticed, undo


def test_every_finding_has_a_fix_that_can_be_undone_and_a_test_that_is_there(tmp_path):
    items = {f.item for f in FIXES}
    assert items == {f"F{k}" for k in range(1, 27)}
    for k, fix in enumerate(FIXES):
        package = tmp_path / str(k)
        for file, *_ in fix.edits:
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "src" / "plot_ot" / file, package / file)
        undo(fix, package)
        for test in fix.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in Path(ROOT / file).read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("fix", FIXES, ids=lambda f: f"{f.item} {f.what}")
def test_with_a_fix_undone_its_test_fails(fix):
    assert noticed(fix) == []
