"""Small models of the benchmark's four classes that know some prompts by heart, and data in the benchmark's formats."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from plot_ot.mib.cells import TASKS
from plot_ot.mib.questions import Question, question

CITIES = {
    "Paris": {"Continent": "Europe", "Country": "France", "Language": "French"},
    "Lyon": {"Continent": "Europe", "Country": "France", "Language": "French"},
    "Berlin": {"Continent": "Europe", "Country": "Germany", "Language": "German"},
    "Vienna": {"Continent": "Europe", "Country": "Austria", "Language": "German"},
    "Tokyo": {"Continent": "Asia", "Country": "Japan", "Language": "Japanese"},
    "Osaka": {"Continent": "Asia", "Country": "Japan", "Language": "Japanese"},
}
CLASSES = ("GPT2LMHeadModel", "Qwen2ForCausalLM", "Gemma2ForCausalLM", "LlamaForCausalLM")
WIDTH, DEPTH = 32, 2


# -- data ---------------------------------------------------------------------------------------------------------


def _colours(rng: random.Random) -> dict[str, Any]:
    colour, others = rng.choice([("yellow", ["red", "blue", "green"]), ("red", ["blue", "green", "yellow"])])
    thing = {"yellow": "lemon", "red": "tomato"}[colour]
    texts = [colour, *others]
    rng.shuffle(texts)
    labels = rng.sample("ABCDEF", 4)
    lines = "\n".join(f"{label}. {text}" for label, text in zip(labels, texts, strict=True))
    prompt = f"The {thing} is {colour}. What color is the {thing}?\n{lines}\nAnswer:"
    return {"prompt": prompt, "choices": {"label": labels, "text": texts}, "answerKey": texts.index(colour)}


def _arc(rng: random.Random) -> dict[str, Any]:
    entry = _colours(rng)
    return {**entry, "prompt": "Question: " + entry["prompt"].partition(". ")[2]}


def _sum(rng: random.Random) -> dict[str, Any]:
    a, b = rng.randrange(55, 99), rng.randrange(51, 99)
    return {"prompt": f"Q: How much is {a} plus {b}? A: ", "num_digit": 2}


def _city(rng: random.Random) -> dict[str, Any]:
    city, asked = rng.choice(list(CITIES)), rng.choice(["Continent", "Country", "Language"])
    return {"prompt": f"Q: What is the {asked.lower()} of {city}? A:", "entity": city, "attribute": asked}


def _names(rng: random.Random) -> dict[str, Any]:
    a, b = rng.sample(["Mary", "John", "Anna", "Paul"], 2)
    return {"prompt": f"After {a} and {b} went to the park, {rng.choice([a, b])} gave a book to"}


MAKERS = {"4_answer_MCQA": _colours, "ARC_easy": _arc, "arithmetic": _sum, "ravel_task": _city, "ioi_task": _names}
FAMILIES = {
    "4_answer_MCQA": ("answerPosition", "randomLetter", "answerPosition_randomLetter", "noun"),
    "ARC_easy": ("answerPosition", "randomLetter"),
    "arithmetic": ("random", "ones_carry", "tens_op1"),
    "ravel_task": ("attribute", "wikipedia"),
    "ioi_task": ("s1_io_flip", "s2_io_flip", "s1_ioi_flip_s2_ioi_flip", "abc"),
}


def pool(task: str) -> list[dict[str, Any]]:
    """Different prompts of a task."""
    size = 16 if task == "ravel_task" else 12  # three variables share its prompts
    rng, found = random.Random(f"{task} 1000"), {}
    while len(found) < size:
        entry = MAKERS[task](rng)
        found[entry["prompt"]] = entry
    return list(found.values())


def write_data(folder: Path) -> Path:
    """Every task's data as it lies on the hub, in the formats that it may have."""
    for task in TASKS:
        asked = question(task, CITIES)
        at = folder / asked.hub.partition("/")[2] / asked.folder
        at.mkdir(parents=True)
        entries, rng = pool(task), random.Random(1000)
        whole = []
        for k, entry in enumerate(entries):
            others = {f"{f}_counterfactual": rng.choice(entries) for f in FAMILIES[task]}
            whole.append({**entry, **others, "id": k})
        parts = {"train": whole[: len(whole) * 2 // 3], "test": whole[len(whole) * 2 // 3 :]}
        for split, some in parts.items():
            if task == "ARC_easy":
                (at / f"{split}.json").write_text(json.dumps(some))
            elif task == "ravel_task":
                _parquet(at / f"{split}-00000-of-00001.parquet", some)
            else:
                (at / f"{split}.jsonl").write_text("\n".join(json.dumps(e) for e in some))
    (folder / "cities.json").write_text(json.dumps(CITIES))
    return folder


def _parquet(path: Path, entries: list[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(entries), path)


# -- models -------------------------------------------------------------------------------------------------------


def tokenizer(digits: bool, bos: bool) -> Any:
    """Words with the space before them as tokens; numbers whole, or digit by digit as Gemma has them."""
    number = r" ?\d" if digits else r" ?\d+"
    pattern = rf"{number}| ?[A-Za-z]+| ?[^\w\s]|\s"
    texts = [e["prompt"] for task in TASKS for e in pool(task)] + [" ".join(c.values()) for c in CITIES.values()]
    texts += [f"{n}" for n in range(100, 200)] + [f" {x}" for x in "ABCDEF"] + ["Mary John Anna Paul"]
    pieces = dict.fromkeys(["<pad>", "<bos>", "<unk>", *(p for t in texts for p in re.findall(pattern, t))])
    pieces |= dict.fromkeys([p.strip() for p in pieces if p.strip()] + [f" {p.strip()}" for p in pieces if p.strip()])
    made = Tokenizer(models.WordLevel({p: k for k, p in enumerate(pieces)}, unk_token="<unk>"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    made.decoder = decoders.Fuse()
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>", "padding_side": "left"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def untrained(kind: str, vocabulary: int) -> Any:
    """A model of one of the benchmark's classes, with the peculiarity of its heads."""
    torch.manual_seed(1000)
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    usual = {
        **{"vocab_size": vocabulary, "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "intermediate_size": 64},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, **special},
        "initializer_range": 0.1,
    }
    config = {
        "GPT2LMHeadModel": lambda: transformers.GPT2Config(
            vocab_size=vocabulary,
            n_embd=WIDTH,
            n_layer=DEPTH,
            n_head=4,
            n_positions=128,
            **special,
            initializer_range=0.1,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        ),
        "Qwen2ForCausalLM": lambda: transformers.Qwen2Config(**usual),
        "Gemma2ForCausalLM": lambda: transformers.Gemma2Config(
            **usual, head_dim=16, query_pre_attn_scalar=16, sliding_window=64, attn_implementation="eager"
        ),
        "LlamaForCausalLM": lambda: transformers.LlamaConfig(**usual),
    }[kind]()
    return getattr(transformers, kind)(config)


def taught(kind: str, steps: int = 120) -> tuple[Any, Any]:
    """A model and its tokenizer that answers every prompt of its tasks' pools."""
    words = tokenizer(digits=kind == "Gemma2ForCausalLM", bos=kind in ("Gemma2ForCausalLM", "LlamaForCausalLM"))
    model = untrained(kind, len(words))
    rows, wanted = [], []
    for task, (kinds, _) in TASKS.items():
        if kind in kinds:
            asked: Question = question(task, CITIES)
            for entry in pool(task):
                example = asked.read(entry)
                answer = asked.expected(example.values, {})
                answer = f" {answer}" if task == "ioi_task" else answer
                before, after = words(example.prompt)["input_ids"], words(answer, add_special_tokens=False)["input_ids"]
                rows.append([*before, *after])
                wanted.append(len(after))
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    labels = torch.full_like(ids, -100)
    for k, n in enumerate(wanted):
        labels[k, -n:] = ids[k, -n:]
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(steps):
        optimiser.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels).loss
        loss.backward()
        optimiser.step()
        if float(loss.detach()) < 0.04:
            break
    return model.eval(), words
