"""Studies of language models, and which models there are."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from plot_ot.cli.common import (
    Address,
    AsJson,
    Controls,
    Debug,
    Detail,
    EngineName,
    Figures,
    First,
    Methods,
    Out,
    PairCount,
    PlainHelp,
    Private,
    Quiet,
    Seeds,
    StartOver,
    Threads,
    Workers,
    console,
    layer_numbers,
    memory_bytes,
)
from plot_ot.cli.run import app, finish

Questions = Annotated[
    str | None,
    typer.Option(help="Questions in the public copycolors_mcqa format: .json, .jsonl, .parquet, or a hub data set."),
]
Model = Annotated[
    str,
    typer.Option(help="A name of `plot-ot models`, a hub id, a directory or a GGUF file ('tiny' is in the package)."),
]
Adapter = Annotated[str | None, typer.Option(help="A LoRA adapter: one that ships for the model, or a directory.")]
Phi = Annotated[str, typer.Option(help="Effects: 'stack' of answer logits, 'family' means (paper), 'probability'.")]
Calibration = Annotated[str, typer.Option(help="Pairs to choose on: 'balanced', or sensitive ones only ('paper').")]
Grid = Annotated[str, typer.Option(help="(ε, β): each variable's 'own', or one 'shared' by all.")]
HintRule = Annotated[str, typer.Option("--hint", help="DAS sizes around a handle's: 'paper' or 'practice'.")]
DasEvery = Annotated[int, typer.Option(min=1, help="Run full DAS at every n-th block only.")]
DasAlso = Annotated[str | None, typer.Option(help="Run full DAS at these blocks, too: 17-25 or 3,5,7.")]
DasSizes = Annotated[int, typer.Option(min=1, max=11, help="How many of the paper's DAS sizes to try.")]
DasEpochs = Annotated[int, typer.Option(min=1, help="The most epochs DAS trains.")]
Fit = Annotated[int, typer.Option(help="Fit pairs.")]
Transfer = Annotated[
    int | None, typer.Option(help="Pairs in each bank of words and templates not seen before (default: as --pairs).")
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: the model's own).")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... (default: cuda if there is one).")]
Revision = Annotated[str | None, typer.Option(help="Revision of a hub model.")]
SweepBeta = Annotated[bool, typer.Option("--sweep", help="Also run plot at every β, for the stability figure.")]
Memory = Annotated[float, typer.Option(help="GB for recordings and resumed batches, besides the weights.")]


def study_command(task: str, usual: str, reads_files: bool = False) -> Callable[..., None]:
    """`plot-ot run TASK` for a study of a language model, `usual` being its default model."""

    def run(
        questions: Questions = None,
        model: Model = usual,
        adapter: Adapter = None,
        phi: Phi = "stack",
        calibration: Calibration = "balanced",
        grid: Grid = "own",
        hint: HintRule = "paper",
        das_every: DasEvery = 1,
        das_also: DasAlso = None,
        das_sizes: DasSizes = 11,
        das_epochs: DasEpochs = 40,
        fit: Fit = 200,
        pairs: PairCount = 100,
        transfer: Transfer = None,
        dtype: Dtype = None,
        device: Device = None,
        revision: Revision = None,
        memory: Memory = 4.0,
        methods: Methods = None,
        seeds: Seeds = 1,
        first_seed: First = 0,
        out: Out = Path("runs") / task,
        threads: Threads = 1,
        sweep: SweepBeta = False,
        figures: Figures = True,
        detail: Detail = False,
        as_json: AsJson = False,
        quiet: Quiet = False,
        engine: EngineName = "process",
        address: Address = None,
        workers: Workers = None,
        start_over: StartOver = False,
        private: Private = False,
        controls: Controls = "full",
        debug: Debug = False,
    ) -> None:
        from plot_ot.tasks import IndirectObject, MultipleChoice
        from plot_ot.tasks.language import LanguageTask
        from plot_ot.tasks.text_data import Sizes

        studies: dict[str, type[LanguageTask]] = {"mcqa": MultipleChoice, "ioi": IndirectObject}

        more = {"questions": questions} if reads_files else {}
        configured = studies[task](
            model,
            adapter,
            phi,
            calibration,
            grid,
            hint,
            das_every,
            tuple(layer_numbers(das_also, "--das-also")) if das_also else (),
            das_sizes,
            das_epochs,
            dtype,
            device,
            revision,
            Sizes(fit, pairs, pairs, pairs if transfer is None else transfer),
            memory_bytes(memory),
            **more,
        )
        crew = engine, address, workers
        finish(
            configured,
            methods,
            seeds,
            first_seed,
            out,
            threads,
            sweep,
            figures,
            quiet,
            detail,
            crew,
            start_over,
            private,
            controls,
            as_json,
        )

    if not reads_files:
        shown = inspect.signature(run, eval_str=True)
        kept = [p for name, p in shown.parameters.items() if name != "questions"]
        run.__signature__ = shown.replace(parameters=kept)  # type: ignore[attr-defined]
    return run


app.command(
    "mcqa",
    cls=PlainHelp,
    short_help="Multiple choice, the third study.",
    help="Multiple-choice questions: the paper's third study, on any causal language model.",
)(study_command("mcqa", "tiny", reads_files=True))
app.command(
    "ioi",
    cls=PlainHelp,
    short_help="Indirect objects, in an untouched model.",
    help="Indirect object identification: two variables that nobody planted, in an untouched model.",
)(study_command("ioi", "smollm2"))


def models(
    get: Annotated[str | None, typer.Option("--fetch", help="Fetch and convert a model of the list.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the language models that can be used by name, and the adapters that ship for them."""
    from plot_ot.models.named import available, fetch
    from plot_ot.report import tables

    if get:
        where = fetch(get)
        if not as_json:
            console.print(f"{get}: {where}", highlight=False)
    listed = available()
    if as_json:
        told = [
            {"name": m.name, "state": m.state, "what_it_is": m.summary, "adapters": m.adapters, "where": m.where}
            for m in listed
        ]
        print(json.dumps(told, indent=1))
        return
    table = tables.plain_table("Models")
    for column in ("name", "what it is"):
        table.add_column(column, overflow="fold")
    for m in listed:
        adapters = f"; adapters: {', '.join(m.adapters)}" if m.adapters else ""
        table.add_row(m.name, f"{m.state}: {m.summary}{adapters}")
    console.print(table)
    console.print("--fetch NAME fetches a model; --json also says where each one is.")
