"""What was mended after the package was attacked (F1-F26), each undone in one place, and the test that must then fail.

    python tests/broken_fixes.py            # undoes all of them, one after the other, in copies of the package
    python tests/broken_fixes.py F3 F8      # only these

A fix that cannot be undone like this any more, because its lines were rewritten, is an error: write it anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Undone:
    """A fix, how it is undone, and the tests that notice."""

    item: str
    what: str
    edits: tuple[tuple[str, str, str], ...]
    """Files below src/plot_ot, the text that is there, and what it is replaced by."""
    tests: tuple[str, ...]


def undone(item: str, what: str, file: str, old: str, new: str, *tests: str) -> Undone:
    return Undone(item, what, ((file, old, new),), tests)


GLOBAL = """class _Everywhere:
    value: frozenset[object] = frozenset()

    def get(self) -> frozenset[object]:
        return self.value

    def set(self, value: frozenset[object]) -> None:
        self.value = value


_open = _Everywhere()
"""
BY_TIME = """all(p.stat().st_mtime <= (run / RESULTS).stat().st_mtime for _, p in units_in(run))"""
REQUIRE = ("files/run_directory.py", "if said := differences(told, of):", 'if said := "":')
MIXED, SHARED, SERVE, EDITS, STRANGE = (
    f"tests/test_{name}.py::test_" for name in ("nothing_mixed", "shared", "serve", "open_edits", "strangers")
)

FIXES = (
    undone(
        "F1",
        "code that comes with a model",
        "models/loading.py",
        "load(source, trust_remote_code=False, **options)",
        "load(source, **options)",
        f"{STRANGE}f1_code_that_comes_with_a_model_is_refused_without_a_question",
    ),
    undone(
        "F2",
        "figures in a sandbox",
        "report/serve.py",
        "base-uri 'none'; sandbox\"",
        "base-uri 'none'\"",
        f"{SERVE}f02_everything_that_is_served_has_a_policy_and_a_strangers_svg_is_in_a_sandbox",
    ),
    undone(
        "F2",
        "links out of a run",
        "report/serve.py",
        "if e.is_file(follow_symlinks=False)]",
        "if e.is_file()]",
        f"{SERVE}f02_links_out_of_a_run_are_not_followed",
    ),
    undone(
        "F3",
        "edits per thread and task",
        "subjects/open_edits.py",
        '_open: ContextVar[frozenset[object]] = ContextVar("plot_ot_open_edits", default=frozenset())\n',
        GLOBAL,
        f"{EDITS}f3_a_handle_applied_in_another_thread_does_not_undo_an_open_edit",
    ),
    undone(
        "F4",
        "an edit that never fired raises",
        "subjects/open_edits.py",
        "    if not missed:\n",
        "    if True:\n",
        f"{EDITS}f4_an_edit_that_never_happened_is_refused_when_it_closes",
    ),
    undone(
        "F4",
        "compiled models run eagerly",
        "subjects/open_edits.py",
        'if not _holders and "torch._dynamo" in sys.modules:',
        "if False:",
        f"{EDITS}f4_compiled_models_are_edited_like_others",
    ),
    Undone(
        "F5",
        "units are compared with what is asked",
        (REQUIRE,),
        (
            f"{MIXED}f05_a_network_that_was_replaced_between_two_calls_is_refused",
            "tests/test_swapped_models.py",
        ),
    ),
    undone(
        "F5",
        "a held model is not taken for what lies there now",
        "tasks/language.py",
        "stamped = *key, _stamp(model), _stamp(adapter)",
        "stamped = key",
        "tests/test_swapped_models.py",
    ),
    Undone(
        "F6",
        "results of another network",
        (REQUIRE, ("api.py", '    config["identity"] = of["subject"]["identity"]\n', "")),
        (f"{MIXED}f06_a_result_of_another_network_is_not_saved_over_the_first",),
    ),
    undone(
        "F7",
        "other versions",
        "files/run_directory.py",
        "if old != dict(versions):",
        "if False:",
        f"{MIXED}f07_a_run_of_other_versions_is_refused",
    ),
    undone(
        "F8",
        "a unit lies where it belongs",
        "files/unit_files.py",
        'if of.get("seed") != seed or path.name',
        "if False and path.name",
        f"{MIXED}f08_units_are_checked_when_they_are_compiled_and_read",
    ),
    undone(
        "F8",
        "units are sealed",
        "files/unit_files.py",
        "if not is_sealed(unit):",
        "if False:",
        f"{MIXED}f08_a_number_that_was_changed_is_not_shown",
    ),
    undone(
        "F8",
        "results are sealed",
        "files/run_reading.py",
        'whole = is_sealed(results) and results.get("couplings") == digest(couplings)',
        "whole = True",
        f"{MIXED}f08_a_number_that_was_changed_is_not_shown",
    ),
    undone(
        "F9",
        "handles are compared with their digests",
        "files/run_directory.py",
        "        check_handles(self.path, seed, unit)\n",
        "",
        f"{MIXED}f09_a_missing_or_damaged_handle_is_noticed_and_made_anew",
    ),
    undone(
        "F10",
        "gaps of the grid are said",
        "files/run_reading.py",
        "if every - seeds}",
        "if False}",
        f"{MIXED}f10_a_grid_with_holes_is_said_in_every_table",
    ),
    undone(
        "F11",
        "names of units are made safe",
        "files/run_layout.py",
        "    return kept if kept == name else",
        "    return name if kept else",
        f"{MIXED}f11_any_name_of_a_method_has_a_file_of_its_own_inside_the_run",
    ),
    undone(
        "F12",
        "adapters tensor by tensor",
        "models/adapters.py",
        "for name in sorted({*placed, *tensors}):",
        "for name in ():",
        f"{STRANGE}f12_an_adapter_must_hold_every_tensor_that_it_is_made_of",
    ),
    undone(
        "F13",
        "one thread at a time",
        "subjects/open_edits.py",
        "if thread != me:",
        "if False:",
        f"{EDITS}f13_a_network_that_another_thread_edits_or_records_is_refused",
    ),
    undone(
        "F14",
        "ordinary files only",
        "files/safe_reading.py",
        "if not stat.S_ISREG(found.st_mode):",
        "if False:",
        f"{STRANGE}f14_pipes_and_devices_are_refused_not_waited_for[pipe]",
    ),
    undone(
        "F15",
        "what a file unpacks to",
        "files/safe_reading.py",
        "if size > most or size > MOST_PACKED * packed + (1 << 20):",
        "if False:",
        f"{STRANGE}f15_an_npz_file_may_not_unfold_to_many_times_its_size",
    ),
    undone(
        "F16",
        "a leading zip signature",
        "files/safe_reading.py",
        'if not data.startswith(b"PK\\x03\\x04"):',
        "if False:",
        f"{STRANGE}f16_a_bare_pickle_with_a_zip_behind_it_is_not_opened",
    ),
    undone(
        "F17",
        "a folder that cannot be read",
        "report/serve.py",
        "    except OSError:\n        return []\n",
        "    except KeyError:\n        return []\n",
        f"{SERVE}f17_an_unreadable_folder_is_passed_over",
    ),
    undone(
        "F18",
        "entries of the wrong kind are left out",
        "files/run_reading.py",
        "whole = [r for r in rows if _has(r, SHAPES[name])]",
        "whole = rows",
        f"{SHARED}f18_show_survives_damaged_results",
    ),
    undone(
        "F19",
        "no markup",
        "cli/common.py",
        '"markup": False',
        '"markup": True',
        f"{SHARED}f19_names_are_printed_as_they_are",
    ),
    undone(
        "F20",
        "no control characters",
        "cli/common.py",
        'c if c == "\\n" or c.isprintable()',
        'c if c == "\\n" or True',
        f"{SHARED}f20_an_error_about_a_strange_name_does_not_steer_the_terminal",
    ),
    undone(
        "F21",
        "learning in float32",
        "stages/das.py",
        "torch.promote_types(base.dtype, torch.float32)",
        "base.dtype",
        "tests/test_half.py::test_f21_methods_run_in_half_precision",
    ),
    undone(
        "F22",
        "freshness from content",
        "files/run_reading.py",
        'whole and results.get("units") == unit_digests(run)',
        BY_TIME,
        f"{MIXED}f22_a_copied_run_is_as_finished_as_the_first",
    ),
    undone(
        "F23",
        "a record without an interval",
        "report/payload.py",
        'found = numbers(record.get("interval"))',
        'found = numbers(record["interval"])',
        f"{SHARED}f23_a_record_without_an_interval_costs_nothing_else",
    ),
    undone(
        "F24",
        "paths without folders",
        "files/privacy.py",
        "    whole = Path(os.path.abspath(path))\n",
        "    return text\n    whole = Path(os.path.abspath(path))\n",
        f"{SHARED}f24_a_model_in_a_folder_of_mine_is_named_without_the_folder",
    ),
    undone(
        "F24",
        "modes follow the umask",
        "files/writing.py",
        "            file.write(data)\n",
        "            file.write(data)\n            os.fchmod(file.fileno(), 0o644)\n",
        f"{SHARED}f24_files_are_as_open_as_the_umask_says",
    ),
    undone(
        "F25",
        "no formulas in tables",
        "report/paper_tables.py",
        'FORMULA = ("=", "+", "-", "@")',
        'FORMULA = ("no formula",)',
        f"{SHARED}f25_no_cell_of_a_table_is_a_formula",
    ),
    undone(
        "F25",
        "nothing is written through links",
        "files/run_layout.py",
        "if (run / name).is_symlink():",
        "if False:",
        f"{SHARED}f25_a_linked_folder_is_not_written_through",
    ),
    undone(
        "F26",
        "an address of the environment is said",
        "engine/ray_session.py",
        "if not address and named:",
        "if False:",
        "tests/test_ray_session.py::test_f26_an_address_from_the_environment_is_said",
    ),
)


def undo(fix: Undone, package: Path) -> None:
    """Undo a fix in a copy of the package."""
    for file, old, new in fix.edits:
        text = (package / file).read_text(encoding="utf-8")
        assert text.count(old) >= 1, f"{fix.item} ({fix.what}): {file} has no {old!r} any more"
        (package / file).write_text(text.replace(old, new), encoding="utf-8")


def noticed(fix: Undone) -> list[str]:
    """The tests of a fix that pass although it is undone; each is run by itself."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("tests", "docs", "adapters", "pyproject.toml"):
            (Path(folder) / name).symlink_to(ROOT / name)
        undo(fix, Path(folder) / "src" / "plot_ot")
        env = {**os.environ, "PYTHONPATH": str(Path(folder) / "src"), "OMP_NUM_THREADS": "1"}
        passed = []
        for test in fix.tests:
            words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
            done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
            if done.returncode != 1 or "failed" not in done.stdout.splitlines()[-1] + done.stdout[-300:].lower():
                passed.append(f"{test}: {done.stdout[-400:]}{done.stderr[-400:]}")
        return passed


def main() -> None:
    asked = sys.argv[1:] or [f.item for f in FIXES]
    wrong = 0
    for fix in FIXES:
        if fix.item in asked:
            passed = noticed(fix)
            wrong += bool(passed)
            print(f"{fix.item} {fix.what}: {'NOT NOTICED ' + ' '.join(passed) if passed else 'noticed'}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
