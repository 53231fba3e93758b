"""Work units in this process: the cut loses nothing, repeats nothing, and changes no choice."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from decoders import ANSWERS, network
from nets import mlp
from plot_ot import engine as engines
from plot_ot.abstract.banks import Bank, draw_pairs
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.engine import InProcess, Shard, SharedRecording, Unit, record_shared, run, shards
from plot_ot.engine.stores import Elsewhere, merged, narrowed, record_shard, without_caches
from plot_ot.engine.units import cut_into_shards, inputs_per_shard
from plot_ot.errors import PlotError
from plot_ot.signatures import as_readout
from plot_ot.stages import das
from plot_ot.stages.calibrate import pair_weights, scored
from plot_ot.stages.das import train_rotations
from plot_ot.stages.descent import DasSpec
from plot_ot.subjects import BankRecording, DecoderSubject, MLPSubject, Store, record
from plot_ot.subjects.decoder.recording import Recorder
from plot_ot.subjects.decoder.vectors import Joined, Spilled, on_disk
from plot_ot.subjects.protocol import Share
from small_studies import HEQ_METHODS, bits, choices, heq, run_all


def equality(size: int, seed: int) -> Bank:
    """Pairs over two variables, among few inputs: many are used several times."""
    causal = CausalModel(
        ["a", "b", "c"], {"x": lambda a, b: a == b, "y": lambda x, c: x == (c > 1)}, output="y", variables=["x"]
    )
    rows = torch.randint(4, (40, 3), generator=torch.Generator().manual_seed(seed)).unique(dim=0)
    return draw_pairs(causal, rows, "mixed", size, torch.Generator().manual_seed(seed), name=f"bank{seed}")


BANKS = [equality(50, 1000), equality(30, 1001)]


def small_mlp() -> MLPSubject:
    return MLPSubject(mlp(3, 8, 8, 2, seed=1000))


def small_decoder() -> DecoderSubject:
    """Prompts whose tokens are an input row's numbers: `encode` of the decoder tests reads positions of a list."""
    return DecoderSubject(network("gemma2"), _as_prompts, ANSWERS[:2])


def _as_prompts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.cat([torch.full((len(rows), 1), 11), 20 + rows, torch.full((len(rows), 1), 12)], dim=1)
    mask = torch.ones_like(tokens)
    mask[:, 0] = (rows[:, 0] > 1).long()  # some prompts are shorter
    return tokens, mask


SUBJECTS = {"mlp": small_mlp, "decoder": small_decoder}


# -- the plan -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_every_input_is_in_one_shard_and_every_base_can_be_resumed(size: int) -> None:
    parts, rows = cut_into_shards(BANKS, size)
    inputs = torch.cat([p.inputs for p in parts])
    asked = torch.cat([x for b in BANKS for x in (b.base, b.source)])
    assert torch.equal(inputs[rows], asked)
    assert len(inputs) == len(asked.unique(dim=0))
    assert max(len(p.inputs) for p in parts) <= size
    assert [sum(p.share[k] for p in parts) for k in (0, 1)] == pytest.approx([1, 1])
    assert all(bool(p.share.bases) == bool(len(p.bases)) for p in parts)
    kept = torch.cat([torch.isin(torch.arange(len(p.inputs)), p.bases) for p in parts])
    bases = torch.cat([b.base for b in BANKS]).unique(dim=0)
    assert torch.equal(inputs[kept].unique(dim=0), bases)  # nothing is kept of inputs that are sources only


def test_the_plan_does_not_depend_on_who_works() -> None:
    first, again = cut_into_shards(BANKS, 9), cut_into_shards(BANKS, 9)
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first[0], again[0], strict=True))
    assert torch.equal(first[1], again[1])


def test_large_networks_have_small_shards() -> None:
    assert inputs_per_shard(small_mlp()) > inputs_per_shard(MLPSubject(mlp(3, 2000, 2000, 2)))


def test_a_shard_without_inputs_is_refused() -> None:
    subject = small_mlp()
    with pytest.raises(PlotError, match="at least one input; found 0"):
        record_shared(InProcess().crew(subject), subject, BANKS, 0)


# -- recordings -----------------------------------------------------------------------------------------------


def shared(subject: object, size: int) -> list[SharedRecording]:
    return record_shared(InProcess().crew(subject), subject, BANKS, size)


@pytest.mark.parametrize("kind", SUBJECTS)
def test_a_sharded_recording_shows_what_a_whole_one_does(kind: str) -> None:
    subject = SUBJECTS[kind]()
    for whole, cut in zip(record(subject, *BANKS), shared(subject, 7), strict=True):
        assert len(shards(cut)) > 1
        together = torch.cat([p for p in shards(cut) if not isinstance(p, slice)])
        assert torch.equal(together.sort().values, torch.arange(len(cut)))  # every pair once
        torch.testing.assert_close(cut.base_outputs, whole.base_outputs)
        for place in subject.places:
            torch.testing.assert_close(cut.source_at(place), whole.source_at(place))
        last = subject.places[-1]
        edit = EditBatch(subject.places[0], Frame.identity(last.width), torch.ones(1, last.width))
        torch.testing.assert_close(respond(cut, [edit]), respond(whole, [edit]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", SUBJECTS)
def test_what_is_sent_gives_the_same_bits_as_what_is_here(kind: str) -> None:
    subject = SUBJECTS[kind]()
    recording = shared(subject, 7)[0]
    parts, _ = cut_into_shards(BANKS, 7, subject.encoded)
    place = subject.places[1]
    edit = EditBatch(place, Frame.identity(place.width), torch.eye(place.width))
    other = SUBJECTS[kind]()  # a replica that has recorded nothing
    for pairs in [*shards(recording), slice(None)]:
        unit = Unit(respond, pairs, (place,), ([edit],))
        sent = narrowed(recording, unit)
        assert list(sent.store.activations) == [place.name]
        assert len(sent.store.inputs) < len(recording.store.inputs)
        again = Elsewhere(len(parts), lambda k: record_shard(other, parts[k]))
        there = replace(sent, subject=other, store=sent.store.with_prefixes(again))
        assert torch.equal(respond(there, [edit]), next(run(recording, [unit])))


def vector_bytes(subject: DecoderSubject, rows: int) -> int:
    """Bytes of everything that is recorded of so many inputs but keys and values."""
    return 4 * rows * (sum(p.width for p in subject.places) + subject.decoder.width)


@pytest.mark.parametrize("more", [0, 8], ids=["too little", "enough"])
def test_bases_share_the_memory_that_all_inputs_vectors_leave(more: int) -> None:
    """Shards of sources only keep no keys and values: their part of the memory is the bases'."""
    parts, _ = cut_into_shards(BANKS, 7)
    assert any(not len(p.bases) for p in parts)
    subject = small_decoder()
    inputs, bases = sum(len(p.inputs) for p in parts), sum(len(p.bases) for p in parts)
    longest = 5
    needed = vector_bytes(subject, inputs) + subject.cache_bytes(bases, longest)
    subject.memory = -(-4 * needed // 3) + (more or -8)
    stores = [record_shard(subject, part) for part in parts]
    spilled = [store.caches[0].spilled for store, part in zip(stores, parts, strict=True) if len(part.bases)]
    assert all(spilled) != bool(more)
    assert any(spilled) != bool(more)
    assert all(isinstance(store.activations, dict) for store in stores)


def test_shards_of_sources_keep_their_vectors_in_memory() -> None:
    """They have no part in the memory for keys and values, but one in that for vectors."""
    subject = small_decoder()
    rows = BANKS[0].base[:4]
    for memory, inside in ((4 * 2 * vector_bytes(subject, 4), True), (4 * vector_bytes(subject, 4), False)):
        subject.memory = memory
        store = record_shard(subject, Shard(rows, torch.arange(0), Share(0.5, 0.0)))
        assert isinstance(store.activations, dict) == inside


@pytest.mark.parametrize("size", [7, 1000])
@pytest.mark.parametrize("known", [5, 40])
def test_what_was_remembered_is_not_run_again_by_any_shard(
    size: int, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard may find some of its inputs among remembered ones: its bases are then in several caches."""
    subject, rows_run, read = small_decoder(), [], Recorder._read
    plainly = record(small_decoder(), *BANKS)
    inputs = torch.cat([x for bank in BANKS for x in (bank.base, bank.source)]).unique(dim=0)
    monkeypatch.setattr(Recorder, "_read", lambda *given: rows_run.append(len(given[1])) or read(*given))
    subject.record(inputs[::2][:known], remember=True)
    subject.record(inputs[1::2][:known], remember=True)
    before = sum(rows_run)
    recordings = shared(subject, size)
    assert sum(rows_run) == before + max(0, len(inputs) - 2 * known)
    for cut, expected in zip(recordings, plainly, strict=True):
        for place in subject.places:
            edit = EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))
            torch.testing.assert_close(respond(cut, [edit]), respond(expected, [edit]), rtol=1e-4, atol=1e-5)
    subject.record(inputs)
    assert sum(rows_run) == before + max(0, len(inputs) - 2 * known) + len(inputs)  # forgotten once used


@pytest.mark.parametrize("kind", SUBJECTS)
def test_activations_beyond_what_memory_may_hold_are_merged_on_disk(kind: str) -> None:
    subject = SUBJECTS[kind]()
    parts, _ = cut_into_shards(BANKS, 7)
    stores = [without_caches(record_shard(subject, part)) for part in parts]
    expected = merged(stores)
    held = sum(t.nbytes for t in expected.activations.values())
    assert isinstance(merged(iter(stores), held).activations, dict)
    asked: list[int] = []

    def one_by_one() -> Iterator[Store]:
        for k, store in enumerate(stores):
            asked.append(k)
            yield store

    found = merged(one_by_one(), held // 2)
    assert asked == list(range(len(stores)))
    assert isinstance(found.activations, Joined)
    assert all(isinstance(part, Spilled) for part in found.activations.parts)
    for name, vectors in expected.activations.items():
        assert torch.equal(found.activations[name], vectors)
    assert torch.equal(found.outputs, expected.outputs)


def test_only_what_a_file_can_hold_goes_there() -> None:
    doubles = {"layer1": torch.rand(3, 2, dtype=torch.float64)}
    assert on_disk(doubles) is doubles


# -- units ----------------------------------------------------------------------------------------------------


def test_units_run_in_plan_order_one_at_a_time() -> None:
    subject, done = small_mlp(), []
    recording = shared(subject, 7)[0]

    def work(some: BankRecording, number: int) -> int:
        done.append(number)
        return len(some)

    units = [Unit(work, pairs, (), (n,)) for n, pairs in enumerate(shards(recording))]
    results = run(recording, units)
    assert done == []
    sizes = [next(results)]
    assert done == [0]
    sizes += results
    assert done == list(range(len(units)))
    assert sum(sizes) == len(recording)


@pytest.mark.parametrize("kind", SUBJECTS)
def test_scores_of_shards_add_up(kind: str) -> None:
    subject, readout = SUBJECTS[kind](), as_readout("softmax")
    [whole, _], [cut, _] = record(subject, *BANKS), shared(subject, 7)
    weights = pair_weights(whole, "x", "balanced")
    place = subject.places[0]
    edits = [EditBatch(place, Frame.identity(place.width), torch.eye(place.width))]
    found, expected = (scored(r, edits, "x", weights, readout) for r in (cut, whole))
    torch.testing.assert_close(found, expected)


def test_selected_pairs_keep_their_shards() -> None:
    recording = shared(small_mlp(), 7)[0]
    some = recording.select(recording.bank.changed["x"])
    assert isinstance(some, SharedRecording)
    assert 1 < len(shards(some)) <= len(shards(recording))


def test_rotations_do_not_depend_on_which_are_trained_together(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = shared(small_mlp(), 1000)[0]
    place, spec = recording.subject.places[0], DasSpec(most=4, batch=16, restarts=2)

    def train() -> list[das.Rotation]:
        return train_rotations(recording, place, ["x"], (1, 3, 8), as_readout("softmax"), spec, torch.Generator())

    together = train()
    monkeypatch.setattr(das, "jobs_at_once", lambda *_: 1)
    apart = train()
    assert [(r.dimension, r.restart) for r in apart] == [(r.dimension, r.restart) for r in together]
    for a, b in zip(apart, together, strict=True):
        if a.frame.read is not None:
            torch.testing.assert_close(a.frame.read, b.frame.read, rtol=1e-3, atol=1e-4)
            assert a.loss == pytest.approx(b.loss, rel=1e-4)


def test_a_study_chooses_the_same_whatever_the_shards() -> None:
    found = [run_all(heq(), HEQ_METHODS, shard=size) for size in (1000, 25)]
    assert choices(found[0]) == choices(found[1])
    assert bits(run_all(heq(), HEQ_METHODS, shard=25)) == bits(found[1])


def test_a_crew_of_ones_own_is_asked_for_everything() -> None:
    """What an engine must be: `record` and `map`."""
    asked: list[str] = []

    class Counting:
        def __init__(self, inner: engines.Crew) -> None:
            self.inner = inner

        def record(self, parts: Sequence[Shard]) -> Store:
            asked.append("record")
            return self.inner.record(parts)

        def map(self, recording: SharedRecording, units: Sequence[Unit]) -> Iterator[object]:
            asked.extend(u.work.__name__ for u in units)
            return self.inner.map(recording, units)

    subject = small_mlp()
    [recording, _] = record_shared(Counting(InProcess().crew(subject)), subject, BANKS, 7)
    place = subject.places[0]
    edit = [EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))]
    scored(recording, edit, "x", pair_weights(recording, "x", "paper"), as_readout("softmax"))
    assert asked == ["record", *["_scores"] * len(shards(recording))]
