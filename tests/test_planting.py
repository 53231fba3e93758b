"""Interchange-intervention training against hand-made swaps of hidden states, on several kinds of decoder."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plot_ot.models.planting import Plant, PlantBatch, planted_loss, planted_module, swapped_answers
from refusals import assert_refused

transformers = pytest.importorskip("transformers")

WIDTH, BLOCKS, WORDS, PAIRS, TOKENS = 16, 3, 40, 6, 7


def build(kind: str) -> nn.Module:
    torch.manual_seed(1000)
    shape = {"hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "vocab_size": WORDS, "intermediate_size": 24}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config: Any
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=WIDTH, n_layer=BLOCKS, n_head=2, vocab_size=WORDS, n_positions=32)
    elif kind == "gemma2":
        config = transformers.Gemma2Config(**shape, **heads, head_dim=8, attn_implementation="eager")
    else:
        config = transformers.LlamaConfig(**shape, **heads)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if kind == "peft":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return model


def draw_batch(padded: int = 2) -> PlantBatch:
    g = torch.Generator().manual_seed(1000)
    ids = torch.randint(5, WORDS, (2 * PAIRS, TOKENS), generator=g)
    mask = torch.ones_like(ids)
    mask[1::2, :padded] = 0
    answers = torch.randint(5, WORDS, (2 * PAIRS,), generator=g)
    labels = {v: torch.randint(5, WORDS, (PAIRS,), generator=g) for v in ("Z", "Y")}
    return PlantBatch(ids, mask, answers, labels)


def by_hand(model: nn.Module, batch: PlantBatch, layer: int, part: slice) -> Tensor:
    """Each pair alone and unpadded: the source's hidden state goes into what the next module reads."""
    base_model = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    blocks = base_model.transformer.h if hasattr(base_model, "transformer") else base_model.model.layers  # type: ignore
    rows = []
    for k in range(PAIRS):
        b, s = batch.ids[k][batch.mask[k] > 0][None], batch.ids[PAIRS + k][batch.mask[PAIRS + k] > 0][None]
        state = model(input_ids=s, output_hidden_states=True).hidden_states[layer + 1][0, -1]

        def into(_m: nn.Module, args: Any, state: Tensor = state) -> Any:
            hidden = args[0].clone()
            hidden[0, -1, part] = state[part]
            return (hidden, *args[1:])

        handle = blocks[layer + 1].register_forward_pre_hook(into)  # type: ignore[index]
        rows.append(model(input_ids=b).logits[0, -1])
        handle.remove()
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "peft"])
def test_losses_are_those_of_swaps_by_hand(kind: str) -> None:
    model, batch = build(kind), draw_batch()
    plants = [Plant("Z", (1,), coordinates=tuple(range(4))), Plant("Y", (0,))]
    found = planted_loss(model, batch, plants, torch.Generator(), weight=0.5)
    own = torch.stack(
        [model(input_ids=i[m > 0][None]).logits[0, -1] for i, m in zip(batch.ids, batch.mask, strict=True)]
    )
    first, second = by_hand(model, batch, 1, slice(0, 4))[0::2], by_hand(model, batch, 0, slice(None))[1::2]
    expected = (
        F.cross_entropy(own, batch.answers),
        *(F.cross_entropy(x, batch.labels[v][k::2]) for k, (v, x) in enumerate((("Z", first), ("Y", second)))),
    )
    torch.testing.assert_close((found.answer, *found.swaps), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.total, expected[0] + 0.5 * (expected[1] + expected[2]), rtol=1e-5, atol=1e-5)


def test_swapped_answers_at_the_last_block_are_the_sources() -> None:
    model, batch = build("llama"), draw_batch()
    plant = Plant("Z", (BLOCKS - 1,))
    own = model(input_ids=batch.ids[PAIRS:], attention_mask=batch.mask[PAIRS:]).logits[:, -1].argmax(dim=1)
    assert torch.equal(swapped_answers(model, batch, plant, BLOCKS - 1), own)


def test_a_frame_swaps_its_subspace_only() -> None:
    base, source = torch.randn(3, 5), torch.randn(3, 5)
    frame = torch.linalg.qr(torch.randn(5, 5))[0]
    swapped = Plant("Z", (0,), frame=frame[:, :2]).swap(base, source)
    torch.testing.assert_close(swapped @ frame[:, :2], source @ frame[:, :2])
    torch.testing.assert_close(swapped @ frame[:, 2:], base @ frame[:, 2:])
    axes = Plant("Z", (0,), coordinates=(1, 3)).swap(base, source)
    torch.testing.assert_close(axes, Plant("Z", (0,), frame=torch.eye(5)[:, [1, 3]]).swap(base, source))


def test_gradients_reach_both_runs() -> None:
    model = build("gpt2")
    batch = draw_batch(padded=0)
    batch.ids[:PAIRS][batch.ids[:PAIRS] == 7] = 8
    batch.ids[PAIRS:, 0] = 7  # a token that only sources have
    found = planted_loss(model, batch, [Plant("Z", (1,))], torch.Generator())
    (grad,) = torch.autograd.grad(found.swaps[0], [model.transformer.wte.weight])  # type: ignore[union-attr,list-item]
    used = set(batch.ids[:PAIRS].flatten().tolist())
    assert grad[7].norm() > 0
    assert min(float(grad[t].norm()) for t in used) > 0


def test_layers_are_drawn_and_pairs_are_dealt() -> None:
    model, batch = build("llama"), draw_batch()
    plant, g = Plant("Z", (0, 2)), torch.Generator().manual_seed(1000)

    def loss(plant: Plant) -> float:
        return round(float(planted_loss(model, batch, [plant], g).swaps[0].detach()), 6)

    seen = {loss(plant) for _ in range(12)}
    alone = {loss(Plant("Z", (k,))) for k in (0, 2)}
    assert seen == alone


def test_a_named_module_is_the_block_of_that_name() -> None:
    model, batch, g = build("llama"), draw_batch(), torch.Generator()
    a = planted_loss(model, batch, [Plant("Z", (1,))], g).swaps[0]
    b = planted_loss(model, batch, [Plant("Z", ("model.layers.1",))], g).swaps[0]
    torch.testing.assert_close(a, b)


def test_no_hook_stays_behind() -> None:
    model, batch = build("llama"), draw_batch()
    batch.ids[0, 0] = WORDS + 5
    with pytest.raises(IndexError):
        planted_loss(model, batch, [Plant("Z", (1,))], torch.Generator())
    assert not any(m._forward_hooks for m in model.modules())


def test_a_plant_takes_root() -> None:
    """The answer is the sum of two tokens; each is planted as its own variable in one half of the vector."""
    torch.manual_seed(1000)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=20, intermediate_size=64, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    g = torch.Generator().manual_seed(1000)
    plants = [
        Plant("first", (0,), coordinates=tuple(range(16))),
        Plant("second", (0,), coordinates=tuple(range(16, 32))),
    ]

    def draw(pairs: int) -> PlantBatch:
        x = torch.randint(4, (2 * pairs, 2), generator=g)
        ids = torch.cat([x[:, :1], x[:, 1:] + 4, torch.full((2 * pairs, 1), 19)], dim=1)
        base, source = x[:pairs], x[pairs:]
        labels = {"first": source[:, 0] + base[:, 1], "second": base[:, 0] + source[:, 1]}
        return PlantBatch(ids, torch.ones_like(ids), x.sum(dim=1) + 8, {v: y + 8 for v, y in labels.items()})

    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(120):
        optimiser.zero_grad()
        planted_loss(model, draw(32), plants, g).total.backward()
        optimiser.step()
    test = draw(100)
    for plant in plants:
        right = swapped_answers(model, test, plant, 0) == test.labels[plant.variable]
        assert right.double().mean() > 0.95


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: Plant("Z", ()), ["'Z'", "no layer"]),
        (lambda: Plant("Z", (1,), position=3), ["position 3", "from the end"]),
        (lambda: Plant("Z", (1,), coordinates=(1,), frame=torch.eye(2)), ["coordinates and a frame"]),
        (lambda: planted_module(build("llama"), 3), ["0..2", "found 3"]),
        (lambda: planted_module(build("llama"), "model.nothing"), ["model.nothing"]),
        (lambda: planted_module(nn.Linear(2, 2), 0), ["Linear", "Name the modules"]),
        (
            lambda: planted_loss(build("llama"), draw_batch(), [Plant("X", (1,))], torch.Generator()),
            ["'X'", "Choose from: Z, Y"],
        ),
    ],
)
def test_refusals(attempt: Any, words: list[str]) -> None:
    assert_refused(attempt, words)
