"""Answers of several tokens: exact log-probabilities under edits, against plain forward passes."""

from __future__ import annotations

import pytest
import torch

import plot_ot
from decoders import VOCABULARY, WIDTH, configuration, transformers
from plot_ot import CausalModel, Edit, Frame, Handle, PlotError, SequenceSubject, Splits, draw_pairs
from plot_ot.edits import EditBatch, respond
from plot_ot.engine import InProcess, record_shared
from plot_ot.planner import Scene
from plot_ot.subjects import record

ANSWERS = [(5, 6, 7), (5, 6, 8), (9,), (5, 10)]
LENGTHS = (9, 12, 7, 12, 4, 10)


def prompts(rows):
    """Prompts of mixed length, padded on the left; the row is the seed."""
    longest = max(LENGTHS)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for k, row in enumerate(rows[:, 0].tolist()):
        n = LENGTHS[row % len(LENGTHS)]
        ids[k, -n:] = torch.randint(11, VOCABULARY, (n,), generator=torch.Generator().manual_seed(row))
        mask[k, -n:] = 1
    return ids, mask


def make(family):
    torch.manual_seed(1000)
    return transformers.AutoModelForCausalLM.from_config(configuration(family)).eval()


def by_hand(model, row, rewrite=None, layer=None, at=-1):
    """Log-probabilities of all answers of one prompt by whole forward passes, one hook at the prompt's token."""
    ids, mask = prompts(row)
    prompt, found = ids[:, mask[0].bool()], []
    trunk = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for answer in ANSWERS:
        tokens = torch.cat([prompt, torch.tensor([answer])], dim=1)

        def hook(_, __, output, where=prompt.shape[1] + at):
            h = (output[0] if isinstance(output, tuple) else output).clone()
            h[:, where] = rewrite(h[:, where])
            return (h, *output[1:]) if isinstance(output, tuple) else h

        handle = trunk[layer].register_forward_hook(hook) if rewrite else None
        with torch.no_grad():
            logs = model(input_ids=tokens).logits.log_softmax(dim=-1)[0]
        if handle:
            handle.remove()
        n = prompt.shape[1]
        found.append(sum(logs[n - 1 + k, t] for k, t in enumerate(answer)))
    return torch.stack(found)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_log_probabilities_of_whole_answers_are_exact_with_and_without_edits(family):
    model, rows = make(family), torch.arange(6)[:, None]
    subject = SequenceSubject(model, prompts, ANSWERS, positions={"third": lambda rows: -3})
    recorded = subject.record(rows)
    assert torch.allclose(recorded.outputs, torch.stack([by_hand(model, r[None]) for r in rows]), atol=1e-4)
    base, source = rows[:4], rows[2:]
    for name, layer, at in (("block_output.1", 1, -1), ("block_output.0@third", 0, -3)):
        place = subject.place(name)
        frame = Frame.orthonormal(torch.linalg.qr(torch.randn(WIDTH, 5))[0])
        handle = Handle("z", (Edit(place, frame, torch.rand(5) + 0.5),), subject.identity())
        outputs = handle.apply(subject, base, source)
        states = subject.record(source).activations[name]
        for k, row in enumerate(base):
            swap = handle.edits[0].swapping(states[k : k + 1])
            assert torch.allclose(outputs[k], by_hand(model, row[None], swap, layer, at), atol=2e-4), name


def test_later_places_shards_and_gradients():
    model, rows = make("llama"), torch.arange(12)[:, None]
    subject = SequenceSubject(model, prompts, ANSWERS)
    causal = CausalModel(["a"], {"p": lambda a: a % 2, "y": lambda p: p}, "y")
    bank = plot_ot.Bank.from_pairs(causal, rows, rows.flip(0))
    [whole] = plot_ot.record(subject, bank)
    [cut] = record_shared(InProcess().crew(subject), subject, [bank], 5)
    assert len(cut.store.bundles) > 1
    frame, gains = Frame.identity(WIDTH), torch.rand(2, WIDTH, generator=torch.Generator().manual_seed(0))
    edits = [plot_ot.EditBatch(subject.place(f"block_output.{k}"), frame, gains) for k in (0, 2)]
    expected = plot_ot.respond(whole, edits)
    assert torch.allclose(plot_ot.respond(cut, edits), expected, atol=1e-4)
    for k, (base, source) in enumerate(zip(bank.base, bank.source, strict=True)):
        if k not in (0, 5):
            continue
        edit = plot_ot.EditBatch(edits[0].place, frame, gains[:1])
        alone = plot_ot.respond(whole, [edit])[0, k]
        state = subject.record(source[None]).activations["block_output.0"]
        swap = Edit(edits[0].place, frame, gains[0]).swapping(state)
        assert torch.allclose(alone, by_hand(model, base[None], swap, 0), atol=2e-4)
    state = whole.base_at(subject.place("block_output.2"))[None].clone().requires_grad_()
    out = subject.resume(whole.store, whole.base_rows, subject.place("block_output.2"), state, {})
    [slope] = torch.autograd.grad(out[0, 0, 0], state)
    step = 1e-2 * torch.nn.functional.normalize(slope, dim=-1)
    ahead, behind = (
        subject.resume(whole.store, whole.base_rows, subject.place("block_output.2"), (state + s).detach(), {})
        for s in (step, -step)
    )
    assert float(ahead[0, 0, 0] - behind[0, 0, 0]) == pytest.approx(0.02 * float(slope[0, 0].norm()), rel=0.05)


def test_one_token_answers_are_those_of_the_plain_subject():
    model, rows = make("llama"), torch.arange(6)[:, None]
    outputs = SequenceSubject(model, prompts, [[5], [7], [9]]).record(rows).outputs
    plain = plot_ot.DecoderSubject(model, prompts, [[5], [7], [9]]).record(rows).outputs
    assert torch.allclose(outputs.log_softmax(dim=1), plain.log_softmax(dim=1), atol=1e-4)


@pytest.mark.parametrize(
    ("answers", "said"),
    [([[5]], "at least two"), ([[5], []], "at least one token"), ([[5], [5, 6]], "beginning of"), ([[5], [5]], "beg")],
)
def test_refused(answers, said):
    with pytest.raises(PlotError, match=said):
        SequenceSubject(make("llama"), prompts, answers)


def test_a_hypothesis_spells_its_answers():
    class Letters:
        unk_token_id = 0

        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return [0 if c == "?" else ord(c) for c in text]

    h = plot_ot.Hypothesis(template="{a}", answers=["1", "12"])
    h.variable(name="v", parents=["a"])(lambda a: a)
    h.output(name="out", parents=["v"])(lambda v: v)
    assert h.answer_sequences(Letters()) == [[32, 49], [32, 49, 50]]
    assert h.answer_sequences(Letters(), after="", end=".") == [[49, 46], [49, 50, 46]]
    with pytest.raises(PlotError, match="cannot spell the answers 1, 12"):
        h.answer_sequences(Letters(), end="?")


def test_plans_count_every_beginning_of_an_answer():
    """Recorded and resumed passes against the tokens that go through the blocks."""
    subject = SequenceSubject(make("llama"), prompts, ANSWERS, positions={"third": lambda rows: -3})
    causal = CausalModel(["row"], {"half": lambda row: row % 2, "said": lambda half: half}, "said")
    rows = torch.arange(6)[:, None]
    bank = draw_pairs(causal, rows, "mixed", 8, torch.Generator().manual_seed(0), variable="half", variables=["half"])
    scene, seen = Scene.of_subject(subject, Splits(bank, bank, {}), len(ANSWERS)), []
    record(subject, bank)  # a first recording also tries whether the model can be resumed

    def count(_, __, output):
        h = output[0] if isinstance(output, tuple) else output
        seen.append(h.shape[0] * h.shape[1])

    hooks = [block.register_forward_hook(count) for block in subject.prompt.decoder.blocks]
    [recording] = record(subject, bank)
    recorded = sum(seen)
    for place in subject.places:
        seen.clear()
        respond(recording, [EditBatch(place, Frame.identity(WIDTH), torch.ones(1, WIDTH))])
        assert sum(seen) == scene.classes(recording, [place]) * scene.through(place), place.name
    for hook in hooks:
        hook.remove()
    assert subject.beginnings == (0, 1, 2)
    padded = len(subject.beginnings) * scene.shape.blocks * len(recording.store.inputs)  # batches of mixed lengths
    assert 0 <= recorded - scene.shape.blocks * scene.inputs.running <= padded * (max(LENGTHS) - min(LENGTHS))


def test_a_store_of_another_subject_is_refused():
    subject = SequenceSubject(make("llama"), prompts, ANSWERS)
    store, place = subject.prompt.record(torch.arange(2)[:, None]), subject.places[0]
    with pytest.raises(PlotError, match="another kind"):
        subject.resume(store, torch.arange(2), place, torch.zeros(1, 2, WIDTH), {})
