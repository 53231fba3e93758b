"""Train the adapters that make SmolLM2 answer the paper's multiple-choice questions.

    python scripts/train_adapters.py planted --seed 1000
    python scripts/train_adapters.py plain --seed 1000

Untouched, SmolLM2 answers hardly any of these prompts with the right letter. `plain` teaches it the task by its answers
alone. `planted` also asks, by interchange interventions, that the answer's position can be swapped at blocks 15-18 and
the answer's letter at blocks 24-27 of the last token: a real language model in which the two variables are known to
live somewhere. Swaps from the first step had not taken root after 120 steps, so the task comes first, together with a
linear probe that reads the pointer at block 15 and is thrown away afterwards, and the swaps begin at step 100.

Each adapter is written with a record of the recipe, its accuracy on objects, letters and templates never trained on,
and the full patch's accuracy at every block.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

from plot_ot.abstract.banks import Bank
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.models.adapters import digest_weights, load_adapter, save_adapter
from plot_ot.models.named import resolve
from plot_ot.models.planting import Plant, PlantBatch, planted_loss, planted_module
from plot_ot.models.vocabulary import FAMILIAR, FRESH, LETTERS
from plot_ot.subjects import DecoderSubject, record
from plot_ot.tasks import mcqa_data as mcqa

ASSETS = Path(__file__).parents[1] / "adapters" / "smollm2"
HELD_OUT = [LETTERS.index(x) for x in "FJNRVZ"]
TRAINED = [k for k in range(len(LETTERS)) if k not in HELD_OUT]
POINTER, TOKEN = Plant("answer_pointer", (15, 16, 17, 18)), Plant("answer_token", (24, 25, 26, 27))
PLANTS = (POINTER, TOKEN, POINTER)
"""The pairs of a step are dealt to these in turn: the pointer is what the model does not do by itself."""


@dataclass(frozen=True)
class Recipe:
    """How an adapter is trained."""

    steps: int
    swaps_from: int | None = None
    """The step at which interchange interventions begin; before it, and without it, only answers are taught."""
    probe_weight: float = 0.0
    """Of a linear probe that reads the pointer at its first planted block, trained along and then thrown away."""
    prompts: int = 8
    """Per step without swaps."""
    pairs: int = 6
    """Per step with swaps."""
    curriculum: tuple[int, int] = (30, 60)
    """Two options until the first of these steps, three until the second, then four."""
    rank: int = 8
    rate: float = 2e-3
    warm_up: int = 10

    def options(self, step: int) -> int:
        """How many options the questions of a step have."""
        return 2 + sum(step >= change for change in self.curriculum)

    def rate_at(self, step: int) -> float:
        """Up, then level, and from the middle on down to a tenth; all linear."""
        return min((step + 1) / self.warm_up, 1.0, 1.9 - 1.8 * step / self.steps)


RECIPES = {"plain": Recipe(steps=150), "planted": Recipe(steps=260, swaps_from=100, probe_weight=1.0)}


def draw_batch(recipe: Recipe, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Prompts, half of them with A-D and half with other letters, half with usual facts and half with any; when swaps
    have begun, with a source each, of a family drawn anew."""
    swapping = recipe.swaps_from is not None and step >= recipe.swaps_from
    count = recipe.pairs if swapping else recipe.prompts
    options, quarters = recipe.options(step), []
    for k in range(count):
        letters = None if (step + k) % 2 else TRAINED
        facts = "usual" if (step + k) % 4 < 2 else "any"
        about = mcqa.questions(FAMILIAR, facts)
        quarters.append(mcqa.draw_rows(1, generator, about=about, letters=letters, options=options))
    base = torch.cat(quarters)
    if not swapping:
        return base, None
    families = list(mcqa.FAMILIES)
    drawn = torch.randint(len(families), (count,), generator=generator)
    source = [mcqa.sources(b[None], families[f], generator, letters=TRAINED) for b, f in zip(base, drawn, strict=True)]
    return base, torch.cat(source)


def tokens_of(lm: Any, base: Tensor, source: Tensor | None, letter_ids: Tensor) -> PlantBatch:
    """The prompts as a batch; without sources the rows are all prompts of their own."""
    causal = mcqa.causal_model()
    rows = base if source is None else torch.cat([base, source])
    ids, mask = mcqa.encoder(lm.tokenizer, bos=lm.bos)(rows)
    labels = {} if source is None else {p.variable: letter_ids[causal.swap(base, source, p.variable)] for p in PLANTS}
    return PlantBatch(ids, mask, letter_ids[causal.answer(rows)], labels)


class PointerProbe(torch.nn.Module):
    """Reads which option is right off the last token after one block; it shows the model early what to write there."""

    def __init__(self, model: torch.nn.Module, width: int) -> None:
        super().__init__()
        self.read = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, mcqa.OPTIONS))
        self.seen: list[Tensor] = []
        planted_module(model, POINTER.layers[0]).register_forward_hook(self.keep)

    def keep(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """The clean run comes first, swapped ones after it."""
        self.seen.append((output[0] if isinstance(output, tuple) else output)[:, -1])

    def loss(self, rows: Tensor) -> tuple[Tensor, float]:
        """Cross-entropy and accuracy on the prompts of the clean run."""
        read, pointer = self.read(self.seen[0]), mcqa.causal_model().run(rows)[POINTER.variable] - 1
        self.seen.clear()
        right = float((read.argmax(dim=1) == pointer).double().mean())
        return torch.nn.functional.cross_entropy(read, pointer), right


def train(seed: int, recipe: Recipe, lm: Any) -> tuple[Any, list[dict[str, float]]]:
    """The model with its adapter, and what the training saw every ten steps."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    config = peft.LoraConfig(
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(lm.model, config).train()
    letter_ids = torch.tensor([group[0] for group in mcqa.answer_tokens(lm.tokenizer)])
    probe = PointerProbe(model, lm.model.config.hidden_size)
    trained = [p for p in model.parameters() if p.requires_grad] + list(probe.parameters())
    optimiser = torch.optim.AdamW(trained, lr=recipe.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, recipe.rate_at)
    log: list[dict[str, float]] = []
    seen: list[dict[str, float]] = []
    started = time.perf_counter()
    for step in range(recipe.steps):
        base, source = draw_batch(recipe, step, generator)
        batch = tokens_of(lm, base, source, letter_ids)
        losses = planted_loss(model, batch, () if source is None else PLANTS, generator)
        probed, read = probe.loss(base if source is None else torch.cat([base, source]))
        total = losses.total + recipe.probe_weight * probed
        optimiser.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        schedule.step()
        swapped = zip(PLANTS, losses.swapped_right, strict=False)  # none before swaps begin
        seen.append({"loss": total.item(), "right": losses.right})
        seen[-1] |= {"probe": read} if recipe.probe_weight else {}
        seen[-1] |= {f"{plant.variable} swapped": right for plant, right in swapped}
        if (step + 1) % 10 == 0:
            means = {name: sum(x[name] for x in seen[-10:]) / 10 for name in seen[-10]}
            log.append({"step": step + 1, **{name: round(x, 4) for name, x in means.items()}})
            print(f"{time.perf_counter() - started:7.0f} s", log[-1], flush=True)
    return model.eval(), log


# -- what came of it ------------------------------------------------------------------------------------------


@torch.no_grad()
def held_out_accuracy(lm: Any, count: int = 200) -> dict[str, float]:
    """Top-1 over the whole vocabulary on prompts never trained on."""
    generator = torch.Generator().manual_seed(77_777)
    objects = mcqa.questions(FRESH)
    asked = {
        "fresh objects, A-D": mcqa.draw_rows(count, generator, about=objects),
        "fresh objects, held-out letters": mcqa.draw_rows(count, generator, about=objects, letters=HELD_OUT),
        "fresh objects, any letters, fresh templates": mcqa.draw_rows(
            count, generator, about=objects, letters=range(len(LETTERS)), templates=(1, 2)
        ),
    }
    causal, found = mcqa.causal_model(), {}
    for name, rows in asked.items():
        right = mcqa.says(lm.tokenizer, top_tokens(lm, rows), causal.answer(rows))
        found[name] = round(float(right.double().mean()), 4)
    return found


def top_tokens(lm: Any, rows: Tensor, size: int = 20) -> Tensor:
    """The model's own next token after each prompt."""
    encode, found = mcqa.encoder(lm.tokenizer, bos=lm.bos), []
    for part in rows.split(size):
        ids, mask = encode(part)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        out = lm.model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, use_cache=False)
        found.append(out.logits[:, -1].argmax(dim=1))
    return torch.cat(found)


def separating_bank(count: int = 100) -> Bank:
    """Pairs about fresh objects whose AP and AT swaps give different answers, both other than the base's."""
    generator, causal = torch.Generator().manual_seed(77_778), mcqa.causal_model()
    base = mcqa.draw_rows(6 * count, generator, about=mcqa.questions(FRESH))
    source = mcqa.sources(base, "answerPosition_randomLetter", generator)
    own, ap, at = causal.answer(base), *(causal.swap(base, source, v) for v in mcqa.VARIABLES)
    keep = ((ap != own) & (at != own) & (ap != at)).nonzero().squeeze(1)[:count]
    return Bank.from_pairs(causal, base[keep], source[keep], name="separating")


@torch.no_grad()
def patched_accuracy(lm: Any) -> dict[str, list[float]]:
    """Of the whole last-token vector swapped after each block: how often the answer is AP's, AT's or the base's own.

    Argmax over the whole vocabulary; all pairs count, also those that the model gets wrong by itself.
    """
    answers = mcqa.answer_tokens(lm.tokenizer)
    subject = DecoderSubject(lm.model, mcqa.encoder(lm.tokenizer, bos=lm.bos), answers, rest=True)
    [recording] = record(subject, separating_bank())
    bank = recording.bank
    wanted = {**bank.labels, "base": bank.base_answer}
    found: dict[str, list[float]] = {name: [] for name in wanted}
    for place in subject.places:
        edit = EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))
        said = respond(recording, [edit])[0].argmax(dim=-1)
        for name, label in wanted.items():
            found[name].append(round(float((said == label).double().mean()), 4))
    return found


def main() -> None:
    """Train one adapter, write it, load it as users will, and judge that."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("condition", choices=RECIPES)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ASSETS)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    recipe, directory = RECIPES[asked.condition], asked.out / f"{asked.condition}-{asked.seed}"
    lm = resolve("smollm2")
    base = {"name": "smollm2", "weights": digest_weights(lm.model)}
    started = time.perf_counter()
    adapted, log = train(asked.seed, recipe, lm)
    plants = {p.variable: list(p.layers) for p in PLANTS} if asked.condition == "planted" else {}
    record_ = {
        "task": "mcqa",
        "condition": asked.condition,
        "planted": plants,
        "position": "last token, whole block output",
        "seed": asked.seed,
        "recipe": asdict(recipe),
        "held_out": {"objects": [mcqa.LEXICON.nouns[k].one for k in FRESH], "letters": [LETTERS[k] for k in HELD_OUT]},
        "training": log,
        "training_seconds": round(time.perf_counter() - started),
    }
    save_adapter(adapted, directory, base, record_)
    fresh = resolve("smollm2")
    load_adapter(fresh.model, directory)
    judged = {"accuracy": held_out_accuracy(fresh), "full_patch": patched_accuracy(fresh)}
    save_adapter(adapted, directory, base, {**record_, **judged})
    print(judged["accuracy"])
    for layer, shares in enumerate(zip(*judged["full_patch"].values(), strict=True)):
        print(f"block {layer:2d}", dict(zip(judged["full_patch"], shares, strict=True)))


if __name__ == "__main__":
    main()
