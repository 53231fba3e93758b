"""What tasks on language models share: loading, filtering, φ by name, and the paper's methods at a model's scale.

A width x of the paper, whose model is 2304 wide and 26 blocks deep, becomes max(1, round(x d / 2304)) at width d, and
its shortlist of 6 blocks max(1, round(6 L / 26)) at depth L; sizes that fall together are tried once (Appendix B.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

import torch
from jaxtyping import Bool
from torch import Tensor

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.engine import Recipe
from plot_ot.errors import PlotError, unknown
from plot_ot.files.privacy import shared_path
from plot_ot.methods import Method, MethodKind, natural_das
from plot_ot.models.loading import DTYPES
from plot_ot.models.named import LanguageModel, resolve
from plot_ot.signatures import Readout, SignatureSpec, as_readout
from plot_ot.sites import blocks, neurons, pca_bands, whole_places
from plot_ot.stages.calibrate import Search
from plot_ot.stages.choose import Calibrate, Hint, SelectPlaces, TrainDas
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.coupling import Localize, ScoreSites, at_random, attribution, brute_force
from plot_ot.stages.descent import DasSpec
from plot_ot.stages.newton import NewtonHandles
from plot_ot.stages.prefilter import Prefilter
from plot_ot.studies.prepared import Prepared, Sweep, Wording
from plot_ot.studies.task import Outline, Task
from plot_ot.subjects.decoder.subject import DecoderSubject, Encode
from plot_ot.subjects.threads import enough_threads
from plot_ot.tasks.filling import Filter
from plot_ot.tasks.text_data import Sizes, TextBanks
from plot_ot.transport import Transport

PAPER_WIDTH, PAPER_DEPTH = 2304, 26
RESOLUTIONS = (128, 144, 192, 256, 288, 384, 576, 768)
SUBSPACES = (32, 64, 96, 128, 256, 512, 768, 1024, 1536, 2048, 2304)
BANDS = (8, 16)
STAGE_A = Transport("uot-one-sided", epsilon=(1.0,), beta=(0.03, 0.1, 0.3, 1.0, 3.0))
STAGE_B = Transport(epsilon=(1.0,))

PHI: dict[str, tuple[str, SignatureSpec]] = {
    "stack": ("logits", SignatureSpec(normalise="unit", centre=True)),
    "family": ("logits", SignatureSpec("family_mean", "unit_family", centre=True)),
    "probability": ("softmax", SignatureSpec(normalise="unit")),
}
"""Answer-logit effects pair by pair; their means per family, each of length 1 (the paper's runs); probabilities."""
CALIBRATIONS = {"balanced": "balanced", "paper": "sensitive"}
HINTS = ("paper", "practice")


_loaded: WeakValueDictionary[tuple[object, ...], LanguageModel] = WeakValueDictionary()
"""Models that some task holds: the next task that names one shares it, and it goes with the last of them."""


def load(model: str, adapter: str | None, dtype: str | None, device: str | None, revision: str | None) -> LanguageModel:
    """A model by name, tiny or not; shared with other tasks while one of them holds it.

    A directory or file in which something was replaced is another model.
    """
    key = model, adapter, dtype, device, revision
    stamped = *key, _stamp(model), _stamp(adapter)
    found = _loaded.get(stamped)
    if found is None:
        found = _loaded[stamped] = _load(*key)
    return found


def _stamp(place: str | None) -> tuple[object, ...]:
    """The files of a local model as they are now, without reading them; nothing for a model by name."""
    path = Path(place).expanduser() if place else Path("nowhere at all")
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    told = [(p.name, p.stat()) for p in files if p.is_file()]
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in told)


def _load(
    model: str, adapter: str | None, dtype: str | None, device: str | None, revision: str | None
) -> LanguageModel:
    options: dict[str, Any] = {k: v for k, v in {"device": device, "revision": revision}.items() if v}
    return resolve(model, adapter, dtype=dtype, **options)


def scaled(sizes: Sequence[int], width: int) -> tuple[int, ...]:
    """Scale the paper's widths to a model of another width."""
    return tuple(dict.fromkeys(max(1, round(x * width / PAPER_WIDTH)) for x in sizes))


class TextData(Protocol):
    """The data module of a text task: prompts from rows of integers, answers as single tokens, filtered banks."""

    ANSWERS: Sequence[str]

    def causal_model(self) -> CausalModel: ...
    def render(self, rows: Tensor) -> list[str]: ...
    def encoder(self, tokenizer: Any, *, bos: int | None) -> Encode: ...
    def answer_tokens(self, tokenizer: Any) -> list[list[int]]: ...
    def says(self, tokenizer: Any, tokens: Tensor, answers: Tensor) -> Bool[Tensor, " rows"]: ...
    def draw_splits(self, seed: int, answers_correctly: Filter, sizes: Sizes) -> TextBanks: ...


@dataclass(frozen=True)
class LanguageTask(Task):
    """A study of one causal language model."""

    model: str = "tiny"
    adapter: str | None = None
    phi: str = "stack"
    calibration: str = "balanced"
    """`balanced`: half sensitivity, half invariance; `paper`: pairs that change the variable."""
    grid: str = "own"
    """Whether each variable has its `own` (ε, β), or all have one `shared`."""
    hint: str = "paper"
    """The DAS hint rule: the `paper`'s factors, or those and the floor of the authors' `practice`."""
    das_every: int = 1
    """Full DAS trains at every n-th block, counted from the last,"""
    das_also: tuple[int, ...] = ()
    """and at these blocks."""
    das_sizes: int = len(SUBSPACES)
    """How many of the paper's subspace sizes DAS tries, evenly spread, the smallest and the whole block included."""
    das_epochs: int = 40
    """The most epochs that DAS trains; its steps shrink to nothing by then."""
    dtype: str | None = None
    device: str | None = None
    revision: str | None = None
    sizes: Sizes = field(default_factory=Sizes)
    memory: int = 4 << 30
    data: ClassVar[TextData]
    strengths: ClassVar[tuple[float, ...]] = (0.5, 1.0, 2.0, 4.0)

    def __post_init__(self) -> None:
        for what, name, known in (
            ("φ", self.phi, PHI),
            ("calibration", self.calibration, CALIBRATIONS),
            ("DAS hint rule", self.hint, HINTS),
        ):
            if name not in known:
                unknown(what, name, known)
        if self.dtype is not None and self.dtype not in DTYPES:
            unknown("dtype", self.dtype, DTYPES)
        if self.das_every < 1 or self.das_epochs < 1 or not 1 <= self.das_sizes <= len(SUBSPACES):
            raise PlotError(
                f"DAS needs every >= 1, epochs >= 1 and 1 to {len(SUBSPACES)} sizes; found every {self.das_every}, "
                f"{self.das_epochs} epochs, {self.das_sizes} sizes."
            )

    def config(self) -> dict[str, object]:
        mine = [f.name for f in fields(LanguageTask) if f.name not in ("memory", "sizes")]
        shared = {"model": shared_path(self.model), "adapter": self.adapter and shared_path(self.adapter)}
        known = {name: getattr(self, name) for name in mine} | shared
        return {"task": self.name, **known, "sizes": vars(self.sizes)}

    def sources(self) -> dict[str, str]:
        """What the study is made from besides the model's weights."""
        return {"tokenizer": self.language_model.tokenizer_digest}

    def subject_known(self, seed: int, cache: Path) -> dict[str, str]:
        named = {"name": shared_path(self.language_model.name), "identity": self.subject.identity()}
        return {**named, **self.sources()}

    # -- the model ---------------------------------------------------------------------------------------

    @cached_property
    def language_model(self) -> LanguageModel:
        """The model, its tokenizer and what was planted in it."""
        return load(self.model, self.adapter, self.dtype, self.device, self.revision)

    @cached_property
    def subject(self) -> DecoderSubject:
        """The model with this task's prompts and answers."""
        lm = self.language_model
        return DecoderSubject(lm.model, self.encoder(), self.data.answer_tokens(lm.tokenizer), memory=self.memory)

    def encoder(self) -> Encode:
        """A function that turns rows into tokens."""
        return self.data.encoder(self.language_model.tokenizer, bos=self.language_model.bos)

    def render(self, rows: Tensor) -> list[str]:
        """The prompts of some rows."""
        return self.data.render(rows)

    def draw(self, seed: int, right: Filter) -> TextBanks:
        """The banks of a seed, of prompts that pass a filter."""
        return self.data.draw_splits(seed, right, self.sizes)

    @property
    def readout(self) -> Readout:
        """The readout: how outputs are looked at."""
        return as_readout(PHI[self.phi][0])

    def answers_correctly(self, rows: Tensor) -> Bool[Tensor, " rows"]:
        """The filter: whether the model's own next token, of its whole vocabulary, answers each prompt.

        The study's recording takes over what runs here.
        """
        with enough_threads(self.subject):
            store = self.subject.record(rows, remember=True)
        said = store.top_token.cpu()
        return self.data.says(self.language_model.tokenizer, said, self.causal_model().answer(rows))

    # -- the study ---------------------------------------------------------------------------------------

    def causal_model(self) -> CausalModel:
        return self.data.causal_model()

    def prepare(self, seed: int, cache: Path) -> Prepared:
        banks = self.draw(seed, self.answers_correctly)
        return Prepared(
            self.name,
            shared_path(self.language_model.name),
            seed,
            self.subject,
            banks.splits,
            self.readout,
            CALIBRATIONS[self.calibration],
            {"pass_rates": banks.pass_rates},
            banks.transfer,
            Wording(self.render, self.data.ANSWERS, self.subject.watching(rest=True)),
            self.sources(),
            recorded_seconds=sum(seconds for split, seconds in banks.filter_seconds.items() if split != "transfer"),
        )

    def network_recipe(self) -> Recipe:
        return partial(replica, type(self), {f.name: getattr(self, f.name) for f in fields(self)})

    def outline(self, seed: int) -> Outline:
        banks = self.draw(seed, lambda rows: torch.ones(len(rows), dtype=torch.bool))
        return Outline(self.subject, banks.splits, outputs=len(self.data.ANSWERS))

    # -- the methods -------------------------------------------------------------------------------------

    @property
    def search(self) -> Search:
        """The (K, λ) grid of calibration."""
        return Search((1, 2, 4), self.strengths)

    def methods(self) -> dict[str, Method]:
        return self.methods_at(self.subject.decoder.width, len(self.subject.decoder.blocks))

    def catalogue(self) -> dict[str, Method]:
        return self.methods_at(PAPER_WIDTH, PAPER_DEPTH)

    def methods_at(self, width: int, depth: int) -> dict[str, Method]:
        """The methods with the paper's grids at the scale of a model of this width and depth."""
        spec = PHI[self.phi][1]
        shortlist = max(1, round(6 * depth / PAPER_DEPTH))

        def stage_a(transport: Transport = STAGE_A) -> tuple[Any, ...]:
            return Localize((whole_places,), transport, spec), SelectPlaces(shortlist, grid=self.grid)

        if wrong := [b for b in self.das_also if not 0 <= b < depth]:
            raise PlotError(f"DAS is also to run at block {wrong[0]}; the model has blocks 0 to {depth - 1}.")
        every = scaled(SUBSPACES, width)
        picked = [every[round(k * (len(every) - 1) / max(1, self.das_sizes - 1))] for k in range(self.das_sizes)]
        sizes = tuple(dict.fromkeys(min(k, width) for k in picked))
        das = TrainDas(sizes, DasSpec(batch=64, most=self.das_epochs, patience=8, improvement=0.02))
        full = replace(das, every=self.das_every, also=tuple(f"block_output.{b}" for b in self.das_also))
        hint = Hint.paper() if self.hint == "paper" else Hint.practice(scaled((32,), width)[0])
        native = (
            Localize(tuple(blocks(r) for r in scaled(RESOLUTIONS, width)), STAGE_B, spec, coupling="place"),
            Calibrate(self.search),
        )
        pca = (
            Localize(tuple(pca_bands(b) for b in BANDS), STAGE_B, spec, coupling="place"),
            Calibrate(self.search),
        )
        finest = blocks(scaled(RESOLUTIONS, width)[0])
        methods = [
            Method("plot", "Stage A: each variable's block, patched whole (Algorithm 6)", stage_a()),
            Method("plot-native", "Stage A, then groups of neurons inside the block (Algorithm 7)", stage_a() + native),
            Method(
                "plot-neurons",
                "every neuron of every block a site, by linearised signatures, 5 % verified (ours)",
                (
                    Localize((neurons,), STAGE_B, spec, signatures=Prefilter(0.05)),
                    Calibrate(self.search, supports="place"),
                ),
            ),
            Method("plot-pca", "Stage A, then bands of principal components (Algorithm 8)", stage_a() + pca),
            Method(
                "plot-closed-form",
                "Stage A, then oblique maps in closed form, no training (ours)",
                (*stage_a(), ClosedForm()),
            ),
            Method(
                "plot-newton",
                "plot-closed-form, then Gauss-Newton on the output loss with the closed form as prior (ours)",
                (*stage_a(), ClosedForm(), NewtonHandles()),
            ),
            Method(
                "plot-das", "Stage A, then DAS inside the block (Algorithm 9)", (*stage_a(), das), kind=MethodKind.DAS
            ),
            Method(
                "plot-native-das",
                "plot-native, then DAS with sizes around its handle's (Algorithm 10)",
                (*stage_a(), *native, replace(das, dimensions=hint)),
                kind=MethodKind.DAS,
            ),
            Method(
                "plot-pca-das",
                "plot-pca, then DAS on top of its rotation, sizes around its handle's (Algorithm 11)",
                (*stage_a(), *pca, replace(das, dimensions=hint, inside="frame")),
                kind=MethodKind.DAS,
            ),
            Method(
                "plot-support-das",
                "plot-native, then DAS inside the neurons it selected (ours)",
                (*stage_a(), *native, replace(das, inside="support")),
                kind=MethodKind.DAS,
            ),
            Method(
                "das",
                "full DAS: every block, every size (Algorithm 12)",
                (full,),
                kind=MethodKind.DAS,
            ),
            Method(
                "das-natural",
                "full DAS with a counterfactual-latent loss that keeps edited states natural",
                (natural_das(full),),
                kind=MethodKind.DAS,
            ),
            Method(
                "full-vector",
                "the whole block that does best on calibration",
                (ScoreSites("brute-force", brute_force, whole_places), Calibrate(Search((1,), (1.0,)))),
                kind=MethodKind.BASELINE,
            ),
            Method(
                "plot-eot",
                "Stage A with balanced transport (the appendix's comparison)",
                stage_a(Transport(epsilon=(1.0,))),
                kind=MethodKind.BASELINE,
            ),
            Method(
                "cosine",
                "plot-native with softmaxes of cosine similarities in place of transport",
                (
                    *stage_a(replace(STAGE_A, kind="cosine")),
                    replace(native[0], transport=replace(STAGE_B, kind="cosine")),
                    native[1],
                ),
                kind=MethodKind.BASELINE,
            ),
            Method(
                "brute-force",
                "every group of neurons of the best block swapped alone on calibration, then the same search",
                (
                    ScoreSites("brute-force", brute_force, whole_places),
                    SelectPlaces(),
                    ScoreSites("brute-force", brute_force, finest),
                    Calibrate(self.search),
                ),
                kind=MethodKind.BASELINE,
            ),
            Method(
                "attribution",
                "blocks, then groups of neurons, ranked by attribution patching; then the same search",
                (
                    ScoreSites("attribution", attribution, whole_places),
                    SelectPlaces(shortlist),
                    ScoreSites("attribution", attribution, finest),
                    Calibrate(self.search),
                ),
                kind=MethodKind.BASELINE,
            ),
            replace(self._random(0, width), name="random"),
        ]
        return {m.name: m for m in methods}

    def sweep(self) -> Sweep:
        plot = self.methods()["plot"]
        couple, select = plot.stages
        assert isinstance(couple, Localize)  # noqa: S101
        tried = {b: replace(couple, transport=replace(STAGE_A, beta=(b,))) for b in STAGE_A.beta}
        return Sweep("beta", {b: replace(plot, stages=(stage, select)) for b, stage in tried.items()})

    def random_method(self, draw: int) -> Method:
        return self._random(draw, self.subject.decoder.width)

    def _random(self, draw: int, width: int) -> Method:
        """A block at random, groups of its neurons in random order, then the same search."""
        stages = (
            ScoreSites("random", at_random(draw), whole_places),
            SelectPlaces(),
            ScoreSites("random", at_random(draw + 10_000), blocks(scaled(RESOLUTIONS, width)[0])),
            Calibrate(self.search),
        )
        summary = "a random block, random groups of neurons, same search"
        return Method(f"random-{draw}", summary, stages, MethodKind.BASELINE)


def replica(task: type[LanguageTask], options: Mapping[str, Any]) -> DecoderSubject:
    """The network of a language task, loaded where this runs; a directory or file must be found there too."""
    return task(**options).subject
