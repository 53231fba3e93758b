"""Gemma-2-2B's shape on this machine: random weights of full size go through Stage A on a few MCQA pairs.

python benchmarks/gemma_shape.py            # about 6 GB of memory; writes docs/results/gemma_shape.{json,md}
python benchmarks/gemma_shape.py --small    # a smoke test of the script with a model of toy size

Random weights answer nothing, so pairs are taken without the filter and couplings mean nothing: what is measured is
memory, shapes and time. Then the paper's whole study is counted in block-tokens, one token through one block each.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from heq_speed import ROOT, THREADS, commit, machine, say
from measuring import Peak, resident, timed
from pages import markdown
from plot_ot.abstract.banks import Splits, distinct_rows
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.methods import Method
from plot_ot.models.tiny import build_tokenizer
from plot_ot.planner import unrecorded
from plot_ot.signatures import as_readout, measure_signatures
from plot_ot.sites import whole_places
from plot_ot.stages.choose import Calibrate, SelectPlaces, TrainDas
from plot_ot.stages.coupling import Localize
from plot_ot.subjects import BankRecording, Place, record
from plot_ot.subjects.decoder.store import DecoderStore
from plot_ot.subjects.decoder.subject import DecoderSubject
from plot_ot.tasks import MultipleChoice, mcqa_data
from plot_ot.tasks.language import PHI, STAGE_A
from plot_ot.tasks.text_data import Sizes
from plot_ot.transport import couple

GEMMA = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "intermediate_size": 256,
    "query_pre_attn_scalar": 16,
}
CHOSEN = {"answer_pointer": 18, "answer_token": 24}
"""The blocks that the paper's methods settle on."""
COUNTED = ("plot", "plot-native", "plot-pca", "plot-das", "das")
GPU = 400e12
"""FLOP/s in bfloat16 that large products reach on the authors' kind of GPU: 40 % of an H100's peak."""
VARIANTS = 32
ISA = "ONEDNN_MAX_CPU_ISA"


def build(sizes: Mapping[str, Any]) -> nn.Module:
    """Random weights in bfloat16; eager attention, because the others leave out the soft-capping."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    before = torch.get_default_dtype()
    torch.manual_seed(1000)
    torch.set_default_dtype(torch.bfloat16)  # never 10 GB of float32
    try:
        return Gemma2ForCausalLM(Gemma2Config(**sizes, attn_implementation="eager")).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def avoid_barred_amx() -> str:
    """The instructions that oneDNN may use; to be called before the first product of this process.

    On some virtual machines the CPU announces AMX, and using it kills the process.
    """
    probe = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    if ISA not in os.environ and subprocess.run([sys.executable, "-c", probe], stderr=subprocess.DEVNULL).returncode:  # noqa: S603
        os.environ[ISA] = "AVX512_CORE_BF16"
    return os.environ.get(ISA, "all")


def everything(rows: torch.Tensor) -> torch.Tensor:
    """No filter."""
    return torch.ones(len(rows), dtype=torch.bool)


# -- what is measured -----------------------------------------------------------------------------------------


def measure(subject: DecoderSubject, splits: Splits, floor: int) -> dict[str, Any]:
    """Recording and Stage A on the fit pairs, and responses at three depths with many variants."""
    say("recording")
    with Peak(floor) as recording_peak:
        [fit], recording = timed(lambda: record(subject, splits.fit))
    store = fit.store
    assert isinstance(store, DecoderStore)
    places, readout, spec = subject.places, as_readout(PHI["stack"][0]), PHI["stack"][1]
    family = whole_places(fit, places)
    say("Stage A")
    with Peak(floor) as stage_peak:
        found, stage_a = timed(lambda: measure_signatures(fit, family, readout, spec))
        couplings, transport = timed(lambda: couple(found, STAGE_A))
    resumed = 2 * len(fit) * sum(left(p, places) for p in places)  # every block's patch, and the unedited prompt beside
    deep = {}
    for p in (places[0], places[len(places) // 2], places[-2]):
        say(f"{VARIANTS} variants at {p.name}")
        gains = torch.linspace(0.1, 1.0, VARIANTS)[:, None].expand(-1, p.width).contiguous()
        batch = EditBatch(p, Frame.identity(p.width), gains)
        deep[p.name] = timed(lambda batch=batch: respond(fit, [batch]))[1]
    tokens = int(store.lengths.sum())
    depth = len(places)
    return {
        "pairs": len(fit),
        "prompts": len(store.lengths),
        "lengths": [int(store.lengths.min()), int(store.lengths.max())],
        "recording": vars(recording) | {"block_tokens": tokens * depth},
        "stage_a": vars(stage_a) | {"block_tokens": resumed},
        "transport": vars(transport),
        "couplings": [
            {"beta": c.beta, "shape": list(c.plan.shape), "converged": c.converged, "flags": [str(f) for f in c.flags]}
            for c in couplings
        ],
        "many_variants": {
            name: vars(s) | {"block_tokens": VARIANTS * len(fit) * left(subject.place(name), places)}
            for name, s in deep.items()
        },
        "cache": {"bytes": store.cache_bytes, "bases": int((store.part >= 0).sum())},
        "activations": {"bytes": sum(a.nbytes for a in store.activations.values()), "width": places[0].width},
        "peak": {"recording": recording_peak.bytes, "stage_a": stage_peak.bytes},
        "responses_finite": bool(torch.isfinite(found.cost).all()),
    }


def left(place: Place, places: Sequence[Place]) -> int:
    """Blocks after a place."""
    return len(places) - 1 - places.index(place)


# -- what the paper's study would need ------------------------------------------------------------------------


def block_tokens(method: Method, fit: BankRecording, splits: Splits) -> dict[str, int]:
    """Tokens through blocks by the kind of stage, if Stage A ends at the paper's blocks; DAS at most, a backward pass
    counting as two."""
    places, m, calibration = fit.subject.places, len(splits.fit.variables), len(splits.calibration)
    last = len(places) - 1
    chosen = {v: places[min(block, last)] for v, block in CHOSEN.items()}
    open_to: dict[str, list[Place]] = {v: list(places) for v in chosen}
    count = {"signatures": 0, "calibration": 0, "das": 0}
    couplings = 0
    for stage in method.stages:
        some = [p for p in places if any(p in own for own in open_to.values())]
        if isinstance(stage, Localize):
            couplings = len(stage.transport.grid) * len(stage.menus)
            for menu in stage.menus:
                count["signatures"] += len(fit) * sum((len(menu(fit, [p])) + 1) * left(p, places) for p in some)
        elif isinstance(stage, SelectPlaces):
            mean = sum(left(p, places) for p in some) / len(some)
            count["calibration"] += round(m * stage.shortlist * calibration * mean)
            open_to = {v: [p] for v, p in chosen.items()}
        elif isinstance(stage, Calibrate):
            grid = couplings * len(stage.search.sizes) * len(stage.search.strengths)
            count["calibration"] += grid * calibration * sum(left(p, places) for p in chosen.values())
        elif isinstance(stage, TrainDas):
            assert isinstance(stage.dimensions, tuple)
            for own in open_to.values():
                for p in own:
                    trained = sum(k < p.width for k in stage.dimensions) * stage.spec.restarts
                    count["das"] += 3 * trained * len(fit) * stage.spec.most * left(p, places)
                    count["calibration"] += len(stage.dimensions) * calibration * left(p, places)
    count["test"] = sum(len(bank) * left(chosen[v], places) for (v, _), bank in splits.test.items())
    return count


def study(subject: DecoderSubject, seed: int) -> dict[str, Any]:
    """The paper's study at its own sizes, counted."""
    splits = mcqa_data.draw_splits(seed, everything, Sizes()).splits
    banks = [splits.fit, splits.calibration, *splits.test.values()]
    bases = distinct_rows(torch.cat([b.base for b in banks]))
    rows = distinct_rows(torch.cat([bases, *(b.source for b in banks)]))
    lengths, base_lengths = (subject.encode(some)[1].sum(dim=1) for some in (rows, bases))
    fit, depth = unrecorded(subject, splits.fit), len(subject.places)
    methods = MultipleChoice().catalogue()
    plain_a = 2 * depth * len(splits.fit) * int(lengths.sum()) // len(lengths) * depth
    return {
        "prompts": len(rows),
        "tokens": int(lengths.sum()),
        "recording": int(lengths.sum()) * depth,
        "plain_stage_a": plain_a,
        "cache_bytes": sum(subject.cache_bytes(1, int(n)) for n in base_lengths),
        "methods": {name: block_tokens(methods[name], fit, splits) for name in COUNTED},
        "flop_per_block_token": 2 * sum(p.numel() for p in subject.decoder.blocks[0].parameters() if p.ndim == 2),
    }


# -- the report -----------------------------------------------------------------------------------------------


def each(s: Mapping[str, float]) -> list[str]:
    """Block-tokens, CPU seconds, and milliseconds per block-token."""
    return [f"{s['block_tokens']:,}", f"{s['cpu']:.1f}", f"{1e3 * s['cpu'] / s['block_tokens']:.2f}"]


def page(results: Mapping[str, Any]) -> str:
    r, s, m = results["measured"], results["study"], results["machine"]
    depth = results["config"]["num_hidden_layers"]
    whole = 1e3 * r["stage_a"]["cpu"] / r["stage_a"]["block_tokens"]
    work = [["recording", *each(r["recording"])], ["Stage A, one patch per block", *each(r["stage_a"])]]
    work += [[f"{VARIANTS} variants at {name}", *each(x)] for name, x in r["many_variants"].items()]
    counted = []
    for name, parts in s["methods"].items():
        total = s["recording"] + sum(parts.values())
        seconds = total * s["flop_per_block_token"] / GPU
        cells = [f"{parts[p]:,}" if parts[p] else "" for p in ("signatures", "calibration", "das", "test")]
        counted.append([f"`{name}`", *cells, f"{total:,}", f"{total / s['recording']:.2f}", f"{seconds:.1f}"])
    converged = sum(c["converged"] for c in r["couplings"])
    load = ", ".join(f"{x:.2f}" for x in results["load_average"])
    lines = [
        "# Gemma-2-2B's shape",
        "",
        "The paper's model was not available to us. This is a network of its shape with random weights: what do "
        "recording and edits cost on one CPU core, and what would the paper's study need? A block-token is one "
        "token through one block.",
        "",
        f"`{results['command']}`; commit {results['commit']}; load average {load}.",
        "",
        f"{m['cpu']}, {m['cores']} cores, {m['ram_gb']:.0f} GB, torch {m['versions']['torch']}, transformers "
        f"{m['versions']['transformers']}; {m['torch_threads']} torch thread, bfloat16 (oneDNN with "
        f"{results['instructions']} instructions), random weights, "
        f"{results['parameters']:,} parameters ({results['weights'] / 1e9:.2f} GB), built in "
        f"{results['building']['cpu']:.0f} CPU seconds.",
        "",
        f"{r['pairs']} MCQA pairs (not filtered, since random weights answer nothing right): {r['prompts']} prompts of "
        f"{r['lengths'][0]} to {r['lengths'][1]} tokens of a word-level tokenizer. Stage A: signatures over {depth} "
        f"blocks of width {r['activations']['width']}, {len(r['couplings'])} couplings of shape "
        f"{' x '.join(map(str, r['couplings'][0]['shape']))} ({converged} converged).",
        "",
        *markdown(["work", "block-tokens", "CPU s", "ms per block-token"], work),
        "",
        f"A token resumed at block b runs the {depth - 1} - b blocks after it: {whole:.2f} ms each, or "
        f"{whole * (depth - 1) / 2:.0f} ms per resumed token on average over blocks.",
        "",
        f"Memory above the weights: {r['peak']['recording'] / 1e9:.2f} GB while recording, "
        f"{r['peak']['stage_a'] / 1e9:.2f} GB in Stage A; keys and values of {r['cache']['bases']} base prompts "
        f"{r['cache']['bytes'] / 1e6:.1f} MB, recorded activations {r['activations']['bytes'] / 1e6:.1f} MB.",
        "",
        "## The paper's study, counted",
        "",
        f"{s['prompts']} distinct prompts ({s['tokens']:,} tokens, {s['recording']:,} block-tokens to record; keys and "
        f"values {s['cache_bytes'] / 1e9:.2f} GB in bfloat16), {s['flop_per_block_token'] / 1e9:.3f} GFLOP per "
        f"block-token. The counts assume that Stage A ends at blocks {' and '.join(map(str, CHOSEN.values()))}, as "
        "in the paper, and that DAS trains all its epochs. The last column is arithmetic, not a measurement: matrix "
        f"products alone at {GPU / 1e12:.0f} TFLOP/s. Hooked full forwards would need {s['plain_stage_a']:,} "
        f"block-tokens for Stage A alone ({s['plain_stage_a'] / s['recording']:.0f} recordings).",
        "",
        *markdown(
            ["method", "signatures", "calibration", "DAS", "test", "in all", "recordings", "GPU seconds, at least"],
            counted,
        ),
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--small", action="store_true", help="a model of toy size")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    args = parser.parse_args(argv)
    torch.set_num_threads(THREADS)
    instructions = avoid_barred_amx()
    config = GEMMA | SMALL if args.small else GEMMA
    free = psutil.virtual_memory().available
    if not args.small and free < 8e9:
        raise SystemExit(f"The model and what it records need about 7 GB; {free / 1e9:.1f} GB are free. Run it later.")
    say("building the model")
    model, building = timed(lambda: build(config))
    tokenizer = build_tokenizer()
    encode = mcqa_data.encoder(tokenizer, bos=tokenizer.bos_token_id)
    subject = DecoderSubject(model, encode, mcqa_data.answer_tokens(tokenizer))
    splits = mcqa_data.draw_splits(args.seed, everything, Sizes(args.pairs, 4, 4, 4)).splits
    measured = measure(subject, splits, resident())
    results = {
        "command": shlex.join(["python", "benchmarks/gemma_shape.py", *argv]),
        "commit": commit(),
        "machine": machine(),
        "load_average": os.getloadavg(),
        "instructions": instructions,
        "config": config,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": sum(p.nbytes for p in model.parameters()),
        "building": vars(building),
        "measured": measured,
        "study": study(subject, args.seed),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gemma_shape.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "gemma_shape.md").write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main(sys.argv[1:])
