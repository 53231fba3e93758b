"""Attention heads as sites: a planted head is found among all heads by one coupling, and by a learned mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plot_ot.abstract.banks import draw_pairs
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import respond
from plot_ot.signatures import as_readout
from plot_ot.sites.attention_heads import heads
from plot_ot.stages.calibrate import Search, correct
from plot_ot.stages.choose import Calibrate
from plot_ot.stages.coupling import Localize
from plot_ot.stages.masks import MaskSpec, TrainMask
from plot_ot.stages.problem import Problem, State
from plot_ot.subjects import record
from plot_ot.transport import Transport
from refusals import assert_refused

decoders = pytest.importorskip("decoders")
from plot_ot.subjects import DecoderSubject  # noqa: E402

READOUT = as_readout("softmax")
TRUTH = {"p": (1, 2), "q": (2, 0)}


@torch.no_grad()
def planted_heads(seed: int) -> nn.Module:
    """y = 4 x0 + x1 by two heads: (1, 2) fetches x0 and (2, 0) x1 to the last token, where the answer is read off.

    All other heads fetch one of x0, x1, x2 to dimensions that nudge the answers a little. Channels: 0-3 the token's
    value, 4-7 its position, 8-11 what was fetched of x0, 12-15 of x1, 16-31 of the others.
    """
    import transformers

    generator = torch.Generator().manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=32,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=8,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    trunk = model.transformer
    for weight in (trunk.wte.weight, trunk.wpe.weight, model.lm_head.weight):
        weight.zero_()
    for v in range(4):
        trunk.wte.weight[4 + v, v] = 1
        trunk.wpe.weight[v, 4 + v] = 2
    for layer, block in enumerate(trunk.h):
        for part in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_proj):
            part.weight.zero_()
            part.bias.zero_()
        for head in range(4):
            at = int(torch.randint(3, (1,), generator=generator))
            slot = 16 + 4 * head
            for k, place in enumerate(TRUTH.values()):
                if (layer, head) == place:
                    at, slot = k, 8 + 4 * k
            q, k, v = (8 * head + 32 * part for part in range(3))
            block.attn.c_attn.bias[q] = 40  # every query asks for the same position
            block.attn.c_attn.weight[4 + at, k] = 1
            for c in range(4):
                block.attn.c_attn.weight[c, v + c] = 1
                block.attn.c_proj.weight[8 * head + c, slot + c] = 1
    for y in range(16):
        model.lm_head.weight[10 + y, 8 + y // 4] = model.lm_head.weight[10 + y, 12 + y % 4] = 12
        model.lm_head.weight[10 + y, 16:] = 0.1 * torch.randn(16, generator=generator)
    return model


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.cat([rows.long() + 4, torch.full((len(rows), 1), 3)], dim=1)
    return ids, torch.ones_like(ids)


def problem_of(seed: int):
    subject = DecoderSubject(planted_heads(seed), encode, [(10 + y,) for y in range(16)], kinds=("head_output",))
    causal = CausalModel(["x0", "x1", "x2"], {"p": lambda x0: x0, "q": lambda x1: x1, "y": lambda p, q: 4 * p + q}, "y")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.cartesian_prod(*[torch.arange(4)] * 3)
    pools = rows[torch.randperm(len(rows), generator=generator)].chunk(3)
    banks = [draw_pairs(causal, pool, "balanced", 60, generator) for pool in pools]
    fit, calibration, fresh = record(subject, *banks)
    assert (READOUT.decide(fit.base_outputs) == fit.bank.base_answer).all()
    return Problem(subject, fit, calibration, ("p", "q"), READOUT, seed), fresh


@pytest.mark.parametrize("seed", [1000, 1001, 1002])
def test_one_coupling_over_all_heads_finds_the_planted_ones(seed):
    problem, fresh = problem_of(seed)
    transport = Transport("uot-one-sided", (0.05,), (1.0,), scale="median")
    state = Localize((heads(),), transport)(problem, State.start(problem))
    assert len(state.candidates["p"][0].family) == 12
    state = Calibrate(Search((1, 2), (1.0, 2.0)))(problem, state)
    for v, (layer, head) in TRUTH.items():
        handle = state.handles[v]
        assert handle.chosen["sites"] == [f"head_output.{layer}.{head}"]
        assert correct(fresh, handle, READOUT).all()


def test_a_mask_over_all_heads_keeps_the_planted_one():
    problem, fresh = problem_of(1000)
    stage = TrainMask(heads(), spec=MaskSpec(batch=20, epochs=30), over="all")
    state = stage(problem, State.start(problem))
    for v, (layer, head) in TRUTH.items():
        assert state.handles[v].chosen["sites"] == [f"head_output.{layer}.{head}"]
        assert correct(fresh, state.handles[v], READOUT).all()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox", "phi"])
def test_heads_of_separate_and_fused_projections_have_names_and_can_be_swapped_together(family):
    """Two neighbouring heads as one site equal a plain forward in which both are hooked."""
    model = decoders.network(family)
    recording = decoders.recorded(model, kinds=("head_output", "block_output"))
    subject = recording.subject
    menu = heads((1, 3))(recording, subject.places)
    assert [s.name for s in menu.sites] == [f"head_output.{layer}.{h}" for layer in (1, 3) for h in range(4)]
    assert {s.place.width for s in menu.sites} == {decoders.head_width(model)}
    pairs = heads((1,), together=2)(recording, subject.places)
    assert [s.name for s in pairs.sites] == [
        "head_output.1.0+head_output.1.1",
        "head_output.1.2+head_output.1.3",
    ]
    found = respond(recording, pairs.edits(torch.tensor([[0.0, 1.0]])))[0]
    for t, row in enumerate(decoders.BASE):
        taken = {f"head_output.1.{h}": recording.source_at(subject.place(f"head_output.1.{h}"))[t] for h in (2, 3)}
        with torch.no_grad():
            expected = decoders.plain(model, row, {name: lambda _, s=s: s for name, s in taken.items()})
        assert decoders.relative(found[t], decoders.as_answers(expected)) < 1e-4


def test_what_has_no_such_heads_is_refused():
    recording = decoders.recorded(decoders.network("llama"), kinds=("head_output", "block_output"))
    places = recording.subject.places
    blocks = [p for p in places if p.name.startswith("block")]
    assert_refused(lambda: heads()(recording, blocks), ["no attention heads", "block_output.0", "kinds="])
    assert_refused(lambda: heads((1, 9))(recording, places), ["[0, 1, 2, 3]", "[1, 9]"])
    assert_refused(lambda: heads(together=3)(recording, places), ["4 open heads", "3s"])
    assert_refused(lambda: heads(together=0), ["At least one head"])
