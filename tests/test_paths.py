"""Paths as places: the effect of a place through others only, or around them, against plain hooked passes."""

import contextlib
import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from plot_ot import (
    CausalModel,
    EditBatch,
    Frame,
    Handle,
    Method,
    MLPSubject,
    ModuleSubject,
    along,
    draw_pairs,
    handle_from_edits,
    record,
    record_pairs,
    respond,
    whole_places,
)
from plot_ot.engine.stores import merged, narrowed, to_device
from plot_ot.engine.units import Unit
from plot_ot.errors import PlotError
from plot_ot.exchange import to_causalab, to_mib, to_pyvene
from plot_ot.planner import Scene, count
from plot_ot.report.words import place_words
from plot_ot.signatures import as_readout
from plot_ot.signatures.jacobian import jacobians
from plot_ot.sites.attention_heads import heads
from plot_ot.stages import Calibrate, Localize, Problem, Search, State
from plot_ot.stages.calibrate import correct
from plot_ot.subjects import GRUNet, GRUSubject, Path, PathSubject, Place, SequenceSubject, Subject
from plot_ot.transport import Transport

decoders = pytest.importorskip("decoders")
from plot_ot.subjects import DecoderSubject  # noqa: E402
from truth.routers import WHERE, causal, routed  # noqa: E402


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(PlotError) as error:
        yield
    assert all(w in str(error.value) for w in words), str(error.value)


READOUT = as_readout("softmax")

# -- a network with parallel branches, and paths in it by plain arithmetic ------------------------------------------


class Branches(nn.Module):
    """x -> (a, b) -> c reads both -> d reads a, b and c; every branch also speaks to the output itself."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(4, width), nn.Tanh()), nn.Sequential(nn.Linear(4, width), nn.Tanh())
        self.c, self.d = (nn.Sequential(nn.Linear(n * width, width), nn.Tanh()) for n in (2, 3))
        self.out = nn.Linear(4 * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        c = self.c(torch.cat([a, b], dim=1))
        d = self.d(torch.cat([a, b, c], dim=1))
        return self.out(torch.cat([a, b, c, d], dim=1))

    def with_states(self, x: Tensor, **given: Tensor) -> dict[str, Tensor]:
        """Every state, where some are given."""
        s = {"a": given.get("a", self.a(x)), "b": given.get("b", self.b(x))}
        s["c"] = given.get("c", self.c(torch.cat([s["a"], s["b"]], dim=1)))
        s["d"] = given.get("d", self.d(torch.cat([s["a"], s["b"], s["c"]], dim=1)))
        return {**s, "out": self.out(torch.cat([s[n] for n in "abcd"], dim=1))}


@pytest.fixture
def net() -> Branches:
    torch.manual_seed(1000)
    return Branches().double()


@pytest.fixture
def subject(net) -> ModuleSubject:
    return ModuleSubject(net, list("abcd"), torch.zeros(1, 4), encode=lambda rows: rows.double())


BASE, SOURCE = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1000), dtype=torch.float64)


def swapped(subject: Subject, *names: str, strength: float = 1.0) -> Tensor:
    """Outputs when whole places (or paths) are taken from the source together."""
    [recording] = record_pairs(subject, (BASE, SOURCE))
    edits = [
        EditBatch(p, Frame.identity(p.width), torch.full((1, p.width), strength)) for p in map(subject.place, names)
    ]
    return respond(recording, edits)[0]


def test_a_path_is_the_effect_through_one_place_only(net, subject):
    base, source = net.with_states(BASE), net.with_states(SOURCE)
    arrives = net.with_states(BASE, a=source["a"])
    paths = along(subject, ["a->c", "a->d", "a->c->d", "a->d around c", "b->output around c, d"])
    assert torch.allclose(swapped(paths, "a->c"), net.with_states(BASE, c=arrives["c"])["out"])
    assert torch.allclose(swapped(paths, "a->d"), net.with_states(BASE, d=arrives["d"])["out"])
    through_c = net.with_states(BASE, c=arrives["c"])["d"]
    assert torch.allclose(swapped(paths, "a->c->d"), net.with_states(BASE, d=through_c)["out"])
    not_by_c = net.with_states(BASE, a=source["a"], c=base["c"])["d"]
    assert torch.allclose(swapped(paths, "a->d around c"), net.with_states(BASE, d=not_by_c)["out"])
    direct = net.with_states(BASE, b=source["b"], c=base["c"], d=base["d"])["out"]
    assert torch.allclose(swapped(paths, "b->output around c, d"), direct)
    differing = [swapped(paths, p.name) for p in paths.places]
    assert min(float((x - y).abs().max()) for k, x in enumerate(differing) for y in differing[:k]) > 1e-3


def test_around_nothing_is_the_whole_effect(subject):
    paths = along(subject, receivers=["output"])
    assert [p.name for p in paths.places] == [f"{n}->output" for n in "abcd"]
    assert torch.allclose(swapped(paths, "b->output"), swapped(subject, "b"))


def test_direct_and_mediated_together_are_the_whole_effect(subject):
    """What goes through c or d, and what goes around them: nothing is lost between paths that are edited together."""
    a, _, c, d = subject.places
    paths = PathSubject(subject, [Path(a, (c,)), Path(a, (d,)), Path(a, (), (c, d))])
    assert torch.allclose(swapped(paths, *(p.name for p in paths.places)), swapped(subject, "a"))


def test_paths_with_one_way_are_followed_in_one_run(net, subject):
    source = net.with_states(SOURCE)
    both = net.with_states(BASE, a=source["a"], b=source["b"])
    paths = along(subject, receivers=["c"])
    assert [p.name for p in paths.places] == ["a->c", "b->c"]
    assert torch.allclose(swapped(paths, "a->c", "b->c"), net.with_states(BASE, c=both["c"])["out"])


def test_paths_to_different_ends_add_up_where_they_end(net, subject):
    source, base = net.with_states(SOURCE), net.with_states(BASE)
    arrives = net.with_states(BASE, a=source["a"])
    by_c = net.with_states(BASE, c=arrives["c"])
    d = by_c["d"] + arrives["d"] - base["d"]
    expected = net.with_states(BASE, c=arrives["c"], d=d)["out"]
    assert torch.allclose(swapped(along(subject, ["a->c", "a->d"]), "a->c", "a->d"), expected)


def test_no_gain_is_no_edit_whatever_else_is_edited(subject):
    paths = along(subject, receivers=["c", "d", "output"], around=["c"])
    [recording] = record_pairs(paths, (BASE, SOURCE))
    gains = {p.name: torch.zeros(2, p.width) for p in paths.places}
    gains["b->c"][1] = 1
    edits = [EditBatch(p, Frame.identity(p.width), gains[p.name]) for p in paths.places]
    outputs = respond(recording, edits)
    assert torch.allclose(outputs[0], recording.base_outputs)
    assert torch.allclose(outputs[1], swapped(paths, "b->c"))


def test_derivatives_follow_the_path(subject):
    paths = along(subject, ["a->c", "b->c"])
    [recording] = record_pairs(paths, (BASE, SOURCE))
    _, found = jacobians(recording, recording.base_rows, paths.places)
    step = 1e-6 * (recording.source_at(paths.places[0]) - recording.base_at(paths.places[0]))
    nudged = swapped(paths, "a->c", strength=1e-6)
    slope = (found["a->c"] @ step.unsqueeze(2)).squeeze(2)
    assert torch.allclose(nudged - recording.base_outputs, slope, atol=1e-9)


# -- every kind of subject -------------------------------------------------------------------------------------------


def test_in_a_chain_everything_goes_through_the_next_layer():
    torch.manual_seed(1001)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)]
    subject = MLPSubject(nn.Sequential(*layers).double(), encode=lambda rows: rows.double())
    paths = along(subject, ["layer1->layer2", "layer1->layer2->layer3", "layer1->output around layer2"])
    for name in ("layer1->layer2", "layer1->layer2->layer3"):
        assert torch.allclose(swapped(paths, name), swapped(subject, "layer1"))
    [recording] = record_pairs(subject, (BASE, SOURCE))
    assert torch.allclose(swapped(paths, "layer1->output around layer2"), recording.base_outputs)


def test_timesteps_of_a_recurrent_network():
    torch.manual_seed(1002)
    subject = GRUSubject(GRUNet(1, 6).double(), 4, encode=lambda rows: rows.double().unsqueeze(2))
    hooked = ModuleSubject(
        subject.net, {f"h{t}": f"cell#{t}" for t in range(4)}, BASE[:1], encode=lambda rows: rows.double().unsqueeze(2)
    )
    fast, slow = (along(s, ["h0->h2", "h1->output around h3"]) for s in (subject, hooked))
    for p in fast.places:
        assert torch.allclose(swapped(fast, p.name), swapped(slow, p.name))


LOOKED_AT = {
    "heads": ("head_output.0.1", ("head_output.2.3",), ()),
    "from another token": ("head_output.0.2@early", ("head_output.3.0",), ("head_output.1.1", "head_output.2.2")),
    "two legs": ("block_output.0@third", ("attention_output.1", "head_output.3.1"), ()),
    "straight": ("head_output.1.0@early", (), ("head_output.2.0", "mlp_output.2", "attention_output.3")),
}


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("kind", LOOKED_AT)
def test_a_decoder_follows_paths_as_hooked_passes_do(family, kind):
    """One unpadded prompt at a time, with plain hooks and whole passes."""
    model, (sender, through, around) = decoders.network(family), LOOKED_AT[kind]
    subject = DecoderSubject(
        model,
        decoders.encode,
        decoders.ANSWERS,
        kinds=("head_output", "attention_output", "mlp_output", "block_output"),
        positions=decoders.POSITIONS,
    )
    place = subject.place
    path = Path(place(sender), tuple(map(place, through)), tuple(map(place, around)))
    paths = PathSubject(subject, [path])
    [recording] = record_pairs(paths, (decoders.BASE, decoders.SOURCE))
    edited = decoders.variants(recording, path.place)
    found = paths.resume(recording.store, recording.base_rows, path.place, edited, {})
    for v, k in ((1, 0), (1, 3), (2, 2), (0, 4)):
        row = decoders.BASE[k]
        with torch.no_grad():
            expected = decoders.as_answers(followed(model, row, path, edited[v, k]))
        assert decoders.relative(found[v, k], expected) < 2e-4


def followed(model: nn.Module, row: Tensor, path: Path, vector: Tensor) -> Tensor:
    """The vocabulary's logits along a path, by whole passes with hooks."""
    tokens, clean = decoders.where(row), dict[str, Tensor]()

    def keep(name: str, into: dict[str, Tensor]) -> object:
        def look(a: Tensor) -> Tensor:
            into[name] = a.clone()
            return a

        return look

    places = (*path.through, *path.around)
    decoders.plain(model, row, {p.name: keep(p.name, clean) for p in places}, tokens)
    hold = {m.name: lambda _, m=m: clean[m.name] for m in path.around}
    here, order = path.sender.name, [path.sender.name, *(p.name for p in path.through)]
    for there in order[1:]:
        arrived: dict[str, Tensor] = {}
        edits = {**hold, here: lambda _, v=vector: v, there: keep(there, arrived)}
        decoders.plain(model, row, edits, tokens)
        here, vector = there, arrived[there]
    last = {here: lambda _: vector} if path.through else {**hold, here: lambda _: vector}
    return decoders.plain(model, row, last, tokens)


def test_a_small_memory_changes_nothing():
    """The passes run in parts; what arrives is put together from them."""
    found = []
    for at_once in (None, 5):
        subject = DecoderSubject(decoders.network("llama"), decoders.encode, decoders.ANSWERS, kinds=("head_output",))
        if at_once is not None:
            subject.resumed_at_once = lambda _, n=at_once: n
        paths = along(subject, receivers=["head_output.2.1"])
        [recording] = record_pairs(paths, (decoders.BASE, decoders.SOURCE))
        place = paths.place("head_output.0.1->head_output.2.1")
        edits = [EditBatch(place, Frame.identity(place.width), torch.tensor([[1.0], [2.0]]).expand(2, place.width))]
        found.append(respond(recording, edits))
    assert torch.allclose(*found, atol=1e-6)


def test_heads_of_one_block_do_not_reach_each_other():
    subject = DecoderSubject(decoders.network("llama"), decoders.encode, decoders.ANSWERS, kinds=("head_output",))
    paths = along(subject, receivers=["head_output.1.0", "head_output.2.1"])
    begin = {p.name.split("->")[0] for p in paths.places if p.name.endswith("->head_output.1.0")}
    assert begin == {f"head_output.0.{h}" for h in range(4)}
    [recording] = record_pairs(paths, (decoders.BASE, decoders.SOURCE))
    together = heads(together=2)(recording, paths.places)
    assert all(len({p.way for p in site.places}) == 1 for site in together.sites)


# -- the whole way: recordings in shards, workers, plans ------------------------------------------------------------


def test_recordings_keep_an_activation_once_however_many_paths_begin_there(subject):
    paths = along(subject, receivers=["c", "d", "output"])
    store = merged([paths.record(x) for x in (BASE, SOURCE)])
    assert set(store.activations) == set("abcd")
    assert store.activations["a->c"] is store.activations["a"]
    assert paths.shape(3).vector_bytes == subject.shape(3).vector_bytes


def test_a_worker_is_sent_what_a_path_looks_at(subject):
    """Only a unit's own places travel: the ends of paths and what they go around must come along."""
    paths = along(subject, ["a->c", "b->d around c"])
    causal = CausalModel(["x", "y"], {"z": lambda x, y: x, "out": lambda z, y: z}, "out")
    rows = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    bank = draw_pairs(causal, rows, "balanced", 8, torch.Generator().manual_seed(0))
    [recording] = record(wide(paths), bank)
    for p in paths.places:
        unit = Unit(len, slice(None), (p,))
        sent = narrowed(recording, unit)
        sent = replace(sent, store=to_device(sent.store, paths))
        edits = [EditBatch(p, Frame.identity(p.width), torch.ones(1, p.width))]
        assert torch.allclose(respond(sent, edits), respond(recording, edits))


def wide(paths: PathSubject) -> PathSubject:
    """The same with inputs of two numbers."""
    paths.inner.encode = lambda rows: rows.double().repeat(1, 2)
    return paths


def test_a_subject_along_paths_can_be_sent_and_copied(subject):
    subject.encode = Doubles()
    paths = along(subject, receivers=["d"])
    for other in (pickle.loads(pickle.dumps(paths)), copy.deepcopy(paths)):  # noqa: S301
        assert other.identity() == subject.identity()
        assert torch.equal(swapped(other, "a->d"), swapped(paths, "a->d"))


class Doubles:
    def __call__(self, rows: Tensor) -> Tensor:
        return rows.double()


def test_fresh_weights_are_looked_at_along_the_same_paths(subject):
    fresh = along(subject, receivers=["d"]).reinitialised(torch.Generator().manual_seed(0))
    assert [p.name for p in fresh.places] == ["a->d", "b->d", "c->d"]
    assert fresh.identity() != subject.identity()


def test_plans_count_every_leg(monkeypatch):
    """What is forecast for a path are the passes of its legs, and so many layers run."""
    torch.manual_seed(1003)
    subject = MLPSubject(nn.Sequential(*[m for n in range(3) for m in (nn.Linear(4, 4), nn.Tanh())], nn.Linear(4, 2)))
    paths = along(subject, ["layer1->layer3", "layer2->layer3", "layer1->output"])
    assert [paths.shape(2).left(p) for p in paths.places] == [3 + 1, 3, 2 + 1]
    causal = CausalModel(["w", "x", "y", "z"], {"p": lambda w, x: w * x, "out": lambda p, y, z: p}, "out")
    rows = torch.cartesian_prod(*[torch.arange(2)] * 4)
    banks = [draw_pairs(causal, rows, "balanced", 12, torch.Generator().manual_seed(k)) for k in range(2)]
    fit, calibration = record(paths, *banks)
    scene = Scene(paths.shape(2), paths, fit, calibration, {}, None, 2)
    stage = Localize((whole_places,), Transport("uot-one-sided", (0.1,), (1.0,)))
    planned = count(Method("paths", "", (stage,)), scene)
    ran, resume = [], subject.resume

    def counted(store, some, start, activation, later):
        ran.append(activation.shape[0] * activation.shape[1] * subject.shape(2).left(start))
        return resume(store, some, start, activation, later)

    monkeypatch.setattr(subject, "resume", counted)
    problem = Problem(paths, fit, calibration, ("p",), as_readout("softmax"))
    stage(problem, State.start(problem))
    assert sum(p.responses * scene.shape.left(p.place) for p in planned.passes) == sum(ran)


# -- handles ---------------------------------------------------------------------------------------------------------


def path_handle(paths: PathSubject, *names: str) -> Handle:
    places = [paths.place(n) for n in names]
    edits = [EditBatch(p, Frame.identity(p.width), torch.full((1, p.width), 0.7)) for p in places]
    return handle_from_edits("z", edits, 0, paths, {})


@pytest.mark.parametrize("names", [["a->c"], ["a->c->d", "b->c"], ["a->output around c, d"]])
def test_a_handle_over_paths_is_saved_applied_and_opened(names, net, subject, tmp_path):
    paths = along(subject, names)
    handle = path_handle(paths, *names)
    handle.save(tmp_path / "z.safetensors")
    found = Handle.load(tmp_path / "z.safetensors", along(subject, handle.places))
    expected = handle.apply(paths, BASE, SOURCE)
    assert torch.equal(found.apply(along(subject, found.places), BASE, SOURCE), expected)
    with found.on(paths, SOURCE, base=BASE):
        assert torch.allclose(net(BASE), expected)
    assert not torch.allclose(net(BASE), expected)


def test_an_opened_path_that_never_happens_is_refused(net, subject):
    paths = along(subject, ["a->c"])
    with refused("The edit never happened at c"), path_handle(paths, "a->c").on(paths, SOURCE, base=BASE):
        net.a(BASE)


def test_a_path_in_a_live_language_model():
    """Generation goes on from what has arrived in the prompt."""
    model = decoders.network("gpt2")
    subject = DecoderSubject(model, decoders.encode, decoders.ANSWERS, kinds=("head_output",))
    paths = along(subject, receivers=["head_output.2.1"])
    handle = path_handle(paths, "head_output.0.2->head_output.2.1")
    expected = handle.apply(paths, decoders.BASE, decoders.SOURCE)
    ids, mask = decoders.encode(decoders.BASE)
    with handle.on(paths, decoders.SOURCE, base=decoders.BASE):
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        with torch.no_grad():
            live = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1].float()
    assert decoders.relative(decoders.as_answers(live), expected) < 1e-4


def test_handles_over_paths_are_refused_where_paths_are_not_known(subject):
    paths = along(subject, ["a->c"])
    handle = path_handle(paths, "a->c")
    with refused("'a->c' is a path", "plot_ot.along(subject, ['a->c'])"):
        handle.apply(subject, BASE, SOURCE)
    with refused("give the input rows that it will be called with as `base`"), handle.on(paths, SOURCE):
        pass
    with refused("`every_token`"), handle.on(paths, SOURCE, base=BASE, every_token=True):
        pass
    with refused("followed in 6 `base` rows", "called with 2"), handle.on(paths, SOURCE, base=BASE):
        paths.inner.module(BASE[:2])


@pytest.mark.parametrize("write", [to_mib, to_causalab, to_pyvene])
def test_other_formats_know_no_paths(write, tmp_path):
    subject = DecoderSubject(
        decoders.network("gpt2"),
        decoders.encode,
        decoders.ANSWERS,
        kinds=("head_output",),
        positions=decoders.POSITIONS,
    )
    name = "head_output.0.2@early->head_output.2.1"
    paths = along(subject, [name])
    options = {"model_key": "m"} if write is to_causalab else {}
    with refused(f"acts along the path {name}", "plot_ot.along"):
        write(path_handle(paths, name), paths if write is to_pyvene else tmp_path / "x", **options)


def test_names_of_paths_in_words():
    place = Place("head_output.0.2@early->head_output.2.1 around mlp_output.1", 4, 0)
    assert (place.token, place.way) == ("early", "head_output.2.1 around mlp_output.1")
    assert place_words(place.name) == "head 2 of block 0, early to head 1 of block 2, around mlp_output.1"


# -- refusals --------------------------------------------------------------------------------------------------------


def test_one_name_is_as_good_as_a_list_of_one(subject):
    for given, listed in (
        ({"receivers": "c", "senders": "a"}, {"receivers": ["c"], "senders": ["a"]}),
        ({"paths": "a->c"}, {"paths": ["a->c"]}),
        ({"receivers": "output", "around": "c"}, {"receivers": ["output"], "around": ["c"]}),
    ):
        assert along(subject, **given).places == along(subject, **listed).places


def test_what_is_no_path_is_refused(subject):
    with refused("Give the `receivers`"):
        along(subject)
    with refused("Give the `receivers`"):
        along(subject, ["a->c"], receivers=["c"])
    with refused("'a' is no path", "'p->q'"):
        along(subject, ["a"])
    with refused("Unknown place 'e'"):
        along(subject, ["a->e"])
    with refused("Nothing of d arrives at a", "does not come after it"):
        along(subject, ["d->a"])
    with refused("No path leads from c, d to a"):
        along(subject, senders=["c", "d"], receivers=["a"])
    with refused("needs at least one path"):
        along(subject, [])
    with refused("goes both through c and around it"):
        PathSubject(subject, [Path(subject.place("a"), (subject.place("c"),), (subject.place("c"),))])
    with refused("must all go around the same places"):
        along(subject, ["a->output around c", "b->output"])
    with refused("goes around other places than those given"):
        along(subject, ["a->output around c"], around=["d"])


def test_many_places_around_keep_the_name_short(subject):
    paths = along(subject, receivers=["output"], around=list("abcd"))
    [first, *_] = paths.places
    assert first.name.startswith("a->output around 4 places (")
    assert along(subject, ["a->output"], around=list("abcd")).places == (first,)
    with refused("name all of them as `around`"):
        along(subject, [first.name])


def test_answers_of_several_tokens_are_not_looked_at_along_paths():
    model = decoders.network("llama")
    subject = SequenceSubject(model, decoders.encode, [[5, 6], [7, 8]], kinds=("head_output",))
    with refused("look along paths of `subject.prompt`"):
        along(subject, receivers=["head_output.2.1"])
    along(subject.prompt, receivers=["head_output.2.1"])


# -- planted routers (tests/truth/routers.py; forty of them in benchmarks/router_campaign.py) ------------------------


def test_a_planted_router_is_found_by_its_path_and_not_by_its_whole_effect():
    planted = routed(1000)
    found = {}
    subject = planted.subject()
    early = [p.name for p in subject.places if p.layer < 2]
    late = [p.name for p in subject.places if p.layer == 2]
    for name, seen in (("whole", subject), ("paths", along(subject, senders=early, receivers=late))):
        model, generator = causal(), torch.Generator().manual_seed(1000)
        rows = torch.cartesian_prod(*[torch.arange(4)] * 6)
        pools = rows[torch.randperm(len(rows), generator=generator)[:240]].chunk(3)
        fit, calibration, test = record(seen, *(draw_pairs(model, p, "balanced", 40, generator) for p in pools))
        assert (READOUT.decide(test.base_outputs) == test.bank.base_answer).all()
        problem = Problem(seen, fit, calibration, (WHERE,), READOUT)
        state = Localize((heads(),), Transport("uot-one-sided", (0.05,), (1.0,), scale="median"))(
            problem, State.start(problem)
        )
        state = Calibrate(Search((1, 2), (1.0, 2.0)))(problem, state)
        right = correct(test, state.handles[WHERE], READOUT)[test.bank.changed[WHERE]]
        found[name] = state.handles[WHERE].chosen["sites"], float(right.double().mean())
    assert found["paths"] == ([planted.path], 1.0)
    assert found["whole"][1] < 0.6
