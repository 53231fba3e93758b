"""Prompts that begin alike run as a trie: the same numbers as plain passes, for every family that can be resumed."""

import random

import pytest
import torch
from torch import Tensor, nn

from decoders import (
    ANSWERS,
    FAMILIES,
    NAMED,
    UNNAMED,
    VOCABULARY,
    as_answers,
    hooked,
    network,
    relative,
)
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.subjects import DecoderSubject, Recording, record_pairs
from plot_ot.subjects.decoder import recording, shared_pass, sizes
from plot_ot.subjects.decoder.pages import NodePages, Pages
from plot_ot.subjects.decoder.trie import KeptNodes, Trie

EARLY = 5
"""A token that most prompts share."""


def alike(seed: int = 1000, count: int = 24) -> list[list[int]]:
    """Prompts that branch off a stem at many depths, one that is the beginning of another, and one that comes twice."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()

    stems = [draw(9), draw(9)]
    made = [stems[k % 2][: 6 + k % 4] + draw(1 + k % 5) for k in range(count - 3)]
    return [*made, stems[0][:8], stems[0][:8], draw(4)]


PROMPTS = alike()
ROWS = torch.arange(len(PROMPTS)).unsqueeze(1)


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    chosen = [PROMPTS[int(r)] for r in rows[:, 0]]
    longest = max(map(len, chosen)) + 2
    ids = [[0] * (longest - len(p)) + p for p in chosen]
    return torch.tensor(ids), torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in chosen])


def position(rows: Tensor) -> Tensor:
    """The sixth token, or the last of shorter prompts."""
    return torch.tensor([min(EARLY - len(PROMPTS[int(r)]), -1) for r in rows])


def subject_of(model: nn.Module, **options: object) -> DecoderSubject:
    return DecoderSubject(model, encode, ANSWERS, **options)


def counted(subject: DecoderSubject) -> list[int]:
    """The tokens of every call of the first block from now on."""
    tokens: list[int] = []
    subject.decoder.blocks[0].register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append((args[0] if args else kwargs["hidden_states"]).shape[:2].numel()),
        with_kwargs=True,
    )
    return tokens


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plot_ot.subjects.decoder.trie.WORTH_IT", 0.0)


def oracle(model: nn.Module, row: int, edits: dict) -> Tensor:
    tokens = {"early": int(position(torch.tensor([[row]]))[0])}
    with torch.no_grad(), hooked(model, edits, tokens):
        return model(input_ids=torch.tensor([PROMPTS[row]])).logits[0, -1].float()


# -- the plan ------------------------------------------------------------------------------------------------------


def prefixes(prompts: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(p[:n]) for p in prompts for n in range(1, len(p) + 1)}


@pytest.mark.parametrize("seed", range(1000, 1005))
def test_a_trie_has_a_node_for_every_beginning(seed):
    prompts = alike(seed)
    longest = max(map(len, prompts)) + 1
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    real = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]).bool()
    trie = Trie(ids, real)
    twice = len(prompts) - len({tuple(p) for p in prompts})
    assert len(trie) == len(prefixes(prompts)) + twice  # a last token is never shared
    named: dict[int, tuple[int, ...]] = {}
    for prompt, path, inside in zip(prompts, trie.paths, trie.inside, strict=True):
        assert inside.sum() == len(prompt)
        for n, node in enumerate(path[inside].tolist(), start=1):
            assert named.setdefault(node, tuple(prompt[:n])) == tuple(prompt[:n])
            assert (trie.token[node], trie.depth[node]) == (prompt[n - 1], n - 1)
    for budget in (1, 7, 40, 10**6):
        cut = list(trie.batches(budget))
        assert torch.equal(torch.cat(cut), trie.order)
        own = [int((trie.lengths[c] - trie.shared[trie.rank[c]]).sum()) for c in cut]
        assert sum(own) == len(trie)
        assert all(n <= budget or len(c) == 1 for n, c in zip(own, cut, strict=True))


def test_nodes_that_bases_need_are_numbered_anew():
    trie = Trie(*(t.bool() if k else t for k, t in enumerate(encode(ROWS))))
    bases = torch.tensor([3, 0, 21])
    for last in (False, True):
        kept = KeptNodes(trie, bases, last)
        wanted = prefixes([PROMPTS[b][: len(PROMPTS[b]) if last else -1] for b in bases.tolist()])
        assert kept.count == len(wanted)
        numbers = [n for start in range(len(trie)) for n in _numbers(kept, start, start + 1)]
        assert numbers == list(range(kept.count))
        first, some = kept.among(0, len(trie))
        assert first == 0
        assert len(torch.arange(len(trie))[some]) == kept.count


def _numbers(kept: KeptNodes, start: int, end: int) -> list[int]:
    first, some = kept.among(start, end)
    return [first + k for k in range(len(torch.arange(end - start)[some]))]


# -- the numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, *NAMED, *UNNAMED])
def test_a_trie_records_and_resumes_as_plain_forwards_do(family, monkeypatch):
    small_passes(monkeypatch)  # many batches, each with something carried over
    model = network(family)
    subject = subject_of(model, positions={"early": position}, layers=[1, 3])
    base, source = ROWS[::2], ROWS[1::2]
    tokens = counted(subject)
    [made] = record_pairs(subject, (base, source))
    store, trie = made.store, Trie(*(t.bool() if k else t for k, t in enumerate(encode(ROWS))))
    looked = 2 * trie.paths.shape[1] + 1
    assert sum(tokens[:-1]) - looked == len(trie) < 0.6 * int(trie.lengths.sum())  # then one prompt is checked
    expected = torch.stack([oracle(model, int(r), {}) for r in store.inputs[:, 0]])
    assert relative(store.outputs, as_answers(expected)) < 1e-5
    assert torch.equal(store.top_token, expected.argmax(dim=1))
    never(monkeypatch)
    [plain] = record_pairs(subject_of(model, positions={"early": position}, layers=[1, 3]), (base, source))
    assert [type(p) for p in (_pages(made), _pages(plain))] == [NodePages, Pages]
    for place in subject.places:
        assert relative(store.activations[place.name], plain.store.activations[place.name]) < 1e-5
        edit = EditBatch(
            place, Frame.identity(place.width), torch.stack([torch.zeros(place.width), torch.ones(place.width)])
        )
        found = respond(made, [edit])
        whole = [
            oracle(model, int(b), {place.name: lambda _, a=a: a})
            for b, a in zip(base[:, 0], made.source_at(place), strict=True)
        ]
        assert relative(found[1], as_answers(torch.stack(whole))) < 2e-5


def _pages(made: Recording) -> NodePages | Pages:
    return made.store.prefixes[0]._pages[0]


# -- what else must hold -------------------------------------------------------------------------------------------


def small_passes(monkeypatch: pytest.MonkeyPatch, tokens: int = 30) -> None:
    monkeypatch.setitem(sizes.RECORDED_AT_ONCE, "cpu", tokens)
    monkeypatch.setattr(sizes, "LEAST_AT_ONCE", tokens)


def swapped(made: Recording) -> Tensor:
    place = made.subject.places[0]
    return respond(made, [EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))])


@pytest.mark.parametrize("bases", [[], [7], [0, 20], list(range(24))], ids=len)
@pytest.mark.parametrize("options", [{}, {"positions": {"early": position}}], ids=["last token", "an earlier one, too"])
def test_however_few_rows_of_a_batch_are_bases_each_resumes_as_a_plain_pass_does(bases, options, monkeypatch):
    """One base among several rows was once taken for all of them."""
    small_passes(monkeypatch, tokens=60)
    model, rows = network("qwen2"), torch.tensor(bases, dtype=torch.long)
    subject = subject_of(model, **options)
    store = subject.record(ROWS, rows)
    expected = torch.stack([oracle(model, int(r), {}) for r in ROWS[:, 0]])
    assert relative(store.outputs, as_answers(expected)) < 1e-5
    if not bases:
        return
    made, place = Recording(subject, store, rows, rows.flip(0)), subject.places[0]
    assert isinstance(_pages(made), NodePages)
    states = zip(bases, made.source_at(place), strict=True)
    whole = [oracle(model, b, {place.name: lambda _, a=a: a}) for b, a in states]
    assert relative(swapped(made)[0], as_answers(torch.stack(whole))) < 2e-5


def random_trie(seed: int) -> tuple[list[list[int]], list[int], int, dict[str, object]]:
    """Prompts that branch anywhere, some of them bases; the tokens of a pass; and options of a subject."""
    r = random.Random(seed)
    stems = [[r.randrange(3, VOCABULARY) for _ in range(r.randint(1, 10))] for _ in range(r.randint(1, 3))]
    prompts = []
    for _ in range(r.randint(2, 20)):
        stem = r.choice(stems)
        prompts.append(stem[: r.randint(1, len(stem))] + [r.randrange(3, VOCABULARY) for _ in range(r.randint(0, 5))])
    bases = sorted(r.sample(range(len(prompts)), r.randint(0, len(prompts))))
    options: dict[str, object] = {"memory": 1} if r.random() < 0.2 else {}
    if r.random() < 0.3:
        options["layers"] = [1, 3]
    if r.random() < 0.5:
        at = r.randint(0, 4)
        options["positions"] = {
            "early": lambda rows: torch.tensor([min(at, len(prompts[int(x)]) - 1) - len(prompts[int(x)]) for x in rows])
        }
    return prompts, bases, r.choice([8, 20, 40, 100, 1000]), options


@pytest.mark.parametrize(
    "seed", [*range(1000, 1016), *(pytest.param(s, marks=pytest.mark.long) for s in range(2000, 2300))]
)
def test_any_trie_records_and_resumes_as_plain_passes_do(seed, monkeypatch):
    prompts, bases, tokens, options = random_trie(seed)
    small_passes(monkeypatch, tokens)
    monkeypatch.setitem(globals(), "PROMPTS", prompts)
    model = network(("qwen2", "gemma2", "gpt2", "mistral")[seed % 4])
    rows, some = torch.arange(len(prompts)).unsqueeze(1), torch.tensor(bases, dtype=torch.long)
    found = []
    for worth in (100.0, 0.0):  # always as a trie, and never
        monkeypatch.setattr("plot_ot.subjects.decoder.trie.WORTH_IT", worth)
        subject = subject_of(model, **options)
        store = subject.record(rows, some)
        made = Recording(subject, store, some, some.flip(0))
        ends = subject.places[0], subject.places[-1]
        edits = [EditBatch(p, Frame.identity(p.width), torch.ones(1, p.width)) for p in ends if bases]
        seen = [store.activations[p.name] for p in subject.places]
        found.append([store.outputs, *seen, *(respond(made, [e]) for e in edits)])
    assert all(relative(shared, plain) < 3e-5 for shared, plain in zip(*found, strict=True))


def test_keys_and_values_by_node_go_to_a_file_and_come_back(monkeypatch):
    small_passes(monkeypatch)
    pairs = ROWS[::2], ROWS[1::2]
    model = network("qwen2")
    [inside] = record_pairs(subject_of(model, positions={"early": position}), pairs)
    [outside] = record_pairs(subject_of(model, positions={"early": position}, memory=1), pairs)
    assert [r.store.prefixes[0].spilled for r in (inside, outside)] == [False, True]
    assert isinstance(_pages(outside), NodePages)
    assert relative(swapped(outside), swapped(inside)) < 1e-5


def test_a_pass_that_memory_refuses_is_halved_and_carries_on(monkeypatch):
    model = network("llama")
    [expected] = record_pairs(subject_of(model), (ROWS[::2], ROWS[1::2]))
    plain = recording.shared_pass

    def refusing(decoder: object, batch: object, watched: object) -> Tensor:
        if batch.ids.shape[1] > 40:
            raise torch.OutOfMemoryError("out of memory")
        return plain(decoder, batch, watched)

    monkeypatch.setattr(recording, "shared_pass", refusing)
    subject = subject_of(model)
    [found] = record_pairs(subject, (ROWS[::2], ROWS[1::2]))
    assert subject.limits.halvings
    assert relative(found.store.outputs, expected.store.outputs) < 1e-5
    assert relative(swapped(found), swapped(expected)) < 1e-5


def test_a_model_that_a_trie_gets_wrong_is_recorded_plainly(monkeypatch):
    model = network("llama")
    subject = subject_of(model)
    monkeypatch.setattr(
        shared_pass,
        "seen_at_the_end",
        lambda table, lengths, queries, width: torch.ones(len(lengths), queries, width, dtype=torch.bool),
    )  # as if its tokens saw what its masks do not show
    [found] = record_pairs(subject, (ROWS[::2], ROWS[1::2]))
    assert isinstance(_pages(found), Pages)
    expected = torch.stack([oracle(model, int(r), {}) for r in found.store.inputs[:, 0]])
    assert relative(found.store.outputs, as_answers(expected)) < 1e-5


def test_prompts_that_share_nothing_run_as_before():
    subject = subject_of(network("llama"))
    tokens = counted(subject)
    subject.record(ROWS[-4:])
    assert sum(tokens[:1]) >= sum(len(p) for p in PROMPTS[-4:])  # one padded batch, and nothing looked at before


def test_a_filter_keeps_nothing_and_answers_the_same(monkeypatch):
    small_passes(monkeypatch)
    model = network("gemma2")
    store = subject_of(model).record(ROWS, torch.zeros(0, dtype=torch.long))
    assert store.cache_bytes == 0
    expected = torch.stack([oracle(model, int(r), {}) for r in ROWS[:, 0]])
    assert torch.equal(store.top_token, expected.argmax(dim=1))


def test_a_model_with_an_adapter_records_as_plain_forwards_do(monkeypatch):
    """LoRA layers in the place of linear ones, not merged."""
    peft = pytest.importorskip("peft")
    small_passes(monkeypatch)
    model = network("llama")
    before = torch.stack([oracle(model, int(r), {}) for r in ROWS[:, 0]])
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(1000)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = 0.3 * torch.randn(p.shape, generator=generator)
    subject = subject_of(model, positions={"early": position})
    [made] = record_pairs(subject, (ROWS[::2], ROWS[1::2]))
    assert isinstance(_pages(made), NodePages)
    expected = torch.stack([oracle(model, int(r), {}) for r in made.store.inputs[:, 0]])
    assert relative(made.store.outputs, as_answers(expected)) < 1e-5
    assert relative(expected, before[made.store.inputs[:, 0]]) > 1e-2  # the adapter does something
    place = subject.place("block_output.1@early")
    edit = EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))
    whole = [
        oracle(model, int(b), {place.name: lambda _, a=a: a})
        for b, a in zip(ROWS[::2, 0], made.source_at(place), strict=True)
    ]
    assert relative(respond(made, [edit])[0], as_answers(torch.stack(whole))) < 2e-5
