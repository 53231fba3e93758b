"""Nulls: nothing is to be found, in networks with fresh weights and of values that were shuffled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM as CausalLM
from transformers import Gemma2Config, GPT2Config, LlamaConfig, PretrainedConfig

from plot_ot.abstract.causal_model import CausalModel, Mechanism
from plot_ot.subjects import DecoderSubject, MLPSubject, ModuleSubject, Subject
from truth.kinds import INPUTS, ROWS, SUMS
from truth.known import ABSENT, Known, Truth, draw_splits
from truth.wiring import VALUES

NETWORKS = ("mlp", "gru", "gpt2", "llama", "gemma2")
WIDTH, STATE, DEPTH = 32, 16, 5
SCALE = 3.0
"""Fresh weights are made so much larger than usual on odd seeds: then the answers vary."""


class Recurrent(nn.Module):
    """A gated recurrent cell that reads one input after the other, and a linear head on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(VALUES, STATE), nn.Linear(STATE, VALUES)

    def forward(self, rows: Tensor) -> Tensor:
        state = torch.zeros(len(rows), STATE)
        for now in one_hot(rows).unbind(dim=1):
            state = self.cell(now, state)
        return self.head(state)


def one_hot(rows: Tensor) -> Tensor:
    """[rows, inputs, values]"""
    return F.one_hot(rows.long(), VALUES).float()


def fresh(network: str, seed: int) -> Subject:
    """A network with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if network == "mlp":
            widths = (VALUES * len(INPUTS), WIDTH, WIDTH, WIDTH, VALUES)
            layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())][:-1]
            module: nn.Module = nn.Sequential(*layers)
        elif network == "gru":
            module = Recurrent()
        else:
            module = CausalLM.from_config(_configuration(network)).eval()
    if seed % 2:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(SCALE if parameter.ndim > 1 else 1.0)
    if isinstance(module, nn.Sequential):
        return MLPSubject(module, encode=lambda rows: one_hot(rows).flatten(1))
    if network == "gru":
        cells = {f"h{t}": f"cell#{t}" for t in range(len(INPUTS))}
        return ModuleSubject(module, cells, ROWS[:1], encode=lambda rows: rows)
    return DecoderSubject(module, _asked, [[k] for k in range(VALUES)])


def _asked(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The digits and a last token that asks."""
    ids = torch.cat([rows, torch.full((len(rows), 1), VALUES)], dim=1)
    return ids, torch.ones_like(ids)


def _configuration(family: str) -> PretrainedConfig:
    if family == "gpt2":
        return GPT2Config(
            vocab_size=VALUES + 1, n_embd=STATE, n_layer=DEPTH, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0
        )
    usual = {
        "vocab_size": VALUES + 1,
        "hidden_size": STATE,
        "intermediate_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return LlamaConfig(**usual) if family == "llama" else Gemma2Config(**usual, head_dim=4, query_pre_attn_scalar=4)


def reinitialised(network: str, seed: int) -> Known:
    """A network that was never trained, judged on banks of the sums it does not compute."""
    splits = draw_splits(SUMS, ROWS, Known.size, seed)
    return Known(f"fresh {network}", seed, fresh(network, seed), SUMS, ROWS, _nothing(), splits=splits)


def shuffled(network: str, seed: int) -> Known:
    """The network's own answers, explained by values of p that were dealt to the inputs at random.

    p keeps how often each value occurs; q is what is left of the answer, so the hypothesis is right about every input
    and about nothing inside.
    """
    subject = fresh(network, seed)
    answers = subject.record(ROWS).outputs.argmax(dim=-1).cpu()
    dealt = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(seed))
    p = SUMS.run(ROWS)["p"][dealt]
    causal = shuffled_model(p, (answers - p) % VALUES)
    return Known(f"shuffled {network}", seed, subject, causal, ROWS, _nothing())


def shuffled_model(p: Tensor, q: Tensor) -> CausalModel:
    """p and q by a list over all inputs, in the order of `ROWS`."""
    places = VALUES ** torch.arange(len(INPUTS) - 1, -1, -1)

    def listed(values: Tensor) -> Mechanism:
        return Mechanism(tuple(INPUTS), lambda *digits: values[_number(digits, places)])

    return CausalModel(INPUTS, {"p": listed(p), "q": listed(q), "y": lambda p, q: (p + q) % VALUES}, "y")


def _number(digits: Sequence[Tensor], places: Tensor) -> Tensor:
    return (torch.stack(list(digits), dim=1).long() * places).sum(dim=1)


def _nothing() -> dict[str, Truth]:
    return {v: Truth(ABSENT) for v in "pq"}
