"""What does a recording cost when prompts that begin alike run as a trie? Beside plain recordings, in one process.

python benchmarks/trie_recording.py
python benchmarks/trie_recording.py --prompts 100 --rounds 1 --tasks mcqa ioi

The prompts are the first distinct ones of a study's banks (`--seed`), drawn as if the model answered all correctly;
`mcqa, five shots` has five solved questions in front of each. Every round records all of them both ways, the order
changing from round to round, once as a filter does (no keys and values kept) and once with every second prompt as a
base. What is done once per model, two passes over one prompt to look at its masks, is done before. Writes
docs/results/trie.md and trie.json, in which every task has its section.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from heq_speed import commit, machine, say
from measuring import Peak, resident, timed
from pages import markdown
from plot_ot.abstract.prompts import encode
from plot_ot.subjects import DecoderSubject
from plot_ot.subjects.decoder import trie as trie_module
from plot_ot.subjects.decoder.store import DecoderStore
from plot_ot.subjects.decoder.trie import Trie
from plot_ot.tasks import IndirectObject, MultipleChoice
from plot_ot.tasks.language import LanguageTask

SHOTS = 5


def prompts_of(task: LanguageTask, count: int, seed: int, shots: int) -> list[str]:
    """The first distinct prompts of a study's banks, after so many solved questions of the last bank."""
    splits = task.draw(seed, lambda rows: torch.ones(len(rows), dtype=torch.bool)).splits
    banks = [splits.fit, splits.calibration, *splits.test.values()]
    pairs = torch.cat([torch.stack([b.base, b.source], dim=1).flatten(0, 1) for b in banks])
    texts = list(dict.fromkeys(task.render(pairs)))
    solved = banks[-1].base[-shots:]
    answers = [task.data.ANSWERS[int(a)] for a in task.causal_model().answer(solved)]
    front = "".join(f"{q} {a}\n\n" for q, a in zip(task.render(solved), answers, strict=True)) if shots else ""
    return [front + text for text in texts[:count]]


def subject_of(task: LanguageTask, texts: list[str]) -> tuple[DecoderSubject, Tensor]:
    """The model over these prompts, whose input rows are their numbers."""
    lm = task.language_model

    def tokens(rows: Tensor) -> tuple[Tensor, Tensor]:
        return encode([texts[int(r)] for r in rows[:, 0]], lm.tokenizer, bos=lm.bos)

    answers = task.data.answer_tokens(lm.tokenizer)
    return DecoderSubject(lm.model, tokens, answers), torch.arange(len(texts)).unsqueeze(1)


@contextmanager
def plainly() -> Iterator[None]:
    """While open, no trie is worth it."""
    before, trie_module.WORTH_IT = trie_module.WORTH_IT, 0.0
    try:
        yield
    finally:
        trie_module.WORTH_IT = before


def measure(task: LanguageTask, texts: list[str], rounds: int) -> dict[str, Any]:
    """Rounds of plain and shared recordings, with and without bases."""
    subject, rows = subject_of(task, texts)
    ids, real = subject.encoded(rows)
    trie = Trie(ids, real)
    bases = {"filter": torch.zeros(0, dtype=torch.long), "bases": torch.arange(0, len(rows), 2)}
    found: dict[str, Any] = {
        "prompts": len(texts),
        "tokens": int(trie.lengths.sum()),
        "nodes": len(trie),
        "longest": trie.paths.shape[1],
        "runs": [],
    }
    subject.record(rows[:4])  # warm, and checked
    longest = int(trie.lengths.argmax())
    subject.sharing.tables(subject.decoder, ids[longest : longest + 1, -int(trie.lengths[longest]) :])
    for k in range(rounds):
        for kind, some in bases.items():
            run: dict[str, Any] = {"kind": kind}
            stores: dict[str, DecoderStore] = {}
            for way in ("plain", "trie")[:: -1 if k % 2 else 1]:
                run[way], stores[way] = _recorded(subject, rows, some, way)
            scale = stores["plain"].final.abs().max()
            run["difference"] = float((stores["trie"].final - stores["plain"].final).abs().max() / scale)
            found["runs"].append(run)
            speed = run["plain"]["cpu"] / run["trie"]["cpu"]
            say(f"    {kind}: plain {run['plain']['cpu']:.1f} s, trie {run['trie']['cpu']:.1f} s, {speed:.2f}x")
    return found


def _recorded(subject: DecoderSubject, rows: Tensor, bases: Tensor, way: str) -> tuple[dict[str, float], DecoderStore]:
    gc.collect()

    def work() -> DecoderStore:
        return subject.record(rows, bases)

    def plain() -> DecoderStore:
        with plainly():
            return subject.record(rows, bases)

    ways: dict[str, Callable[[], DecoderStore]] = {"plain": plain, "trie": work}
    with Peak(resident()) as peak:
        store, seconds = timed(ways[way])
    return {"cpu": seconds.cpu, "wall": seconds.wall, "peak": peak.bytes, "keys": store.cache_bytes}, store


def page(results: dict[str, Any]) -> list[str]:
    """The page: counts, seconds, memory."""
    rows = []
    for name, r in results.items():
        count = r["tokens"] / r["nodes"]
        for kind in ("filter", "bases"):
            runs = [x for x in r["runs"] if x["kind"] == kind]
            ratios = sorted(x["plain"]["cpu"] / x["trie"]["cpu"] for x in runs)
            speed = median(ratios)
            peak = {w: max(x[w]["peak"] for x in runs) / 1e6 for w in ("plain", "trie")}
            keys = {w: runs[0][w]["keys"] / 1e6 for w in ("plain", "trie")}
            rows.append(
                [
                    f"{name}, {kind}",
                    f"{r['prompts']}",
                    f"{r['tokens']:,} / {r['nodes']:,} = {count:.2f}",
                    f"{median(x['plain']['cpu'] for x in runs):.1f} / {median(x['trie']['cpu'] for x in runs):.1f}",
                    f"{speed:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                    f"{speed / count:.0%}",
                    f"{1 / speed:.2f}",
                    f"{keys['plain']:.0f} / {keys['trie']:.0f}",
                    f"{peak['plain']:.0f} / {peak['trie']:.0f}",
                    f"{max(x['difference'] for x in runs):.0e}",
                ]
            )
    head = ["recording", "prompts", "tokens / nodes", "CPU s plain / trie", "faster", "of the count", "in recordings"]
    head += ["keys MB", "peak MB", "difference"]
    ran = [
        f"- {name}: `{r['command']}` at commit {r['commit']}, load {r['machine']['load_average_before'][0]:.0f} on "
        f"{r['machine']['cores']} cores ({r['machine']['cpu']})"
        for name, r in results.items()
    ]
    return [
        "# Recording prompts as a trie",
        "",
        "Prompts of one template begin alike. Recorded as a trie, tokens that several prompts share at their "
        "beginning run once (a *node*). How much time does that save? The model is SmolLM2-135M in float32, on one "
        "thread. Plain and shared recordings alternate in one process, so that both see the same machine.",
        "",
        "- `faster`: CPU seconds of the plain recording divided by those of the trie, median over rounds (range).",
        "- `of the count`: that, as a share of tokens / nodes, the saving that counting tokens promises.",
        "- `in recordings`: the trie's CPU seconds in units of a plain recording.",
        "- `filter` keeps no keys and values, `bases` those of every second prompt.",
        "- `peak`: the memory that the process took on top of what it had before.",
        "- `difference`: the largest one between last residuals, relative to the largest of those.",
        "",
        *markdown(head, rows),
        "",
        "Made by",
        "",
        *ran,
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="*", default=["mcqa", "ioi", "mcqa, five shots"])
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds: dict[str, tuple[LanguageTask, int]] = {
        "mcqa": (MultipleChoice(model="smollm2"), 0),
        "ioi": (IndirectObject(model="smollm2"), 0),
        "mcqa, five shots": (MultipleChoice(model="smollm2"), SHOTS),
    }
    command = f"python benchmarks/trie_recording.py --prompts {args.prompts} --rounds {args.rounds} --seed {args.seed}"
    store = args.results / "trie.json"
    results: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    for name in args.tasks:
        task, shots = kinds[name]
        say(f"  {name}")
        about = {"command": f"{command} --tasks '{name}'", "commit": commit(), "machine": machine()}
        found = measure(task, prompts_of(task, args.prompts, args.seed, shots), args.rounds)
        results[name] = about | found
        args.results.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps(results, indent=1) + "\n")
        (args.results / "trie.md").write_text("\n".join(page(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
