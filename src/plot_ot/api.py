"""Localize variables of your own causal model in your own network, in one call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, overload

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from plot_ot.abstract.banks import Bank, Splits
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.abstract.pairs import PairTable, read_pairs
from plot_ot.abstract.splitting import Pairs, from_inputs, from_pairs
from plot_ot.engine import Engine
from plot_ot.engine.watching import announce
from plot_ot.errors import PlotError, unknown
from plot_ot.files.privacy import shared_path
from plot_ot.files.run_reading import Reading
from plot_ot.handles import Handle
from plot_ot.judging.verdict import Verdict
from plot_ot.methods import Method, MethodKind, layered, progressive, random_like, random_progressive
from plot_ot.models.named import LanguageModel, resolve
from plot_ot.models.tiny import TINY, load_tiny
from plot_ot.result import Result
from plot_ot.signatures import Readout, SignatureSpec, as_readout
from plot_ot.stages.choose import TrainDas
from plot_ot.studies import running
from plot_ot.studies.identity import method_digest, unit_of
from plot_ot.studies.prepared import Prepared, Wording
from plot_ot.studies.running import Progress
from plot_ot.studies.showing import shown
from plot_ot.studies.study import Study
from plot_ot.studies.task import Task
from plot_ot.subjects import BankRecording, MLPSubject, ModuleSubject, SequentialSubject, Subject
from plot_ot.subjects.causal_subject import CausalSubject
from plot_ot.subjects.decoder.subject import DecoderSubject
from plot_ot.tasks import TASKS

Places = Mapping[str, str] | Sequence[str]
"""Names of submodules (or variables) to look at, or what to call each: name."""
METHODS = ("plot", "plot-das", "plot-layered", "das")
OTHER_STEPS = 5
"""Steps besides the stages of a method: the network's answers, recording, tests, random handles."""


@overload
def load_subject(model: CausalModel, *, example: Tensor, places: Places | None = None) -> CausalSubject: ...
@overload
def load_subject(model: nn.Module, *, places: Places, example: Tensor, **options: Any) -> Subject: ...
@overload
def load_subject(
    model: str | os.PathLike[str] | nn.Module,
    hypothesis: Hypothesis,
    *,
    adapter: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> DecoderSubject: ...
@overload
def load_subject(model: nn.Sequential, *, encode: Callable[[Tensor], Tensor] = ..., **options: Any) -> MLPSubject: ...
@overload
def load_subject(
    model: str | os.PathLike[str] | nn.Module,
    hypothesis: None = None,
    *,
    adapter: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> LanguageModel: ...
def load_subject(
    model: str | os.PathLike[str] | nn.Module | CausalModel,
    hypothesis: Hypothesis | None = None,
    *,
    places: Places | None = None,
    example: Tensor | None = None,
    adapter: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> Subject | LanguageModel:
    """A network that variables can be localized in.

    - A hub id, a directory, a GGUF file, a name that `plot-ot models` lists, or a live Hugging Face language model with
      its `tokenizer`: comes back as a `LanguageModel`, or with a `hypothesis` (prompts, answers, tokens) as the subject
      that this hypothesis makes of it, its answers checked first. `options` go to the loader (device, dtype,
      device_map, revision, attn_implementation, gguf_file) and to the subject (layers, kinds, memory).
    - An `nn.Sequential` of linear layers and activations, as it is.
    - Any other module, with the `places` (names of submodules) to look at and an `example` input row.
    - A `CausalModel`, with input rows as `example`: exact ground truth, or one causal model aligned with another.
    """
    model = getattr(model, "_orig_mod", model)  # a compiled module's own
    if isinstance(model, CausalModel):
        if example is None:
            raise PlotError(
                "Give input rows as `example`: the values of the causal model's variables are found on them."
            )
        return CausalSubject(model, example, None if places is None else list(places), **options)
    if isinstance(model, nn.Module) and places is not None:
        if example is None:
            raise PlotError("Give an `example` input row: the places' widths are found by running it once.")
        paths = list(places.values()) if isinstance(places, Mapping) else list(places)
        children = {name for name, _ in model.named_children()}
        one_by_one = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        if isinstance(model, nn.Sequential) and one_by_one and set(paths) <= children and "position" not in options:
            return SequentialSubject(model, places, example, **options)
        return ModuleSubject(model, places, example, **options)
    if isinstance(model, nn.Sequential):
        return MLPSubject(model, **options)
    start = time.perf_counter()
    bound = {k: options.pop(k) for k in ("layers", "kinds", "memory") if k in options}
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise PlotError(
                "A live language model needs its `tokenizer`; any other network the `places` to look at (names of its "
                "submodules) and an `example` input row."
            )
        loaded = LanguageModel.live(model, tokenizer)
    elif str(model) == "tiny" or str(model) in TINY:
        loaded = LanguageModel.live(*load_tiny(next(iter(TINY)) if str(model) == "tiny" else str(model)))
    else:
        loaded = resolve(model, adapter, **options)
    loaded = replace(loaded, loading=time.perf_counter() - start)
    if hypothesis is None:
        if bound:
            raise PlotError(f"{', '.join(bound)}: give these to localize, or give load_subject the hypothesis as well.")
        return loaded
    return bind(loaded, hypothesis, **bound)


def bind(model: LanguageModel, hypothesis: Hypothesis, **options: Any) -> DecoderSubject:
    """A language model with a hypothesis' prompts, answers and named tokens."""
    answers = hypothesis.answer_tokens(model.tokenizer)
    positions = hypothesis.token_positions(model.tokenizer)
    encode = hypothesis.encoder(model.tokenizer, model.bos)
    return DecoderSubject(model.model, encode, answers, positions=positions, **options)


def localize(
    subject: Subject | LanguageModel,
    hypothesis: CausalModel | Hypothesis,
    pairs: Any,
    *,
    method: str | Method = "plot",
    readout: str | Readout | None = None,
    size: int | None = None,
    seed: int = 0,
    engine: Engine | None = None,
    controls: str = "standard",
    progress: bool = True,
    **options: Any,
) -> Result:
    """Where in `subject` do the variables of `hypothesis` live, and what handle controls each?

    `pairs` are base/source pairs: a list of (base, source) dicts, a JSONL or CSV file, a pandas or `datasets` table,
    a tuple (base, source) of integer tensors, or `Splits` of your own; or only inputs (dicts, or a tensor of rows),
    from which pairs balanced over the variables are drawn, `size` per bank. What the network does not answer as the
    hypothesis does is left out. A half fits the couplings, a quarter calibrates the handles, a quarter tests them once.

    `method` is `plot` (tokens, places, then what is inside; no training), `plot-das` (DAS added where it ended),
    `plot-layered` (neurons of every place), `das` (everywhere) or a `Method` of your own. For a `LanguageModel`,
    `options` choose the places: layers, kinds, memory. `engine` spreads the work over a
    cluster (`plot_ot.engine.ray_engine.RayEngine`). The verdict's random handles come from the same search, and
    `controls="full"` also tries the method on a re-initialised network. Terminals and notebooks show the stage it is
    at, unless `progress` is False.
    """
    text = isinstance(hypothesis, Hypothesis) and isinstance(subject, LanguageModel)
    name = shared_path(subject.name) if isinstance(subject, LanguageModel) else type(subject).__name__
    tokenizer = subject.tokenizer if isinstance(subject, LanguageModel) else None
    seed, sources = running.check_seed(seed), {}
    waited, begun = {"loading": subject.loading if isinstance(subject, LanguageModel) else 0.0}, time.perf_counter()
    if isinstance(subject, LanguageModel):
        sources["tokenizer"] = subject.tokenizer_digest
        if not isinstance(hypothesis, Hypothesis):
            raise PlotError("A language model needs a Hypothesis with a template and answers, not a bare CausalModel.")
        given = _read(hypothesis, pairs)  # all values are known before the answers are checked
        subject = bind(subject, hypothesis, **options)
    else:
        if options:
            unknown("option", next(iter(options)), ("method", "readout", "size", "seed"))
        given = _read(hypothesis, pairs)
    causal = hypothesis.causal if isinstance(hypothesis, Hypothesis) else hypothesis
    language = isinstance(subject, DecoderSubject)
    readout = as_readout(readout or ("logits" if language else "softmax"))
    causal = causal.accepting(readout.accepts)
    spec = SignatureSpec(normalise="unit", centre=True) if language else SignatureSpec()
    chosen = _method(method, subject, len(causal.variables), spec)
    generator = torch.Generator().manual_seed(seed)
    size = size or (200 if language else 1000)
    said = "the banks are as given"
    with shown(progress, chosen.steps + OTHER_STEPS):
        if isinstance(given, Splits):
            splits = given
        else:
            announce("answers of the network")
            right = _spoken_right(subject, hypothesis, tokenizer) if text else _right(subject, causal, readout)
            if isinstance(given, Pairs):
                splits, said = from_pairs(causal, given, right, generator)
            else:
                splits, said = from_inputs(causal, given, right, size, generator)
        waited["filtering"] = time.perf_counter() - begun
        wording = None
        if text and isinstance(hypothesis, Hypothesis) and isinstance(subject, DecoderSubject):
            wording = Wording(hypothesis.render, hypothesis.answers, subject.watching(rest=True))
        task = hypothesis.name if isinstance(hypothesis, Hypothesis) else "localize"
        prepared = Prepared(
            task, name, seed, subject, splits, readout, wording=wording, sources=sources, controls=controls
        )
        study = Study(prepared, engine)
        places = subject.places

        def at_random(draw: int) -> Method:
            return random_like(method, draw, places) if isinstance(method, Method) else random_progressive(draw, places)

        unit, handles = study.run(chosen, at_random)
    handles = {v: _settable(h, study.problem.fit, hypothesis) for v, h in handles.items()}
    flags = sorted({f["kind"] for c in unit["couplings"] for f in c["flags"]})
    notes = [said, *([f"coupling warnings: {', '.join(flags)}"] if flags else [])]
    verdicts = {v["variable"]: Verdict.from_row(v) for v in unit.get("verdicts", [])}
    config = {"task": task, "subject": name, "methods": [chosen.name], "seeds": [seed], "size": size}
    config |= {"readout": readout.name, "controls": controls}  # methods that differ in these are not one table
    took = unit["runtimes"][0]
    waited |= {
        "recording": study.recording_seconds,
        "search": took["seconds"] - study.recording_seconds,
        "controls": took.get("controls", 0.0),
    }
    waited["tables"] = time.perf_counter() - begun - sum(s for part, s in waited.items() if part != "loading")
    took["waited"] = waited
    of = {**unit_of(prepared), "settings": method_digest(chosen)}
    config["identity"] = of["subject"]["identity"]
    return Result(
        handles, verdicts, unit["records"], sum(waited.values()), unit, study.control_unit(), config, of, notes
    )


def run_study(
    task: str | Task,
    *,
    seeds: int | Iterable[int] = 10,
    methods: Sequence[str] | None = None,
    out: str | os.PathLike[str],
    engine: Engine | None = None,
    progress: Progress | None = None,
    sweep: bool = False,
    start_over: bool = False,
    private: bool = False,
    controls: str = "full",
    **options: Any,
) -> Reading:
    """Run a study into the directory `out` as `plot-ot run` does: what is missing there, so that it can be resumed.

    `task` is a configured `Task`, or the name of one (`heq`, `addition`, `mcqa`, `ioi`) with its `options`. `seeds` are
    their numbers, or how many from 0 on; `methods` their names, by default all of the task's. `progress` is told every
    step (`print` will do), `sweep` also runs `plot` at several ε or β. A run of another network, other data, settings
    or versions in `out` is refused, or with `start_over` set aside there. A `private` run keeps nothing about the
    machine; `controls` are `standard`, or `full` with a re-initialised network. What comes back is the run as it was
    read from the directory: its `results`, `couplings`, and `problems` if any file is damaged.
    """
    if isinstance(task, str):
        if task not in TASKS:
            unknown("task", task, TASKS)
        known = [f.name for f in fields(TASKS[task])]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                unknown(f"option of {task}", name, known)
        task = TASKS[task](**options)
    elif options:
        raise PlotError(f"{', '.join(options)}: options go with a task's name; a configured task has its own.")
    return running.run_study(
        task,
        seeds=seeds,
        methods=methods,
        out=Path(out),
        engine=engine,
        progress=progress,
        sweep=sweep,
        start_over=start_over,
        private=private,
        controls=controls,
    )


def _settable(handle: Handle, fit: BankRecording, hypothesis: CausalModel | Hypothesis) -> Handle:
    """The handle with stand-ins for every value, under the names that the hypothesis gives them."""
    handle = handle.with_values(fit)
    if not isinstance(hypothesis, Hypothesis):
        return handle
    names = hypothesis.values(handle.variable)
    return replace(handle, values={names[code]: at for code, at in handle.values.items() if isinstance(code, int)})


def _method(method: str | Method, subject: Subject, variables: int, spec: SignatureSpec) -> Method:
    if isinstance(method, Method):
        return method
    if method == "plot":
        return progressive(subject.places, variables, spec)
    if method == "plot-das":
        return progressive(subject.places, variables, spec, das=True)
    if method == "plot-layered":
        return layered()
    if method == "das":
        return Method("das", "DAS at every place, every subspace size", (TrainDas(),), kind=MethodKind.DAS)
    unknown("method", method, METHODS)


def _read(hypothesis: CausalModel | Hypothesis, pairs: Any) -> Splits | Pairs | Int[Tensor, "rows inputs"]:
    """Banks, pairs or input rows, from all that a user may bring."""
    if isinstance(pairs, (Splits, Pairs, Tensor)):
        return pairs
    if isinstance(pairs, Bank):
        families = [pairs.families[f] for f in pairs.family.tolist()]
        return Pairs(pairs.base, pairs.source, families)
    if isinstance(pairs, tuple) and len(pairs) == 2 and all(isinstance(p, Tensor) for p in pairs):
        return Pairs(*pairs)
    if not isinstance(hypothesis, Hypothesis):
        raise PlotError(
            f"A CausalModel takes inputs as integer tensors: rows, or (base, source); found {type(pairs).__name__}. "
            f"Write the hypothesis as a Hypothesis to give dicts, files or tables."
        )
    table = pairs if isinstance(pairs, PairTable) else read_pairs(pairs)
    base, source = table.rows(hypothesis)
    return Pairs(base, source, table.family, table.split) if table.source else base


def _right(subject: Subject, causal: CausalModel, readout: Readout) -> Callable[[Tensor], Bool[Tensor, " rows"]]:
    """Rows that the network answers as the causal model does."""

    def right(rows: Tensor) -> Tensor:
        outputs = subject.record(rows, torch.zeros(0, dtype=torch.long)).outputs
        return readout.correct(outputs.unsqueeze(0), causal.answer(rows).to(outputs.device))[0].cpu()

    return right


def _spoken_right(subject: Any, hypothesis: Any, tokenizer: Any) -> Callable[[Tensor], Bool[Tensor, " rows"]]:
    """Rows whose answer is the model's own next token, of its whole vocabulary."""

    def right(rows: Tensor) -> Tensor:
        store = subject.record(rows, remember=True)  # filtering is the recording: nothing is run twice
        said: Tensor = hypothesis.says(tokenizer, store.top_token.cpu(), hypothesis.causal.answer(rows))
        return said

    return right
