"""What is installed, pinned, embedded and shipped: all of it is known by version, hash and licence."""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from plot_ot.files.run_reading import read_run
from plot_ot.report.page import run_page
from report_runs import text_run

ROOT = Path(__file__).parent.parent
OWN = {"plot-ot", "torch"}
"""Not in the lock: this package, and torch, whose builds are different files of one version."""


def same(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pins(text: str) -> dict[str, str]:
    return {same(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.M)}


def test_everything_that_is_locked_has_hashes_and_no_address():
    entries = re.split(r"^(?=[\w.-]+==)", read("requirements.lock"), flags=re.M)[1:]
    assert len(entries) > 100
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
    kept = read("requirements.lock") + read("constraints.txt")
    assert not re.search(r"://|--index|--find-links|--extra|--trusted|@ ", kept)
    assert not re.search(r"^torch==", read("requirements.lock"), re.M)


def test_constraints_pin_what_is_locked_and_nothing_else():
    constraints, locked = pins(read("constraints.txt")), pins(read("requirements.lock"))
    assert {k: v for k, v in constraints.items() if k != "torch"} == locked
    by_hand = pins(read("constraints.txt").partition("# -- what else comes along")[0])
    asked = {same(n) for n in re.findall(r'"([A-Za-z][\w.-]*)(?:\[\w+\])?[><=]=', read("pyproject.toml"))}
    assert set(by_hand) <= asked


@pytest.mark.skipif(sys.version_info[:2] != (3, 11) or sys.platform != "linux", reason="the lock is for another system")
def test_all_that_is_installed_is_locked():
    # of this environment alone: other tests, and Ray, put folders of their own on the path
    installed = metadata.distributions(path=[sysconfig.get_path("purelib")])
    here = {same(d.metadata["Name"]) for d in installed if d.metadata["Name"]}
    unlocked = here - set(pins(read("requirements.lock"))) - OWN
    assert not unlocked, unlocked


def test_the_bill_of_materials_names_what_make_installs_and_nothing_of_the_machine():
    bill = json.loads(read("sbom.cdx.json"))
    assert bill["bomFormat"] == "CycloneDX"
    found = {same(c["name"]): c["version"].partition("+")[0] for c in bill["components"]}
    constraints = pins(read("constraints.txt"))
    assert {"torch", "numpy", "plotly", "transformers", "ray"} <= set(found)
    assert {k: v for k, v in found.items() if v != constraints.get(k)}.keys() <= {"pip"}
    assert sum("licenses" in c for c in bill["components"]) > 0.9 * len(found)
    assert "file:" not in read("sbom.cdx.json")
    assert str(ROOT) not in read("sbom.cdx.json")


def test_every_page_carries_the_licence_of_the_library_inside_it(tmp_path):
    page = run_page(read_run(text_run(tmp_path / "run").path))
    packed = max(re.findall(r"[A-Za-z0-9+/=]{10000,}", page), key=len)
    library = gzip.decompress(base64.b64decode(packed)).decode()
    start = library[:3000]
    assert "Permission is hereby granted, free of charge" in start
    assert "Plotly" in start.partition("Permission")[0]
    licence = Path(sys.modules[run_page.__module__].__file__ or "").parent / "assets" / "plotly-licence.txt"
    assert licence.relative_to(ROOT / "src").as_posix() in read("pyproject.toml")


def test_adapters_name_their_base_and_its_licence():
    told = " ".join(read("adapters/smollm2/README.md").split())
    assert "SmolLM2-135M-Instruct" in told
    assert "Apache License 2.0" in told
