"""A task so small that thousands of runs of it fit into minutes; what it is made of lies in files that can be swapped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from plot_ot.abstract.banks import Splits, draw_pairs
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.errors import PlotError
from plot_ot.files.safe_reading import read_json, read_tensors
from plot_ot.files.seals import digest
from plot_ot.files.writing import write_json
from plot_ot.methods import Method, MethodKind
from plot_ot.signatures import as_readout
from plot_ot.sites import whole_places
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate
from plot_ot.stages.coupling import Localize, ScoreSites, brute_force
from plot_ot.studies.prepared import Prepared
from plot_ot.studies.task import Outline, Task
from plot_ot.subjects import MLPSubject
from plot_ot.transport import Transport

NAME = "mlp-2x6"
QUESTIONS = "questions.json"


def causal_model() -> CausalModel:
    """Whether two pairs of numbers are alike."""
    return CausalModel(
        ["a", "b", "c", "d"],
        {"p": lambda a, b: a == b, "q": lambda c, d: c == d, "y": lambda p, q: p == q},
        "y",
    )


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))


def write_sources(cache: Path, seeds: tuple[int, ...], weights: int = 0, questions: int = 0) -> None:
    """The files that networks and banks are made from, of some variant; numbers do not need a trained network."""
    cache.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 7919 * weights)
            save_file(network().state_dict(), cache / f"tiny-{seed}.safetensors")
    write_json(cache / QUESTIONS, {"first": questions})


@dataclass(frozen=True)
class TinyTask(Task):
    """A network of two layers, drawn at random, and a handful of pairs."""

    size: int = 12
    settings: int = 0
    """Changes what the methods do without being an option of the run."""
    name = "tiny"
    summary = "for tests"

    def config(self) -> dict[str, object]:
        return {"task": self.name, "size": self.size}

    def causal_model(self) -> CausalModel:
        return causal_model()

    def methods(self) -> dict[str, Method]:
        search = Search((1, 2), (1.0, 2.0 + self.settings))
        found = [
            Method("plot", "", (Localize(transport=Transport(epsilon=(4.0,))), Calibrate(search)), MethodKind.BASELINE),
            Method(
                "full/vector",
                "",
                (ScoreSites("brute-force", brute_force, whole_places), Calibrate(search)),
                MethodKind.BASELINE,
            ),
        ]
        return {m.name: m for m in found}

    def random_method(self, draw: int) -> Method:
        raise AssertionError("baselines are not judged")

    def prepare(self, seed: int, cache: Path) -> Prepared:
        generator = torch.Generator().manual_seed(seed + int(read_json(cache / QUESTIONS)["first"]))
        causal, values = causal_model(), torch.cartesian_prod(*[torch.arange(3)] * 4)
        pools = values[torch.randperm(len(values), generator=generator)].split(len(values) // 3)
        test = {
            (v, kind): draw_pairs(causal, pools[2], policy, self.size, generator, variable=v, name=f"test/{v}/{kind}")
            for v in ("p", "q")
            for kind, policy in (("sensitivity", "sensitive"), ("invariance", "invariant"))
        }
        fit, calibration = (
            draw_pairs(causal, pool, "mixed", self.size, generator, name=name)
            for pool, name in zip(pools, ("fit", "calibration"), strict=False)
        )
        splits = Splits.checked(fit, calibration, test)
        return Prepared(
            self.name, NAME, seed, self._subject(seed, cache), splits, as_readout("softmax"), sources=_sources(cache)
        )

    def subject_known(self, seed: int, cache: Path) -> Mapping[str, str] | None:
        if not (cache / f"tiny-{seed}.safetensors").exists():
            return None
        return {"name": NAME, "identity": self._subject(seed, cache).identity(), **_sources(cache)}

    def _subject(self, seed: int, cache: Path) -> MLPSubject:
        net = network()
        net.load_state_dict(read_tensors(cache / f"tiny-{seed}.safetensors")[1])
        return MLPSubject(net.requires_grad_(False), encode=lambda rows: rows.float())

    def outline(self, seed: int) -> Outline:
        raise PlotError("The tiny task is never planned.")


def _sources(cache: Path) -> dict[str, str]:
    return {"questions": digest(read_json(cache / QUESTIONS))}
