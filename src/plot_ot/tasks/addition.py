"""Binary addition (paper, Section 4.2 and Appendix B.2): where does a GRU that adds keep its carries?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from plot_ot.abstract.banks import distinct_rows
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.errors import unknown
from plot_ot.methods import Method, MethodKind, natural_das, random_sites
from plot_ot.signatures import SignatureSpec, as_readout
from plot_ot.sites import Menu, blocks, pca_components, pca_prefixes, whole_places
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate, SelectPlaces, TrainDas
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.coupling import Localize, ScoreSites, brute_force
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.newton import NewtonHandles
from plot_ot.studies.prepared import Prepared
from plot_ot.studies.task import Outline, SeedFailed, Task
from plot_ot.subjects import GRUNet, GRUSubject
from plot_ot.tasks import addition_data as data
from plot_ot.transport import Transport

SEARCH = Search((1, 2, 4), (0.25, 0.5, 1.0, 2.0, 4.0, 8.0))
WIDE = Search((1, 2, 3, 4), (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0))
STAGE_A = Transport(epsilon=(0.01, 0.03))
STAGE_B = Transport(epsilon=(0.003, 0.01, 0.03, 0.1))
STAGE_B_WIDE = Transport(epsilon=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0))
UNIT = SignatureSpec(normalise="unit")


@dataclass(frozen=True)
class BinaryAddition(Task):
    """The paper's second study, configured."""

    width: int = 8
    bits: int = 4
    recipe: str = "paper"
    split: str = "round-robin"
    bases: int = data.BASES
    """Base inputs shared out over the splits; 4 bits have 256 in all."""
    name = "addition"
    summary = "binary addition: the carries of a GRU that adds two numbers bit by bit (paper, Section 4.2)"

    def __post_init__(self) -> None:
        data.Adder(self.bits, self.width, self.recipe)  # refuses what cannot be
        if self.split not in data.SPLITS:
            unknown("split", self.split, data.SPLITS)

    def config(self) -> dict[str, object]:
        options = {"width": self.width, "bits": self.bits, "recipe": self.recipe, "split": self.split}
        return {"task": self.name, **options, "bases": self.bases}

    def causal_model(self) -> CausalModel:
        return data.causal_model(self.bits)

    def methods(self) -> dict[str, Method]:
        stage_a = (Localize((whole_places,), STAGE_A, UNIT), SelectPlaces())
        sizes = tuple(1 << k for k in range(self.width.bit_length()) if 1 << k <= self.width)
        das = TrainDas(sizes, DasSpec(batch=832))

        def zoom(*menus: Menu) -> Localize:
            return Localize(menus, STAGE_B, UNIT, coupling="place")

        neurons_and_pairs = (blocks(1), blocks(2)) if self.width > 1 else (blocks(1),)
        methods = [
            Method("plot", "Stage A: each carry's timestep, patched whole (Algorithm 1)", stage_a),
            Method(
                "plot-native",
                "Stage A, then neurons and pairs of neurons inside the timestep (Algorithm 2)",
                (*stage_a, zoom(*neurons_and_pairs), Calibrate(SEARCH)),
            ),
            Method(
                "plot-pca",
                "Stage A, then prefixes of principal components (Algorithm 3)",
                (*stage_a, zoom(pca_prefixes()), Calibrate(SEARCH)),
            ),
            Method(
                "plot-pca-wide",
                "plot-pca with single components beside prefixes, PCA also on sources, and wider grids (ours)",
                (
                    *stage_a,
                    replace(
                        zoom(pca_prefixes(), pca_prefixes("bases+sources"), pca_components()), transport=STAGE_B_WIDE
                    ),
                    Calibrate(WIDE),
                ),
            ),
            Method(
                "plot-closed-form",
                "Stage A, then oblique maps in closed form, no training (ours)",
                (*stage_a, ClosedForm()),
            ),
            Method(
                "plot-newton",
                "plot-closed-form, then Gauss-Newton on the output loss with the closed form as prior (ours)",
                (*stage_a, ClosedForm(), NewtonHandles()),
            ),
            Method(
                "plot-das", "Stage A, then DAS inside the timestep (Algorithm 4)", (*stage_a, das), kind=MethodKind.DAS
            ),
            Method(
                "plot-closed-form-das",
                "DAS inside the timestep, started from the closed-form handle (ours)",
                (*stage_a, ClosedForm(), replace(das, from_handles=True)),
                kind=MethodKind.DAS,
            ),
            Method("das", "full DAS: every timestep, every size (Algorithm 5)", (das,), kind=MethodKind.DAS),
            Method(
                "das-oblique",
                "full DAS with reading and writing directions trained apart (ours)",
                (replace(das, spec=replace(das.spec, optimiser="oblique", rate=0.02)),),
                kind=MethodKind.DAS,
            ),
            Method(
                "das-natural",
                "full DAS with a counterfactual-latent loss that keeps edited states natural",
                (natural_das(das),),
                kind=MethodKind.DAS,
            ),
            Method(
                "full-vector",
                "the whole state of the best timestep",
                (ScoreSites("brute-force", brute_force, whole_places), Calibrate(Search((1,), (1.0,)))),
                kind=MethodKind.BASELINE,
            ),
            Method(
                "cosine",
                "plot-native with a softmax of cosine similarities in place of transport",
                (
                    *stage_a,
                    replace(zoom(*neurons_and_pairs), transport=replace(STAGE_B, kind="cosine")),
                    Calibrate(SEARCH),
                ),
                kind=MethodKind.BASELINE,
            ),
            Method(
                "brute-force",
                "every neuron swapped alone on calibration, then the same search",
                (ScoreSites("brute-force", brute_force), Calibrate(SEARCH, supports="place")),
                kind=MethodKind.BASELINE,
            ),
            replace(self.random_method(0), name="random"),
        ]
        return {m.name: m for m in methods}

    def random_method(self, draw: int) -> Method:
        return random_sites(draw, SEARCH)

    @property
    def adder(self) -> data.Adder:
        """The network and its training."""
        return data.Adder(self.bits, self.width, self.recipe)

    def subject_known(self, seed: int, cache: Path) -> dict[str, str] | None:
        if not data.backbone_path(self.adder, seed, cache).exists():
            return None
        return {
            "name": f"gru-{self.width}",
            "identity": data.load_backbone(self.adder, seed, cache).subject().identity(),
        }

    def prepare(self, seed: int, cache: Path) -> Prepared:
        backbone = data.load_backbone(self.adder, seed, cache)
        backbone.require_exact()
        splits = data.draw_splits(seed, self.bits, self.split, bases=self.bases)
        rows = torch.cat(
            [x for b in (splits.fit, splits.calibration, *splits.test.values()) for x in (b.base, b.source)]
        )
        wrong = int((~backbone.right(distinct_rows(rows))).sum())
        if wrong:
            raise SeedFailed(
                f"the network adds {wrong} of the banks' inputs wrong, though none of those it was judged on"
            )
        notes = {"epochs": backbone.epochs, "accuracy": backbone.accuracy}
        subject = backbone.subject()
        return Prepared(self.name, f"gru-{self.width}", seed, subject, splits, as_readout("sigmoid"), "balanced", notes)

    def outline(self, seed: int) -> Outline:
        subject = GRUSubject(GRUNet(2, self.width), self.bits)
        return Outline(subject, data.draw_splits(seed, self.bits, self.split, bases=self.bases), outputs=self.bits + 1)
