"""Handles: kept in files without loss, refused when damaged or foreign, and equal to pyvene's interventions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from nets import hooked_forward, hooked_subject, mlp, orthonormal, planted_plane, rand
from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle, handle_from_edits
from plot_ot.signatures import as_readout
from plot_ot.sites import whole_places
from plot_ot.stages.das import train_rotations
from plot_ot.stages.descent import DasSpec
from plot_ot.subjects import MLPSubject, ModuleSubject, Place, record, record_pairs

FRAMES = {
    "identity": lambda d: Frame.identity(d),
    "orthonormal": lambda d: Frame.orthonormal(orthonormal(1, d, 3), "pca"),
    "oblique": lambda d: Frame.oblique(rand(1, d, 2), rand(2, d, 2)),
}
SUBJECTS = {"fast": MLPSubject, "hooked": hooked_subject}
BASE, SOURCE = rand(1, 6, 4), rand(2, 6, 4)


@pytest.fixture
def net() -> nn.Sequential:
    return mlp(4, 6, 7, 3)


def make_handle(net: nn.Sequential, *kinds: str, **chosen: object) -> Handle:
    """Random gains in a frame of each kind, one place after another."""
    subject = MLPSubject(net)
    frames = [FRAMES[kind](p.width) for kind, p in zip(kinds, subject.places, strict=False)]
    edits = [Edit(p, f, rand(9, f.rank)) for p, f in zip(subject.places, frames, strict=False)]
    return Handle("z", tuple(edits), subject.identity(), chosen)


def by_hand(net: nn.Sequential, handle: Handle, base: Tensor, source: Tensor) -> Tensor:
    dense = []
    for e in handle.edits:
        read = torch.eye(e.place.width) if e.frame.read is None else e.frame.read
        dense.append((net[2 * e.place.layer - 1], read, read if e.frame.write is None else e.frame.write, e.gains))
    return hooked_forward(net, dense, base, source)


def same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b is None or (a is not None and b is not None and torch.equal(a, b))


# -- use ------------------------------------------------------------------------------------------------------

several = pytest.mark.parametrize("kinds", [("identity",), ("orthonormal",), ("oblique",), ("oblique", "orthonormal")])
either = pytest.mark.parametrize("make", SUBJECTS.values(), ids=SUBJECTS)


@several
@either
def test_apply_and_the_live_network_give_the_hooked_forward(net, kinds, make):
    handle, subject = make_handle(net, *kinds), make(net)
    expected = by_hand(net, handle, BASE, SOURCE)
    torch.testing.assert_close(handle.apply(subject, BASE, SOURCE), expected, rtol=1e-4, atol=1e-5)
    clean = net(BASE)
    with handle.on(subject, SOURCE):
        torch.testing.assert_close(net(BASE), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(net(BASE), clean)


def test_a_live_handle_refuses_another_number_of_rows_and_leaves_no_hook(net):
    handle = make_handle(net, "identity", "oblique")
    with pytest.raises(PlotError, match="6 source rows, but the model is called with 4"):  # noqa: SIM117
        with handle.on(MLPSubject(net), SOURCE):
            net(BASE[:4])
    assert not any(m._forward_hooks for m in net.modules())


def test_size_counts_nonzero_gains_and_untouched_places_are_left_out(net):
    subject = MLPSubject(net)
    [recording] = record_pairs(subject, (BASE, SOURCE))
    edits = whole_places(recording, subject.places).edits(torch.tensor([[0.0, 0.5], [1.0, 1.0]]))
    handle = handle_from_edits("z", edits[::-1], 0, subject, {})
    assert (handle.places, handle.size) == (["layer2"], 7)
    assert handle_from_edits("z", edits[::-1], 1, subject, {}).places == ["layer1", "layer2"]


def test_a_handle_that_touches_nothing_gives_the_clean_outputs(net):
    subject = MLPSubject(net)
    [recording] = record_pairs(subject, (BASE, SOURCE))
    nothing = whole_places(recording, subject.places).edits(torch.zeros(1, 2))
    handle = handle_from_edits("z", nothing, 0, subject, {"strength": 0.0})
    torch.testing.assert_close(handle.apply(subject, BASE, SOURCE), net(BASE).detach())


# -- files ----------------------------------------------------------------------------------------------------


@several
def test_a_saved_handle_comes_back_whole(net, kinds, tmp_path):
    handle = make_handle(net, *kinds, method="plot", K=2, strength=0.5, sites=["layer1[0]"], beta=None)
    path = tmp_path / "new" / "z.safetensors"
    handle.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["z.safetensors"]
    found = Handle.load(path, MLPSubject(net))
    assert (found.variable, found.subject, dict(found.chosen)) == ("z", handle.subject, dict(handle.chosen))
    for a, b in zip(found.edits, handle.edits, strict=True):
        assert (a.place, a.frame.kind, a.frame.width) == (b.place, b.frame.kind, b.frame.width)
        assert torch.equal(a.gains, b.gains)
        assert same_tensor(a.frame.read, b.frame.read)
        assert same_tensor(a.frame.write, b.frame.write)


def test_tensors_that_share_memory_are_saved(net, tmp_path):
    gains = torch.ones(7)
    edits = [Edit(p, Frame.identity(p.width), gains[: p.width]) for p in MLPSubject(net).places]
    handle = Handle("z", tuple(edits), MLPSubject(net).identity())
    handle.save(tmp_path / "z.safetensors")
    assert Handle.load(tmp_path / "z.safetensors").size == handle.size == 13


def rewritten(change: Callable[[dict[str, Tensor], dict], object]) -> Callable[[Path], None]:
    """Damage a saved handle's tensors or description."""

    def damage(path: Path) -> None:
        data = path.read_bytes()
        tensors = load(data)
        header = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["plot_ot"])
        change(tensors, header)
        path.write_bytes(save(tensors, metadata={"plot_ot": json.dumps(header)}))

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "truncated header": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "empty": lambda path: path.write_bytes(b""),
    "random bytes": lambda path: path.write_bytes(bytes(range(256)) * 4),
    "another program's file": lambda path: path.write_bytes(save({"weight": torch.ones(3)})),
    "another format": rewritten(lambda tensors, header: header.update(format="plot-ot handle 999")),
    "no edits key": rewritten(lambda tensors, header: header.pop("edits")),
    "edits of a wrong type": rewritten(lambda tensors, header: header.update(edits=3)),
    "no gains": rewritten(lambda tensors, header: tensors.pop("0.gains")),
    "wrong gains": rewritten(lambda tensors, header: tensors.update({"0.gains": torch.ones(5)})),
    "NaN gains": rewritten(lambda tensors, header: tensors["0.gains"].fill_(torch.nan)),
    "wrong frame": rewritten(lambda tensors, header: tensors.update({"0.read": torch.ones(5, 2)})),
    "wrong write": rewritten(lambda tensors, header: tensors.update({"0.write": torch.ones(6, 3)})),
    "per-variant frame": rewritten(lambda tensors, header: tensors.update({"0.read": torch.ones(2, 6, 2)})),
    "NaN frame": rewritten(lambda tensors, header: tensors["0.read"].fill_(torch.nan)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_in_one_line_that_names_it(net, damage, tmp_path):
    path = tmp_path / "z.safetensors"
    make_handle(net, "oblique").save(path)
    damage(path)
    with pytest.raises(PlotError, match=r"z\.safetensors") as refusal:
        Handle.load(path)
    assert "\n" not in str(refusal.value)


def test_nan_is_named_as_the_reason(net, tmp_path):
    path = tmp_path / "z.safetensors"
    make_handle(net, "oblique").save(path)
    DAMAGES["NaN gains"](path)
    with pytest.raises(PlotError, match=r"NaN|finite"):
        Handle.load(path)


@pytest.mark.parametrize("where", ["missing.safetensors", "."])
def test_a_path_without_a_file_is_refused(where, tmp_path):
    with pytest.raises(PlotError, match=r"no handle file|not a readable"):
        Handle.load(tmp_path / where)


def test_a_directory_that_cannot_be_written_is_refused_and_left_as_it_was(net, tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "file" / "z.safetensors", tmp_path / "taken"):
        with pytest.raises(PlotError, match="Cannot write") as refusal:
            make_handle(net, "identity").save(path)
        assert "\n" not in str(refusal.value)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "taken"]


# -- the wrong network ----------------------------------------------------------------------------------------


def test_a_handle_of_another_network_is_refused_wherever_it_is_used(net, tmp_path):
    handle, other = make_handle(net, "identity"), MLPSubject(mlp(4, 6, 7, 3, seed=1))
    handle.save(tmp_path / "z.safetensors")
    message = rf"'z' belongs to network {handle.subject}, not to {other.identity()}"
    uses = (
        lambda: Handle.load(tmp_path / "z.safetensors", other),
        lambda: handle.apply(other, BASE, SOURCE),
        lambda: handle.on(other, SOURCE).__enter__(),
    )
    for use in uses:
        with pytest.raises(PlotError, match=message):
            use()


def use_live(handle: Handle, subject: ModuleSubject) -> None:
    with handle.on(subject, SOURCE):
        subject.module(BASE)


uses = pytest.mark.parametrize(
    "use", [lambda h, s: h.apply(s, BASE, SOURCE), use_live], ids=["applied", "on the live network"]
)


@uses
def test_a_place_the_subject_does_not_name_is_refused(net, use):
    subject = ModuleSubject(net, {"hidden": "1"}, BASE)
    with pytest.raises(PlotError, match=r"Unknown place 'layer1'.*hidden"):
        use(make_handle(net, "identity"), subject)


@uses
def test_a_handle_of_another_position_is_refused(use):
    net = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2))
    first, second = (ModuleSubject(net, ["2"], BASE, position=p) for p in (0, 1))
    edit = Edit(Place("2", 3, 1, 0), Frame.identity(3), torch.ones(3))
    handle = Handle("z", (edit,), first.identity())
    use(handle, first)
    with pytest.raises(PlotError, match="position"):
        use(handle, second)


# -- pyvene as the oracle -------------------------------------------------------------------------------------


class Twin:
    """The same weights as pyvene's MLP and as ours."""

    def __init__(self, width: int = 6, layers: int = 3) -> None:
        import pyvene
        from pyvene.models.mlp.modelings_mlp import MLPConfig, MLPForClassification

        self.pv = pyvene
        config = MLPConfig(
            h_dim=width, n_layer=layers, activation_function="relu", pdrop=0.0, num_classes=3, squeeze_output=True
        )
        self.net = mlp(*[width] * (layers + 1), 3, activation=nn.ReLU)
        self.model = MLPForClassification(config).eval()
        theirs = [*(block.ff1 for block in self.model.mlp.h), self.model.score]
        for ours, their in zip(self.net[::2], theirs, strict=True):
            their.load_state_dict(ours.state_dict())

    def swap(self, parts: list[dict], base: Tensor, source: Tensor) -> Tensor:
        """pyvene's outputs under several interventions, all taking from the same sources.

        A part is a layer (from 0), an intervention class, and neurons, or a frame with its number of directions.
        """
        pv, rows = self.pv, len(base)
        representations = [
            pv.RepresentationConfig(p["layer"], "block_output", "pos", 1, low_rank_dimension=p.get("rank"))
            for p in parts
        ]
        config = pv.IntervenableConfig(
            model_type=type(self.model), representations=representations, intervention_types=[p["kind"] for p in parts]
        )
        model = pv.IntervenableModel(config, self.model)
        for p, intervention in zip(parts, model.interventions.values(), strict=True):
            if "frame" in p:
                intervention.rotate_layer.weight = p["frame"]
                intervention.set_interchange_dim(p["rank"])
        positions = [[[0]] * rows for _ in parts]
        subspaces = [[p["neurons"]] * rows if "neurons" in p else None for p in parts]
        with torch.no_grad():
            _, outputs = model(
                {"inputs_embeds": base.unsqueeze(1)},
                [{"inputs_embeds": source.unsqueeze(1)} for _ in parts],
                {"sources->base": (positions, positions)},
                subspaces=subspaces if any(subspaces) else None,
            )
        return outputs[0]


@pytest.fixture(scope="module")
def twin() -> Twin:
    return Twin()


def neuron_edit(subject: MLPSubject, layer: int, neurons: list[int]) -> Edit:
    place = subject.places[layer]
    gains = torch.zeros(place.width)
    gains[neurons] = 1
    return Edit(place, Frame.identity(place.width), gains)


@pytest.mark.parametrize(
    "swaps",
    [{0: [0, 1, 2, 3, 4, 5]}, {1: [1, 4]}, {2: [3]}, {0: [0, 2], 2: [1, 5]}, {0: [1], 1: [2, 3, 5], 2: [0]}],
    ids=str,
)
def test_neuron_swaps_equal_pyvene_interchange_interventions(twin, swaps):
    base, source = rand(3, 9, 6), rand(4, 9, 6)
    subject = MLPSubject(twin.net)
    edits = tuple(neuron_edit(subject, layer, neurons) for layer, neurons in swaps.items())
    parts = [{"layer": layer, "kind": twin.pv.VanillaIntervention, "neurons": n} for layer, n in swaps.items()]
    found = Handle("z", edits, subject.identity()).apply(subject, base, source)
    torch.testing.assert_close(found, twin.swap(parts, base, source), rtol=1e-4, atol=1e-5)
    assert (found - twin.net(base)).abs().max() > 1e-3


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_das_handles_equal_pyvene_rotated_space_interventions(twin, layer, rank):
    planted = planted_plane()
    subject = MLPSubject(twin.net, encode=embed)
    [fit] = planted.banks(60)
    [recording] = record(subject, fit)
    place = subject.places[layer]
    spec, generator = DasSpec(most=3, batch=20), torch.Generator().manual_seed(0)
    [rotation] = train_rotations(recording, place, ["p"], [rank], as_readout("softmax"), spec, generator)
    handle = Handle("p", (Edit(place, rotation.frame, torch.ones(rank)),), subject.identity())
    found = handle.apply(subject, fit.base, fit.source)
    frame = rotation.frame.read
    complement = torch.linalg.qr(torch.cat([frame, rand(6, 6, 6 - rank)], dim=1))[0][:, rank:]
    low, full = twin.pv.LowRankRotatedSpaceIntervention, twin.pv.RotatedSpaceIntervention
    for kind, weight in ((low, frame), (full, torch.cat([frame, complement], dim=1))):
        part = {"layer": layer, "kind": kind, "frame": weight, "rank": rank}
        expected = twin.swap([part], embed(fit.base), embed(fit.source))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (found - twin.net(embed(fit.base))).abs().max() > 1e-3


def embed(rows: Tensor) -> Tensor:
    """Four three-valued inputs as six numbers."""
    return torch.nn.functional.one_hot(rows.long(), 3).flatten(1).float() @ rand(5, 12, 6)
