"""Localize variables of your own causal model in your own network, in one call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, overload

from torch import Tensor, nn

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.holding_out import HoldOut
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.abstract.positions import NamedTokens
from plot_ot.early import answer_early
from plot_ot.engine import Engine
from plot_ot.errors import PlotError, unknown
from plot_ot.files.privacy import shared_path
from plot_ot.files.run_reading import Reading
from plot_ot.localizing import METHODS as METHODS
from plot_ot.localizing import (
    Given,
    Question,
    answer,
    chosen_filter,
    pairs_per_bank,
    prompt_notes,
    read_given,
    usual_size,
)
from plot_ot.methods import Method
from plot_ot.models.foreign import hooked_options, is_hooked, opened_up
from plot_ot.models.named import LanguageModel, resolve
from plot_ot.result import Result
from plot_ot.signatures import Readout, SignatureSpec, as_readout
from plot_ot.studies import running
from plot_ot.studies.running import Progress
from plot_ot.studies.task import Task
from plot_ot.subjects import MLPSubject, ModuleSubject, SequentialSubject, Subject
from plot_ot.subjects.causal_subject import CausalSubject
from plot_ot.subjects.decoder.subject import DecoderSubject
from plot_ot.subjects.module import named_paths
from plot_ot.subjects.threads import enough_threads
from plot_ot.tasks import TASKS

Places = Mapping[str, str] | Sequence[str]
"""Names of submodules (or variables) to look at, or what to call each: name."""
Network = Subject | LanguageModel | nn.Module | str | os.PathLike[str]
"""What `localize` and `compare` look into: a subject, or what `load_subject` makes one of without further words."""


@overload
def load_subject(model: CausalModel, *, example: Tensor, places: Places | None = None) -> CausalSubject: ...
@overload
def load_subject(
    model: nn.Module, *, places: Places, example: Tensor, tokens: int | None = None, **options: Any
) -> Subject: ...
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
    tokens: int | None = None,
    adapter: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> Subject | LanguageModel:
    """A network that variables can be localized in.

    - A hub id, a directory, a GGUF file, a name that `plot-ot models` lists, or a live Hugging Face language model with
      its `tokenizer`: comes back as a `LanguageModel`, or with a `hypothesis` (prompts, answers, tokens) as the subject
      that this hypothesis makes of it, its answers checked first. `options` go to the loader (device, dtype,
      device_map, revision, attn_implementation, gguf_file) and to the subject (layers, kinds, memory).
    - A TransformerLens `TransformerBridge` or an nnsight `LanguageModel`: the Hugging Face model inside it.
    - An `nn.Sequential` of linear layers and activations, as it is.
    - Any other module, with the `places` (names of submodules) to look at and an `example` input row; where these
      submodules put out one vector a token, `tokens` says how many there are, and every place is looked at in each.
    - A `CausalModel`, with input rows as `example`: exact ground truth, or one causal model aligned with another.
    """
    model = getattr(model, "_orig_mod", model)  # a compiled module's own
    if places is None:
        model, tokenizer = opened_up(model, tokenizer)
    if isinstance(model, CausalModel):
        if example is None:
            raise PlotError(
                "Give input rows as `example`: the values of the causal model's variables are found on them."
            )
        return CausalSubject(model, example, None if places is None else list(places), **options)
    if isinstance(model, nn.Module) and places is not None:
        if example is None:
            raise PlotError("Give an `example` input row: the places' widths are found by running it once.")
        if tokens is not None:
            if not isinstance(tokens, int) or isinstance(tokens, bool):
                raise PlotError(
                    f"`tokens` is how many tokens an input has, a whole number; found {tokens!r}. To look at some "
                    f"tokens only, give their indices as position=[0, 3]."
                )
            if tokens < 1 or "position" in options:
                raise PlotError(f"Give `tokens` (1 or more) or a `position`, not both; found {tokens} tokens.")
            options["position"] = range(tokens)
        paths = named_paths(places).values()
        children = {name for name, _ in model.named_children()}
        one_by_one = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        if isinstance(model, nn.Sequential) and one_by_one and set(paths) <= children and "position" not in options:
            return SequentialSubject(model, places, example, **options)
        return ModuleSubject(model, places, example, **(hooked_options() if is_hooked(model) else {}) | options)
    if tokens is not None:
        raise PlotError("`tokens` goes with the `places` of a module; language models take named or all positions.")
    if isinstance(model, nn.Sequential):
        return MLPSubject(model, **options)
    start = time.perf_counter()
    bound = {k: options.pop(k) for k in ("layers", "kinds", "memory") if k in options}
    if not isinstance(model, (str, os.PathLike, nn.Module)):
        raise PlotError(
            f"Expected a network: a model's name, directory or file, a module, or a CausalModel; found "
            f"{model.__name__ + ', a class: make one of it' if isinstance(model, type) else type(model).__name__}."
        )
    if isinstance(model, nn.Module):
        if is_hooked(model):
            raise PlotError(
                f"A {type(model).__name__} has weights of its own kind: give the `places` to look at (such as "
                f"'blocks.3.hook_resid_post') and an `example` row of tokens, or a TransformerBridge of the same model."
            )
        if tokenizer is None:
            inside = [name for name, _ in model.named_children()]
            raise PlotError(
                f"This {type(model).__name__} needs more words: load_subject(model, places=[...], example=rows[:1]), "
                f"with names of submodules to look at (it has {', '.join(inside[:8]) or 'none'}"
                f"{', ...' if len(inside) > 8 else ''}); or, if it is a language model, its `tokenizer`."
            )
        if strange := [*options, *(["adapter"] if adapter is not None else [])]:
            raise PlotError(f"A live model is taken as it is, so it takes no {', '.join(strange)}: leave this out.")
        loaded = LanguageModel.live(model, tokenizer)
    else:
        loaded = resolve(model, adapter, **options)
        if tokenizer is not None:  # in the place of the one that came with it
            loaded = replace(LanguageModel.live(loaded.model, tokenizer), name=loaded.name, planted=loaded.planted)
    loaded = replace(loaded, loading=time.perf_counter() - start)
    if hypothesis is None:
        if bound:
            raise PlotError(f"{', '.join(bound)}: give these to localize, or give load_subject the hypothesis as well.")
        return loaded
    return bind(loaded, hypothesis, **bound)


def as_subject(network: Network) -> Subject | LanguageModel:
    """A network that was made a subject already, or what `load_subject` makes of it without further words."""
    return network if isinstance(network, (Subject, LanguageModel)) else load_subject(network)


def bind(
    model: LanguageModel, hypothesis: Hypothesis, named: NamedTokens | None = None, **options: Any
) -> DecoderSubject:
    """A language model with a hypothesis' prompts, answers and named tokens."""
    answers = hypothesis.answer_tokens(model.tokenizer)
    named = named or hypothesis.named_tokens(model.tokenizer)
    encode = hypothesis.encoder(model.tokenizer, model.bos)
    return DecoderSubject(model.model, encode, answers, positions=named.functions(), spans=named.sizes, **options)


def localize(
    subject: Network,
    hypothesis: CausalModel | Hypothesis,
    pairs: Any,
    *,
    method: str | Method = "plot",
    readout: str | Readout | None = None,
    size: int | None = None,
    budget: int | Literal["auto"] | None = None,
    filter: Literal["vocabulary", "candidates", "none"] | None = None,
    hold_out: str | Sequence[str] | None = None,
    seed: int = 0,
    engine: Engine | None = None,
    controls: str = "standard",
    progress: bool | Callable[[Result], None] = True,
    **options: Any,
) -> Result:
    """Where in `subject` do the variables of `hypothesis` live, and what handle controls each?

    `subject` is what `load_subject` makes; a model's name or directory and an `nn.Sequential` are taken as they are.
    `pairs` are base/source pairs: a list of (base, source) dicts, a JSONL or CSV file, a pandas or `datasets` table,
    a tuple (base, source) of integer tensors, or `Splits` of your own; or only inputs (dicts, or a tensor of rows),
    from which pairs balanced over the variables are drawn, `size` per bank. A half fits the couplings, a quarter
    calibrates the handles, a quarter tests them once (of 64 to 127 inputs 32 test). `hold_out` names inputs whose
    values (cities, names) must not stand in two of these.

    What the network does not answer as the hypothesis does is left out, by a `filter`: `vocabulary` asks for a language
    model's own next token (its default), `candidates` for the first choice among the answers (the default of other
    networks), `none` for nothing. The result's notes say how many inputs are answered right.

    `method` is `plot` (tokens, places, then what is inside; no training), `plot-das` (DAS added where it ended),
    `plot-layered` (neurons of every place), `das` (everywhere) or a `Method` of your own. For a `LanguageModel`,
    `options` choose the places: layers, kinds, memory. `engine` spreads the work over a
    cluster (`plot_ot.engine.ray_engine.RayEngine`). The verdict's random handles come from the same search, and
    `controls="full"` also tries the method on a re-initialised network. Terminals and notebooks show the stage it is
    at, unless `progress` is False.

    `budget="auto"` answers as early as it can: from inputs, banks of 40 pairs are drawn, then of twice as many, and so
    on up to `size`, until every variable has its answer. The error is spent over these looks, what was recorded for one
    is kept for the next, and `result.looks` lists them. Two fifths of the inputs then fit, one calibrates, and two
    test. The provisional answer of each look stands beside the progress, and `progress`, where it is a function, is
    given it. `budget=N` is banks of N pairs, as `size=N` is.
    """
    taken = as_subject(subject)
    begun, waited = time.perf_counter(), {"loading": taken.loading if isinstance(taken, LanguageModel) else 0.0}
    question, given = ask(
        taken,
        hypothesis,
        pairs,
        method=method,
        readout=readout,
        filter=filter,
        hold_out=hold_out,
        seed=seed,
        engine=engine,
        controls=controls,
        **options,
    )
    early, pairs_each = pairs_per_bank(budget, size, usual_size(question.subject))
    with enough_threads(question.subject):
        if early:
            return answer_early(question, given, pairs_each, waited, begun, progress)
        return answer(question, given, pairs_each, waited, begun, bool(progress))


def ask(
    network: Network,
    hypothesis: CausalModel | Hypothesis,
    pairs: Any,
    *,
    method: str | Method = "plot",
    readout: str | Readout | None = None,
    filter: str | None = None,
    hold_out: str | Sequence[str] | None = None,
    seed: int = 0,
    engine: Engine | None = None,
    controls: str = "standard",
    **options: Any,
) -> tuple[Question, Given]:
    """What `localize` is asked, and the banks, pairs or inputs that it is given."""
    subject = as_subject(network)
    name = shared_path(subject.name) if isinstance(subject, LanguageModel) else type(subject).__name__
    tokenizer, sources = None, {}
    notes: tuple[str, ...] = ()
    if isinstance(subject, LanguageModel):
        if not isinstance(hypothesis, Hypothesis):
            raise PlotError("A language model needs a Hypothesis with a template and answers, not a bare CausalModel.")
        tokenizer, sources["tokenizer"] = subject.tokenizer, subject.tokenizer_digest
        given = read_given(hypothesis, pairs)  # all values are known before the answers are checked
        named = hypothesis.named_tokens(tokenizer)
        notes = prompt_notes(hypothesis, named)
        subject = bind(subject, hypothesis, named, **options)
    else:
        if options:
            known = (
                "method",
                "readout",
                "size",
                "budget",
                "filter",
                "hold_out",
                "seed",
                "engine",
                "controls",
                "progress",
            )
            unknown("option", next(iter(options)), known)
        given = read_given(hypothesis, pairs)
    look = as_readout(readout or ("logits" if subject.language else "softmax"))
    question = Question(
        subject,
        hypothesis,
        method,
        look,
        SignatureSpec(normalise="unit", centre=True) if subject.language else SignatureSpec(),
        name,
        running.check_seed(seed),
        controls,
        engine,
        tokenizer,
        sources,
        chosen_filter(filter, tokenizer, look),
        HoldOut.by(hypothesis, hold_out),
        notes,
    )
    return question, given


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
