"""Train the tiny language models and write down what is in them.

    python scripts/train_tiny.py [planted-1000 ...]     (default: all; about 2-4 CPU minutes each, one thread)
    python scripts/train_tiny.py --measure-only         (measure the nets that are there, write the table)

Every net learns to answer. Auxiliary heads, dropped afterwards, show it the way: in all nets one at the colour of each
option (is it the asked one?); in planted nets also readers of pointer, register and token at the last token. Planted
nets are trained with interchange interventions on top (see `plot_ot.models.tiny` for what is planted).
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from plot_ot.files.writing import to_json, write_atomically
from plot_ot.models import tiny
from plot_ot.models.folders import SOURCE_TREE
from plot_ot.models.planting import Plant, PlantBatch, planted_loss, planted_module, swapped_answers
from plot_ot.models.vocabulary import FAMILIAR, FRESH, LETTERS
from plot_ot.tasks.mcqa_data import FAMILIES, VARIABLES, causal_model, draw_rows, questions, sources
from plot_ot.tasks.mcqa_text import OPTIONS, SYM, answer_tokens, encoder

POINTER_BLOCK, TOKEN_BLOCKS = 2, (3, 4, 5)
REGISTER = 2
"""How many lines' symbols the register holds."""
COLOUR_TOKENS = [-16, -12, -8, -4]
"""Where the options' colours stand, from the end."""
CAUSAL = causal_model()


@dataclass(frozen=True)
class Recipe:
    """How a net is trained."""

    condition: str
    seed: int
    steps: int = 1500
    pairs: int = 24
    rate: float = 2e-3
    flag_block: int = 0
    """After which block the options' colours know whether they are the asked one."""

    @classmethod
    def of(cls, name: str) -> Recipe:
        return cls(tiny.TINY[name], int(name.split("-")[-1]))

    @property
    def plants(self) -> list[Plant]:
        """Nothing for the negative control."""
        if self.condition != "planted":
            return []
        pointer = tiny.pointer_coordinates(self.seed)
        register = tuple(k for k in range(tiny.WIDTH) if k not in pointer)
        return [
            Plant("answer_pointer", (POINTER_BLOCK,), coordinates=pointer),
            Plant("register", (POINTER_BLOCK,), coordinates=register),
            Plant("answer_token", TOKEN_BLOCKS),
        ]


# -- pairs ------------------------------------------------------------------------------------------------------


def draw_pairs(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Base and source rows: all families and templates, half of the bases with A-D, in both directions."""
    style: dict[str, Any] = {"about": questions(FAMILIAR), "templates": (0, 0, 0, 1, 2)}
    lettered = draw_rows(count - count // 2, generator, letters=range(len(LETTERS)), **style)
    base = torch.cat([draw_rows(count // 2, generator, **style), lettered])
    base = base[torch.randperm(count, generator=generator)]
    parts = base.tensor_split(len(FAMILIES))
    source = torch.cat([sources(part, f, generator) for part, f in zip(parts, FAMILIES, strict=True)])
    order = torch.randperm(count, generator=generator)
    base, source = base[order], source[order]
    half = count // 2
    return torch.cat([base[:half], source[half:]]), torch.cat([source[:half], base[half:]])


def register_swap(base: Tensor, source: Tensor) -> Tensor:
    """What the base's answer becomes when the symbols of the first lines are taken from the source."""
    values = CAUSAL.run(base)
    line = values["answer_pointer"] - 1
    held = source[:, SYM].gather(1, line.unsqueeze(1)).squeeze(1)
    return torch.where(line < REGISTER, held, values["answer_token"])


class Words:
    """Rows to tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode = encoder(tokenizer, bos=tokenizer.bos_token_id)
        self.letters = torch.tensor([group[0] for group in answer_tokens(tokenizer)])

    def batch(self, base: Tensor, source: Tensor) -> PlantBatch:
        ids, mask = self.encode(torch.cat([base, source]))
        labels = {v: self.letters[CAUSAL.swap(base, source, v)] for v in VARIABLES}
        labels["register"] = self.letters[register_swap(base, source)]
        return PlantBatch(ids, mask, self.letters[CAUSAL.answer(torch.cat([base, source]))], labels)


# -- training ---------------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Linear readers that are only there while training."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.flag = nn.Linear(tiny.WIDTH, 1)
        self.parts = [list(p.coordinates or range(tiny.WIDTH)) for p in recipe.plants]
        sizes = [OPTIONS, REGISTER * len(LETTERS), len(LETTERS)]
        self.readers = nn.ModuleList(nn.Linear(len(p), n) for p, n in zip(self.parts, sizes, strict=False))

    def loss(self, rows: Tensor, options: Tensor, last: dict[int | str, Tensor]) -> Tensor:
        """`options`: states of the options' colours; `last`: of the last token after each planted block."""
        values = CAUSAL.run(rows)
        pointer = values["answer_pointer"] - 1
        loss = F.cross_entropy(self.flag(options).squeeze(2), pointer)
        if self.readers:
            states = [last[b] for b in (POINTER_BLOCK, POINTER_BLOCK, TOKEN_BLOCKS[0])]
            read = [r(x[:, p]) for r, x, p in zip(self.readers, states, self.parts, strict=True)]
            held = read[1].view(len(rows), len(LETTERS), REGISTER)
            loss = loss + F.cross_entropy(read[0], pointer) + F.cross_entropy(held, rows[:, SYM][:, :REGISTER])
            loss = loss + F.cross_entropy(read[2], values["answer_token"])
        return loss


def train(recipe: Recipe) -> Any:
    """AdamW with warm-up and cosine decay; one batch of pairs a step."""
    tokenizer = tiny.build_tokenizer()
    words, plants = Words(tokenizer), recipe.plants
    torch.manual_seed(recipe.seed)
    model, heads = tiny.build_model(tiny.config(len(tokenizer))), Heads(recipe)
    generator = torch.Generator().manual_seed(recipe.seed)
    optimiser = torch.optim.AdamW(
        [*model.parameters(), *heads.parameters()], lr=recipe.rate, weight_decay=0.01, betas=(0.9, 0.98)
    )
    options: list[Tensor] = []
    watch = planted_module(model, recipe.flag_block).register_forward_hook(
        lambda _module, _inputs, hidden: options.append(hidden[:, COLOUR_TOKENS])
    )
    began, seen = time.process_time(), torch.zeros(1 + len(plants))
    for step in range(recipe.steps):
        optimiser.param_groups[0]["lr"] = recipe.rate * min(
            (step + 1) / 50, 0.525 + 0.475 * math.cos(math.pi * step / recipe.steps)
        )
        options.clear()
        base, source = draw_pairs(recipe.pairs, generator)
        found = planted_loss(model, words.batch(base, source), plants, generator)
        loss = found.total + heads.loss(torch.cat([base, source]), options[0], dict(found.activations))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *heads.parameters()], 1.0)
        optimiser.step()
        seen += 0.02 * (torch.tensor([found.right, *found.swapped_right]) - seen)
        if (step + 1) % 100 == 0:
            now = " ".join(f"{x:.3f}" for x in seen.tolist())
            print(f"{step + 1:5d}  {time.process_time() - began:5.0f} s  own answer, then swaps: {now}", flush=True)
    watch.remove()
    return model.eval().requires_grad_(False)


# -- measuring --------------------------------------------------------------------------------------------------


def measure(name: str, pairs: int = 500) -> dict[str, Any]:
    """Accuracy on objects never seen in training, and of swaps, per block, on pairs of such objects.

    All over the whole vocabulary. Pairs: those of the two families that can tell AP from AT, where the source moves the
    pointer and the AP swap's answer differs from the source's.
    """
    model, tokenizer = tiny.load_tiny(name)
    words, generator = Words(tokenizer), torch.Generator().manual_seed(50_000)
    fresh = questions(FRESH)

    @torch.no_grad()
    def accuracy(rows: Tensor) -> float:
        batch = words.batch(rows, rows)
        half = slice(0, len(rows))
        out = model(input_ids=batch.ids[half], attention_mask=batch.mask[half]).logits[:, -1]
        return float((out.argmax(dim=1) == batch.answers[half]).double().mean())

    truth: dict[str, Any] = {
        "accuracy": {
            "A-D": accuracy(draw_rows(2000, generator, about=fresh)),
            "any letters": accuracy(draw_rows(2000, generator, about=fresh, letters=range(len(LETTERS)))),
            "other templates": accuracy(
                draw_rows(2000, generator, about=fresh, letters=range(len(LETTERS)), templates=(1, 2))
            ),
        }
    }
    planted = Recipe.of(name).plants
    for family in ("answerPosition_randomLetter", "lineOrder"):
        base = draw_rows(4 * pairs, generator, about=fresh)
        source = sources(base, family, generator)
        at_base, at_source = CAUSAL.run(base), CAUSAL.run(source)
        apart = at_base["answer_pointer"] != at_source["answer_pointer"]
        apart &= CAUSAL.swap(base, source, "answer_pointer") != at_source["letter"]
        base, source = base[apart][:pairs], source[apart][:pairs]
        batch = words.batch(base, source)
        whole: dict[str, list[float]] = {v: [] for v in VARIABLES}
        for block in range(tiny.BLOCKS):
            answers = swapped_answers(model, batch, Plant("whole", (block,)), block)
            for v in VARIABLES:
                whole[v].append(float((answers == batch.labels[v]).double().mean()))
        part = {}
        for plant in planted[:2]:
            answers = swapped_answers(model, batch, plant, POINTER_BLOCK)
            part[plant.variable] = float((answers == batch.labels[plant.variable]).double().mean())
        truth[family] = {"full patch": whole, "planted coordinates": part}
    return truth


def write(name: str, model: Any, seconds: float) -> None:
    """Weights as float16, and a description without measurements."""
    recipe = Recipe.of(name)
    weights = {k: v.half().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    folder = tiny.ASSETS if name in tiny.EMBEDDED else SOURCE_TREE / "models" / "tiny"
    write_atomically(folder / f"{name}.safetensors", save(weights))
    tokenizer = tiny.build_tokenizer()
    text = tokenizer.backend_tokenizer.to_str(pretty=False)
    write_atomically(tiny.ASSETS / "tokenizer.json", text.encode())
    planted = {
        p.variable: {"blocks": list(p.layers), "coordinates": list(p.coordinates or range(tiny.WIDTH))}
        for p in recipe.plants
    }
    described = {
        "format": tiny.FORMAT,
        "name": name,
        "condition": recipe.condition,
        "recipe": asdict(recipe),
        "cpu_seconds": round(seconds),
        "config": tiny.config(len(tokenizer)),
        "planted": planted,
    }
    write_atomically(tiny.ASSETS / f"{name}.json", to_json(described, indent=1).encode())


def add_truth(name: str) -> None:
    """Measure the net as it is loaded and write that into its description."""
    described = tiny.describe_tiny(name) | {"truth": measure(name)}
    write_atomically(tiny.ASSETS / f"{name}.json", to_json(described, indent=1).encode())


SHORT = {"answerPosition_randomLetter": "aP+rL", "lineOrder": "lineOrder"}


def write_table() -> None:
    """The ground truths of all nets, for people."""
    lines = ["# The tiny nets", "", (tiny.__doc__ or "").strip(), "", "## Training", "", (__doc__ or "").strip(), ""]
    lines.append(TABLE_HEAD)
    for name in tiny.TINY:
        found = tiny.describe_tiny(name)
        truth, where = found["truth"], found["planted"]
        accuracy = " / ".join(f"{x:.4f}" for x in truth["accuracy"].values())
        span = where["answer_pointer"]["coordinates"] if where else []
        at = f"{span[0]}-{span[-1]}" if span else "-"
        for family, short in SHORT.items():
            row = truth[family]
            cells = [" ".join(f"{x:.3f}" for x in row["full patch"][v]) for v in VARIABLES]
            cells += [f"{row['planted coordinates'][v]:.3f}" if where else "-" for v in ("answer_pointer", "register")]
            lines.append("| " + " | ".join([name, accuracy, at, short, *cells]) + " |")
    write_atomically(tiny.ASSETS / "README.md", ("\n".join(lines) + "\n").encode())


TABLE_HEAD = """\
## What was measured

Written by `scripts/train_tiny.py` from the nets as they are loaded (float16 on disk, float32 in memory). Accuracy is on
2,000 prompts each with symbols A-D / any letters / any letters in the other two templates; objects are the 20 that
training never saw; every number is over the whole vocabulary. Full patch: the last token's whole state after blocks
0 .. 5 taken from the source, scored on the AP and on the AT label, 500 pairs of a family that tells the two apart.
A full patch of block 2 of a planted net is right for AP where the source's pointer is 3 or 4: half of the pairs. The
last two columns swap only what was planted: AP's coordinates (AP label), the other ones (the register's own label).

| net | accuracy | AP coordinates | pairs | full patch, AP label | full patch, AT label | AP part | register part |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", default=list(tiny.TINY), help=f"of {', '.join(tiny.TINY)}")
    parser.add_argument("--measure-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.names:
        if not options.measure_only:
            print(name, flush=True)
            began = time.process_time()
            model = train(Recipe.of(name))
            write(name, model, time.process_time() - began)
        add_truth(name)
        print(to_json(tiny.describe_tiny(name)["truth"]), flush=True)
    write_table()


if __name__ == "__main__":
    main()
