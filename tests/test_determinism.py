"""One seed gives the same bits; other thread counts and chunk sizes the same choices, within a stated tolerance."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plot_ot.methods import Method
from plot_ot.studies.prepared import Prepared
from plot_ot.studies.study import Study
from plot_ot.subjects import DecoderSubject, GRUSubject, MLPSubject
from plot_ot.tasks import BinaryAddition, HierarchicalEquality, MultipleChoice, Task
from plot_ot.tasks.text_data import Sizes

DATA = Path(__file__).parent / "data"
TOLERANCE = 1e-4
"""Relative, of costs and plans, between machines that cut or thread the same work differently."""

Small = tuple[Callable[[], Task], int, tuple[str, ...]]
TASKS: dict[str, Small] = {
    "heq": (lambda: HierarchicalEquality("balanced", "units", 40), 1003, ("plot",)),
    "addition": (lambda: BinaryAddition(recipe="first-exact", bases=24), 1000, ("plot-pca", "plot-closed-form-das")),
    "mcqa": (
        lambda: MultipleChoice("tiny", das_sizes=2, das_epochs=2, sizes=Sizes(16, 8, 8, 8)),
        1000,
        ("plot-support-das",),
    ),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    for path in DATA.glob("*.safetensors"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 2)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def outcome(task: str, cache: Path, *, threads: int = 1) -> dict[str, Any]:
    """Everything a study says, but no durations."""
    make, seed, names = TASKS[task]
    configured = make()
    torch.set_num_threads(threads)
    prepared: Prepared = configured.prepare(seed, cache)
    study = Study(prepared)
    methods: dict[str, Method] = configured.methods()
    found: dict[str, Any] = {"controls": study.control_unit()}
    for name in names:
        unit, handles = study.run(methods[name], configured.random_method)
        unit.pop("runtimes")
        found[name] = {"unit": unit, "handles": {v: h.batch() for v, h in handles.items()}}
    return found


@pytest.fixture(scope="module")
def first(cache: Path) -> Callable[[str], dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}

    def of(task: str) -> dict[str, Any]:
        if task not in made:
            make, seed, _ = TASKS[task]
            make().prepare(seed, cache)  # trains what is not there
            made[task] = outcome(task, cache)
        return made[task]

    return of


def assert_close(a: Any, b: Any, tolerance: float, path: str = "") -> None:
    """Equal in all names, counts and choices; numbers within the tolerance, and with 0 to the last bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for k in a:
            assert_close(a[k], b[k], tolerance, f"{path}.{k}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_close(x, y, tolerance, f"{path}[{k}]")
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=10 * tolerance, msg=lambda m: f"{path}: {m}")
    elif isinstance(a, float) and tolerance:
        assert b == pytest.approx(a, rel=tolerance, abs=tolerance, nan_ok=True), path
    elif hasattr(a, "gains"):
        assert a.place == b.place, path
        assert_close(a.gains, b.gains, tolerance, f"{path}.gains")
        if a.frame.read is not None:  # a basis is known up to the sign of its directions
            assert_close(a.frame.read.abs(), b.frame.read.abs(), tolerance, f"{path}.read")
    else:
        assert a == b or (a != a and b != b), path


def choices(found: dict[str, Any]) -> Any:
    """What was chosen, and every accuracy."""
    kept = {}
    for name, part in found.items():
        if name == "controls":
            continue
        unit = part["unit"]
        kept[name] = {
            "records": [(r["variable"], r["bank"], r["accuracy"]) for r in unit["records"]],
            "places": [(s["variable"], s["size"], s["places"]) for s in unit["selection"]],
            "chosen": [
                {k: s["chosen"].get(k) for k in ("K", "strength", "epsilon", "beta", "sites", "k", "layer", "support")}
                for s in unit["selection"]
            ],
            "verdicts": [(v["variable"], v["status"]) for v in unit.get("verdicts", [])],
        }
    return kept


def couplings(found: dict[str, Any]) -> list[Any]:
    """The plans, with the costs' flags."""
    return [part["unit"]["couplings"] for name, part in found.items() if name != "controls"]


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_bits(task, first, cache):
    assert_close(first(task), outcome(task, cache), 0.0)


LONG = pytest.mark.long  # two threads that wait for each other on a busy machine take their time


@pytest.mark.parametrize("task", ["heq", pytest.param("addition", marks=LONG), pytest.param("mcqa", marks=LONG)])
def test_another_number_of_threads_makes_the_same_choices(task, first, cache):
    again = outcome(task, cache, threads=2)
    assert choices(again) == choices(first(task))
    assert_close(couplings(again), couplings(first(task)), TOLERANCE)


CHUNKS = [("heq", MLPSubject, 997), ("addition", GRUSubject, 499), ("mcqa", DecoderSubject, 50)]


@pytest.mark.parametrize(("task", "kind", "responses"), CHUNKS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_another_chunk_size_makes_the_same_choices(task, kind, responses, first, cache, monkeypatch):
    expected = first(task)
    monkeypatch.setattr(kind, "responses_per_batch", property(lambda _: responses))
    again = outcome(task, cache)
    assert choices(again) == choices(expected)
    assert_close(couplings(again), couplings(expected), TOLERANCE)
