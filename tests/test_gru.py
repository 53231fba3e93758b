"""The recurrent subject: resumed timesteps against plain hooked forwards, gradients, the live network, refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

import plot_ot.subjects.gru as gru
from nets import orthonormal, rand
from plot_ot.abstract.banks import row_codes
from plot_ot.edits import Distinct, EditBatch, Frame, respond, resume_edited
from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle
from plot_ot.subjects import Place, Recording, record_pairs
from plot_ot.subjects.gru import GRUNet, GRUSubject

VARIANTS, PAIRS, STEPS, WIDTH, FEATURES = 4, 9, 5, 6, 2


def network(width: int = WIDTH, dtype: torch.dtype = torch.float32) -> GRUNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = GRUNet(FEATURES, width)
        for p in net.parameters():
            nn.init.normal_(p, std=0.7)  # larger than the default: states move, edits matter
    return net.to(dtype)


def bits(seed: int, rows: int, steps: int = STEPS) -> Tensor:
    """Rows of all timesteps of the first feature, then all of the second."""
    return torch.randint(0, 2, (rows, FEATURES * steps), generator=torch.Generator().manual_seed(seed))


def sequence(rows: Tensor, steps: int = STEPS) -> Tensor:
    return torch.stack([rows[:, :steps], rows[:, steps:]], dim=2).float()


def record_random(net: GRUNet, steps: int = STEPS, pairs: int = PAIRS) -> tuple[Recording, Tensor, Tensor]:
    base, source = bits(1, pairs, steps), bits(2, pairs, steps)
    return record_pairs(GRUSubject(net, steps), (base, source))[0], base, source


# -- the oracle -----------------------------------------------------------------------------------------------

PlainEdit = tuple[Tensor, Tensor, Tensor]
"""(R [d, r], W [d, r], gains [r])"""


def counted(net: GRUNet, x: Tensor, rewrite) -> Tensor:
    """A full forward; `rewrite(t, h)` replaces the cell's output at its t-th call."""
    calls = iter(range(x.shape[1]))
    hook = net.cell.register_forward_hook(lambda _, __, h: rewrite(next(calls), h))
    try:
        return net(x)
    finally:
        hook.remove()


def hooked_forward(net: GRUNet, edits: Mapping[int, PlainEdit], base: Tensor, source: Tensor) -> Tensor:
    """One variant by definition: a clean source run, then a base run that is edited at some of its timesteps."""
    clean: dict[int, Tensor] = {}
    counted(net, source, lambda t, h: clean.setdefault(t, h))

    def edit(t: int, h: Tensor) -> Tensor:
        if t not in edits:
            return h
        read, write, gains = edits[t]
        return h + (gains * (clean[t] @ read - h @ read)) @ write.T

    return counted(net, base, edit)


FRAMES = {
    "identity": lambda d: Frame.identity(d),
    "orthonormal": lambda d: Frame.orthonormal(orthonormal(3, d, 2)),
    "oblique": lambda d: Frame.oblique(rand(4, d, 3) / 2, rand(5, d, 3) / 2),
    "oblique per variant": lambda d: Frame.oblique(rand(6, VARIANTS, d, 2) / 2, rand(7, VARIANTS, d, 2) / 2),
}


def make_edits(places: Sequence[Place], kinds: Sequence[str]) -> list[EditBatch]:
    """Random gains, last place first; variant 0 edits nothing, variant 1 not the first place."""
    edits = []
    for k, (place, kind) in enumerate(zip(places, kinds, strict=True)):
        frame = FRAMES[kind](place.width)
        gains = rand(10 + k, VARIANTS, frame.rank)
        gains[: 2 if k == 0 and len(places) > 1 else 1] = 0
        edits.append(EditBatch(place, frame, gains))
    return edits[::-1]


def plain(edits: Sequence[EditBatch], variant: int) -> dict[int, PlainEdit]:
    dense = {}
    for e in edits:
        read = torch.eye(e.frame.width) if e.frame.read is None else e.frame.read
        write = read if e.frame.write is None else e.frame.write
        read, write = (m[variant] if m.ndim == 3 else m for m in (read, write))
        dense[e.place.position] = read, write, e.gains[variant]
    return dense


# -- resuming -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("t", range(STEPS))
def test_a_response_at_any_timestep_is_the_hooked_full_forward(kind, t):
    net = network()
    recording, base, source = record_random(net)
    edits = make_edits([recording.subject.places[t]], [kind])
    with torch.no_grad():
        expected = [hooked_forward(net, plain(edits, v), sequence(base), sequence(source)) for v in range(VARIANTS)]
    torch.testing.assert_close(respond(recording, edits), torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("at", [(0, 1), (0, 4), (1, 2, 3), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("kinds", [("oblique", "identity"), ("oblique per variant", "orthonormal")], ids=" + ".join)
def test_later_states_are_rewritten_as_they_are_reached(at, kinds):
    net = network()
    recording, base, source = record_random(net)
    edits = make_edits([recording.subject.places[t] for t in at], [kinds[k % 2] for k in range(len(at))])
    with torch.no_grad():
        expected = [hooked_forward(net, plain(edits, v), sequence(base), sequence(source)) for v in range(VARIANTS)]
    torch.testing.assert_close(respond(recording, edits), torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_any_number_of_timesteps_can_be_resumed(steps):
    net = network(width=3)
    recording, base, source = record_random(net, steps)
    place = recording.subject.places[steps // 2]
    edits = make_edits([place], ["oblique per variant"])
    with torch.no_grad():
        x = sequence(base, steps), sequence(source, steps)
        expected = torch.stack([hooked_forward(net, plain(edits, v), *x) for v in range(VARIANTS)])
    torch.testing.assert_close(respond(recording, edits), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("t", range(STEPS))
def test_only_later_timesteps_run_and_earlier_outputs_are_the_recorded_ones(t, monkeypatch):
    net = network()
    recording, _, _ = record_random(net)
    net.cell.forward = net.forward = None  # calling them now fails
    ran, step = [], gru._step
    monkeypatch.setattr(gru, "_step", lambda *args: ran.append(1) or step(*args))
    patch = EditBatch(recording.subject.places[t], Frame.identity(WIDTH), torch.ones(2, WIDTH))
    outputs = resume_edited(recording, [patch])
    assert len(ran) == STEPS - 1 - t
    assert outputs.shape == (2, PAIRS, STEPS + 1)
    earlier = slice(STEPS - t + 1, None)  # y = [last, step 4, ..., step 0]
    assert torch.equal(outputs[0, :, earlier], recording.base_outputs[:, earlier])
    own = recording.source_outputs[:, STEPS - t]
    torch.testing.assert_close(outputs[1, :, STEPS - t], own, rtol=1e-5, atol=1e-6)


def test_responses_do_not_depend_on_the_batch_size(monkeypatch):
    recording, _, _ = record_random(network())
    edits = make_edits(recording.subject.places[1:4:2], ["oblique per variant", "identity"])
    expected = respond(recording, edits)
    for size in (1, 5, 10**6):
        monkeypatch.setattr(GRUSubject, "responses_per_batch", size)
        torch.testing.assert_close(respond(recording, edits), expected, rtol=1e-5, atol=1e-6)


def test_gradients_reach_frames_and_gains_but_never_the_weights():
    net = network(dtype=torch.float64)
    recording, base, source = record_random(net)
    read, write = (rand(k, WIDTH, 2, dtype=torch.float64).requires_grad_() for k in (1, 2))
    gains = rand(3, 1, 2, dtype=torch.float64).requires_grad_()
    weigh = rand(4, PAIRS, STEPS + 1, dtype=torch.float64)
    leaves = [read, write, gains]
    frame = Frame.oblique(read, write)
    edits = [EditBatch(recording.subject.places[t], frame, gains) for t in (1, 3)]
    found = torch.autograd.grad((resume_edited(recording, edits)[0] * weigh).sum(), leaves)
    x = sequence(base).double(), sequence(source).double()
    outputs = hooked_forward(net, dict.fromkeys((1, 3), (read, write, gains[0])), *x)
    for ours, theirs in zip(found, torch.autograd.grad((outputs * weigh).sum(), leaves), strict=True):
        torch.testing.assert_close(ours, theirs)
    resume_edited(recording, edits).sum().backward()
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


def test_a_batch_keeps_to_the_memory_there_is():
    subject = GRUSubject(network(), STEPS)
    assert subject.responses_per_batch == (1 << 17) // WIDTH  # a core's cache is less than the memory
    subject.memory = 10 * subject.response_bytes + 1
    assert subject.responses_per_batch == 10
    subject.memory = 1
    assert subject.responses_per_batch == 1


@pytest.mark.parametrize("start", [0, STEPS - 2])
def test_a_response_takes_no_more_than_it_is_said_to(start):
    """Bytes that PyTorch's own profiler sees in use while a batch is resumed."""
    net = GRUNet(2, 64)
    subject, rows, variants = GRUSubject(net, STEPS), 64, 32
    [recording] = record_pairs(subject, (bits(1, rows), bits(2, rows)))
    place = subject.places[start]
    edited = rand(3, variants, rows, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        subject.resume(recording.store, recording.base_rows, place, edited, {})
    held = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert 0.6 < (peak + edited.nbytes) / (variants * rows * subject.response_bytes) <= 1


# -- recording ------------------------------------------------------------------------------------------------


def test_every_distinct_input_runs_once_and_leaves_all_its_states(monkeypatch):
    net, seen = network(), []
    monkeypatch.setattr(GRUSubject, "responses_per_batch", 4)
    net.register_forward_pre_hook(lambda _, args: seen.extend(args[0].flatten(1).tolist()))
    base, source = bits(1, PAIRS), bits(2, PAIRS)
    base[0] = source[1]  # an input may be a base in one pair and a source in another
    [recording] = record_pairs(GRUSubject(net, STEPS), (base, source))
    distinct = torch.unique(torch.cat([base, source]), dim=0)
    assert sorted(seen) == sorted(sequence(distinct).flatten(1).tolist())
    h = torch.zeros(PAIRS, WIDTH)
    for place, x in zip(recording.subject.places, sequence(source).unbind(dim=1), strict=True):
        h = net.cell(x, h).detach()
        torch.testing.assert_close(recording.source_at(place), h)
    torch.testing.assert_close(recording.source_outputs, net(sequence(source)).detach())


def test_places_are_the_states_in_order_of_time():
    subject = GRUSubject(network(), 3)
    assert subject.places == (Place("h0", WIDTH, 1, 0), Place("h1", WIDTH, 2, 1), Place("h2", WIDTH, 3, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_networks_of_any_precision_are_recorded_and_resumed_in_it(dtype):
    recording, _, _ = record_random(network(dtype=dtype))
    place = recording.subject.places[1]
    outputs = respond(recording, [EditBatch(place, Frame.identity(WIDTH), torch.ones(1, WIDTH))])
    assert recording.base_at(place).dtype == recording.base_outputs.dtype == outputs.dtype == dtype


def test_an_encoding_of_ones_own_replaces_the_default():
    net = network()
    by_step = GRUSubject(net, STEPS, encode=lambda rows: rows.float())
    rows = bits(1, PAIRS)
    expected = GRUSubject(net, STEPS).record(rows).outputs
    assert torch.equal(by_step.record(sequence(rows).long()).outputs, expected)


# -- the live network -----------------------------------------------------------------------------------------


def test_a_handle_on_the_live_network_gives_what_it_gives_when_applied():
    net = network()
    subject = GRUSubject(net, STEPS)
    edits = [Edit(subject.places[t], FRAMES["oblique"](WIDTH), rand(t, 3)) for t in (1, 3)]
    handle = Handle("Z", tuple(edits), subject.identity())
    base, source = bits(1, PAIRS), bits(2, PAIRS)
    clean, applied = net(sequence(base)).detach(), handle.apply(subject, base, source)
    with torch.no_grad(), handle.on(subject, source):
        for _ in range(2):  # the count of timesteps starts anew with every forward pass
            live = net(sequence(base))
            torch.testing.assert_close(live, applied, rtol=1e-5, atol=1e-6)
    assert (live - clean).abs().max() > 1e-2
    assert torch.equal(net(sequence(base)).detach(), clean)


def test_an_error_in_a_forward_pass_leaves_no_hook_and_no_count_behind():
    net = network()
    subject = GRUSubject(net, STEPS)
    x = sequence(bits(1, PAIRS))
    fails = True

    def rewrite(h: Tensor) -> Tensor:
        return h / 0 if not fails else 1 / 0

    with subject.intervene({"h2": rewrite}):
        with pytest.raises(ZeroDivisionError):
            net(x)
        fails = False
        y = net(x)
    assert torch.isfinite(y[:, STEPS - 1 :]).all()
    assert not torch.isfinite(y[:, : STEPS - 1]).any()
    assert not net._forward_pre_hooks
    assert not net.cell._forward_hooks


def test_identity_tells_weights_apart():
    net = network()
    before = GRUSubject(net, STEPS).identity()
    assert before == GRUSubject(network(), STEPS).identity()
    with torch.no_grad():
        net.last_head.bias += 1
    assert GRUSubject(net, STEPS).identity() != before


# -- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: GRUSubject(nn.GRU(2, 3), 4), "needs a GRUNet; found GRU. Use ModuleSubject"),
        (lambda: GRUSubject(network(), 0), "at least one timestep; found 0"),
        (lambda: GRUSubject(network(), 4).record(bits(0, 3)), r"\[rows, 8\] \(2 features of 4 .*found \(3, 10\)"),
        (
            lambda: GRUSubject(network(), 4, encode=sequence).record(bits(0, 3)),
            r"encode to .* \(3, 4, 2\); found \(3, 5, 2\)",
        ),
        (lambda: GRUSubject(network(), 4).place("h4"), "Unknown place 'h4'.*Choose from: h0, h1, h2, h3"),
        (lambda: GRUSubject(network(), 4).intervene({"h9": lambda h: h}).__enter__(), "Unknown place 'h9'"),
    ],
)
def test_what_is_not_a_sequence_of_states_is_refused(act, message):
    with pytest.raises(PlotError, match=message):
        act()


# -- what is identical runs once ------------------------------------------------------------------------------


def all_pairs(steps: int) -> tuple[Tensor, Tensor]:
    """Every ordered pair of inputs of `steps` timesteps."""
    count = 1 << FEATURES * steps
    rows = torch.tensor([[k >> b & 1 for b in range(FEATURES * steps)] for k in range(count)])
    return rows.repeat_interleave(count, dim=0), rows.repeat(count, 1)


@pytest.mark.parametrize("t", range(3))
def test_sources_with_one_prefix_are_one_class(t):
    """After t + 1 timesteps of two bits a source can be in 4^(t+1) states, however it goes on."""
    base, source = all_pairs(3)
    recording = record_pairs(GRUSubject(network(), 3), (base, source))[0]
    distinct = Distinct.of(recording, [recording.subject.places[t]])
    assert len(distinct.once) == 64 * 4 ** (t + 1)
    assert distinct.of_pair is None or int(distinct.of_pair.max()) + 1 == len(distinct.once)
    assert len(Distinct.of(recording, recording.subject.places[: t + 1]).once) == len(distinct.once)


@pytest.mark.parametrize("at", [(0,), (1,), (0, 2)])
def test_running_classes_once_changes_no_answer(at):
    base, source = all_pairs(3)
    shuffled = torch.randperm(len(base), generator=torch.Generator().manual_seed(3))[:500]
    recording = record_pairs(GRUSubject(network(), 3), (base[shuffled], source[shuffled]))[0]
    edits = [
        EditBatch(p, Frame.orthonormal(orthonormal(7, p.width, 3)), rand(8, VARIANTS, 3))
        for p in recording.subject.places
    ]
    edits = [edits[k] for k in at]
    assert Distinct.of(recording, [e.place for e in edits]).of_pair is not None or len(at) > 1
    found = respond(recording, edits)
    torch.testing.assert_close(found, resume_edited(recording, edits), rtol=1e-5, atol=1e-6)


def test_batches_of_classes_cover_every_pair_once_in_any_order():
    base, source = all_pairs(2)
    recording = record_pairs(GRUSubject(network(), 2), (base, source))[0]
    distinct = Distinct.of(recording, [recording.subject.places[0]])
    assert distinct.of_pair is not None
    order = torch.randperm(len(distinct.once))
    seen = []
    for classes, pairs, expand in distinct.batches(7, order):
        assert torch.equal(expand(classes[None]).squeeze(0), distinct.of_pair[pairs])
        seen += pairs.tolist()
    assert sorted(seen) == list(range(len(recording)))
    assert all(int(distinct.of_pair[distinct.first_pair(c)]) == c for c in range(len(distinct.once)))


def test_a_hash_that_collides_is_noticed(monkeypatch):
    rows = rand(0, 20, 4)
    rows = torch.cat([rows, rows.flip(1), rows])
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.zeros(4, dtype=torch.long))  # a row and its reverse
    found = row_codes(rows)
    assert len(found.unique()) == 40
    assert torch.equal(found[:20], found[40:])
