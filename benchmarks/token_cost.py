"""What `plot` over named tokens costs beside the tokens that it runs through blocks.

python benchmarks/token_cost.py                                  # an embedded net, and a random Llama of 9 x 576
python benchmarks/token_cost.py --network smollm2 --layers 9     # nine blocks of a real one

A plain forward over the study's prompts says what a block-token (one token through one block) takes; hooks on the
blocks count how many the search runs, forward and backward; the planner says beforehand how many it would. The ratio is
CPU seconds over counted block-tokens times the plain forward's seconds for one. Every network has its row in
docs/results/token_cost.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import plot_ot
from heq_speed import commit
from measuring import Peak, resident
from pages import markdown
from plot_ot.abstract.admission import Admission
from plot_ot.abstract.splitting import from_inputs
from plot_ot.localizing import read_given
from plot_ot.methods import progressive
from plot_ot.models.tiny import TINY, build_tokenizer
from plot_ot.planner import MACHINES, Scene, predict
from plot_ot.signatures import SignatureSpec, as_readout
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import DecoderSubject, record
from token_stage import TEMPLATE, questions

NAMED = {"symbol1": "{s1}", "period3": "{s3}."}
"""The two tokens that are looked at besides the last."""
WANTED = 3.0


def hypothesis() -> plot_ot.Hypothesis:
    """Multiple choice: the answer's place and the answer."""
    h = plot_ot.Hypothesis(template=TEMPLATE + "Answer:", positions=NAMED, name="two-tokens")

    @h.variable
    def answer_pointer(colour, c0, c1, c2, c3):  # type: ignore[no-untyped-def]
        return [c0, c1, c2, c3].index(colour)

    @h.variable
    def answer_token(answer_pointer, s0, s1, s2, s3):  # type: ignore[no-untyped-def]
        return [s0, s1, s2, s3][answer_pointer]

    @h.output
    def answer(answer_token):  # type: ignore[no-untyped-def]
        return answer_token

    return h


def random_llama(blocks: int, width: int) -> tuple[nn.Module, Any]:
    """An untrained model of SmolLM2's proportions, with the embedded nets' words."""
    import transformers

    tokenizer = build_tokenizer()
    torch.manual_seed(1000)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=blocks,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 192),
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for p in model.parameters():
        if p.ndim > 1:
            p.normal_(0, 2 / p.shape[1] ** 0.5)  # so that edits matter
    return model, tokenizer


class Counted:
    """Tokens through blocks, forward and backward."""

    def __init__(self) -> None:
        self.forward = self.backward = 0

    def __call__(self, _: nn.Module, __: Any, output: Any) -> None:
        h = output[0] if isinstance(output, tuple) else output
        tokens = h.shape[0] * h.shape[1]
        self.forward += tokens
        if h.requires_grad:
            h.register_hook(lambda _: self._back(tokens))

    def _back(self, tokens: int) -> None:
        self.backward += tokens

    @property
    def all(self) -> int:
        return self.forward + self.backward


@contextmanager
def counting(subject: DecoderSubject) -> Iterator[Counted]:
    """Count what the blocks run while open."""
    found = Counted()
    hooks = [block.register_forward_hook(found) for block in subject.decoder.blocks]
    yield found
    for hook in hooks:
        hook.remove()


def plain(subject: DecoderSubject, rows: Tensor) -> float:
    """CPU seconds of a block-token in plain batched forwards over whole prompts."""
    ids, real = subject.encoded(rows)
    at_once = max(1, subject.recorded_at_once("cpu") // ids.shape[1])
    with counting(subject) as ran, torch.no_grad():
        start = time.process_time()
        for some in torch.arange(len(ids)).split(at_once):
            subject.decoder.trunk(input_ids=ids[some], attention_mask=real[some].long())
        return (time.process_time() - start) / ran.all


def measure(subject: DecoderSubject, h: plot_ot.Hypothesis, given: Any, pairs: int, seed: int) -> dict[str, Any]:
    """Search once, with plain forwards before and after it."""
    everything = torch.Generator().manual_seed(seed)
    every = Admission(lambda rows: torch.ones(len(rows), dtype=torch.bool))
    splits = from_inputs(h.causal, given, every, pairs, everything).splits
    fit, calibration = record(subject, splits.fit, splits.calibration)
    variables = splits.fit.variables
    problem = Problem(subject, fit, calibration, variables, as_readout("logits"), seed)
    method = progressive(subject.places, len(variables), SignatureSpec(normalise="unit", centre=True))
    planned = predict(method, Scene.of_subject(subject, splits, fit.base_outputs.shape[-1]), MACHINES["h100"])
    rows = torch.cat([fit.bank.base, fit.bank.source]).unique(dim=0)
    plain(subject, rows[:8])
    unit = [plain(subject, rows)]
    start = time.process_time()
    ClosedForm()._everywhere(fit, State.start(problem))
    closed = time.process_time() - start
    with counting(subject) as ran, Peak(resident()) as peak:
        start = time.process_time()
        _, parts = method.run(problem)
        took = time.process_time() - start
    unit.append(plain(subject, rows))
    one = sum(unit) / len(unit)
    cases = planned.lowest, planned, planned.highest
    before = [e.cost.block_tokens - e.parts["recording"].block_tokens for e in cases]
    return {
        "places": len(subject.places),
        "width": subject.places[0].width,
        "pairs": len(fit),
        "tokens": float(subject.lengths(rows).double().mean()),
        "block_tokens": ran.all,
        "backward": ran.backward,
        "planned": before,
        "unit": unit,
        "seconds": took,
        "peak": peak.bytes,
        "ratio": took / (ran.all * one),
        "closed_form": closed,
        "parts": {k: v for k, v in parts.items() if v},
        "commit": commit(),
    }


def page(found: dict[str, dict[str, Any]]) -> list[str]:
    """The table of all networks."""
    rows = []
    for name, r in found.items():
        low, expected, high = (f"{x:,.0f}" for x in r["planned"])
        rows.append(
            [
                name,
                f"{r['places']} x {r['width']}",
                str(r["pairs"]),
                f"{r['tokens']:.0f}",
                f"{r['block_tokens']:,}",
                f"{expected} ({low} .. {high})",
                f"{1e6 * sum(r['unit']) / 2:.1f}",
                f"{r['seconds']:.1f}",
                f"**{r['ratio']:.2f}**",
                f"{r['closed_form']:.2f}",
                f"{r['peak'] / 1e6:.0f}" if "peak" in r else "-",
            ]
        )
    head = ["network", "places", "pairs", "tokens", "block-tokens", "planned (lowest .. highest)"]
    head += ["µs of one, plain", "CPU s", "ratio", "CPU s of all closed forms", "peak MB"]
    made = "; ".join(f"{name}: `{r['command']}` at commit {r['commit']}" for name, r in found.items())
    return [
        "# What edits at earlier tokens cost",
        "",
        "What does an edit before the last token cost? Here `plot` searches over two named tokens and the last one, "
        "in every block. A block-token is one token through one block; hooks count those that the search runs, "
        "forward and backward.",
        "",
        "The ratio is the search's CPU seconds divided by what as many block-tokens take in plain forward passes "
        f"over the same prompts, run before and after it in the same process. The target is at most {WANTED:g}. "
        "`planned` is what `predict` says before anything runs. Closed forms are their linear algebra for both "
        "variables at every place; no response is run for it. `peak` is the highest memory of the search above what "
        "the process had with everything recorded.",
        "",
        *markdown(head, rows),
        "",
        "In the last block only the last token runs to the end. The keys and values of the other tokens are computed "
        "there, but not counted.",
        "",
        f"Made by {made}. One thread; CPU seconds, because the machine was shared.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", nargs="*", default=["planted-1000", "llama-9x576"])
    parser.add_argument("--layers", type=int, help="so many blocks, spread out; all by default")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", plot_ot.PlotWarning)
    store = args.results / "token_cost.json"
    found = json.loads(store.read_text()) if store.exists() else {}
    for name in args.network:
        h = hypothesis()
        given = read_given(h, questions(6 * args.pairs, args.seed))
        if name in TINY or not name.startswith("llama-"):
            loaded = plot_ot.load_subject(name)
            model, tokenizer = loaded.model, loaded.tokenizer
        else:
            blocks, width = (int(x) for x in name.removeprefix("llama-").split("x"))
            model, tokenizer = random_llama(blocks, width)
        options = {}
        if args.layers:
            depth = model.config.num_hidden_layers
            options["layers"] = [round(k * (depth - 1) / (args.layers - 1)) for k in range(args.layers)]
        subject = plot_ot.load_subject(model, h, tokenizer=tokenizer, **options)
        row = measure(subject, h, given, args.pairs, args.seed)
        layers = f" --layers {args.layers}" if args.layers else ""
        command = f"python benchmarks/token_cost.py --network {name}{layers} --pairs {args.pairs}"
        found[name] = {**row, "command": command}
        print(name, json.dumps(row), flush=True)
        store.write_text(json.dumps(found, indent=1) + "\n")
        (args.results / "token_cost.md").write_text("\n".join(page(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
