"""Handles in pyvene: the same outputs as ours, alive and from pyvene's own files; and rotations from there."""

import copy
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from decoders import ANSWERS, BASE, POSITIONS, SOURCE, encode, network, relative
from nets import mlp, orthonormal, planted_plane, rand
from plot_ot.edits import Frame
from plot_ot.edits.encoder import Encoder
from plot_ot.errors import PlotError
from plot_ot.exchange import from_pyvene, pyvene_inputs, pyvene_model, to_pyvene
from plot_ot.handles import Edit, Handle
from plot_ot.signatures import as_readout
from plot_ot.sites import principal_frame
from plot_ot.stages.closed_form import barycentric
from plot_ot.stages.das import train_rotations
from plot_ot.stages.descent import DasSpec
from plot_ot.subjects import DecoderSubject, GRUNet, GRUSubject, MLPSubject, ModuleSubject, Place, record, record_pairs

pyvene = pytest.importorskip("pyvene")

CLOSE = 1e-5
EVERY_KIND = ("block_output", "attention_output", "mlp_output", "head_output")


def subject_of(family: str, **options: object) -> DecoderSubject:
    subject = DecoderSubject(network(family), encode, ANSWERS, kinds=EVERY_KIND, positions=POSITIONS, **options)
    return subject.watching(vocabulary=True)


@pytest.fixture(scope="module", params=["gpt2", "llama", "gemma2"])
def subject(request) -> DecoderSubject:
    return subject_of(request.param)


def gains(width: int, *at: int, value: float = 1.0) -> Tensor:
    g = torch.zeros(width)
    g[list(at)] = value
    return g


def some_edit(kind: str, subject: DecoderSubject, place: Place) -> Edit:
    d = place.width
    [recording] = record_pairs(subject, (BASE, SOURCE))
    if kind == "neurons":
        return Edit(place, Frame.identity(d), gains(d, 0, 1, 3))
    if kind == "two neurons":  # pyvene takes any pair of numbers for a range
        return Edit(place, Frame.identity(d), gains(d, 0, 3))
    if kind == "whole":
        return Edit(place, Frame.identity(d), torch.ones(d))
    if kind == "strength":
        return Edit(place, Frame.identity(d), gains(d, 0, 2, 3, value=2.5))
    if kind == "pca":
        frame = principal_frame(recording, place)
        return Edit(place, frame, gains(frame.rank, 0, 2))
    if kind == "pca, strength":
        frame = principal_frame(recording, place)
        return Edit(place, frame, gains(frame.rank, 0, 2, value=0.7))
    if kind == "rotation":
        return Edit(place, Frame.orthonormal(orthonormal(1001, d, 2)), torch.ones(2))
    difference = recording.source_at(place) - recording.base_at(place)
    frame = barycentric(difference, difference @ rand(1002, d, d) / d, 0.1)
    assert frame is not None
    return Edit(place, frame, torch.ones(frame.rank))


NATIVE = {
    "neurons": "VanillaIntervention",
    "two neurons": "VanillaIntervention",
    "whole": "VanillaIntervention",
    "pca": "LowRankRotatedSpaceIntervention",
    "rotation": "LowRankRotatedSpaceIntervention",
}
OURS = {"strength": "GainIntervention", "pca, strength": "FrameIntervention", "closed form": "FrameIntervention"}


def through_pyvene(model: object, handle: Handle, subject: DecoderSubject) -> Tensor:
    with torch.no_grad():
        return model(**pyvene_inputs(handle, subject, BASE, SOURCE))[1].logits[:, -1]


def handle_of(subject: DecoderSubject, *edits: Edit) -> Handle:
    return Handle("z", edits, subject.identity())


# -- the same outputs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*NATIVE, *OURS])
def test_outputs_are_ours_alive_loaded_by_pyvene_and_brought_back(subject, kind, tmp_path):
    handle = handle_of(subject, some_edit(kind, subject, subject.place("block_output.1")))
    expected = handle.apply(subject, BASE, SOURCE)
    made = to_pyvene(handle, subject, tmp_path / "saved")
    assert type(made.interventions["layer_1_comp_block_output_unit_pos_nunit_1#0"]).__name__ == (NATIVE | OURS)[kind]
    assert relative(through_pyvene(made, handle, subject), expected) < CLOSE
    loaded = pyvene.IntervenableModel.load(str(tmp_path / "saved"), subject.decoder.model)
    assert relative(through_pyvene(loaded, handle, subject), expected) < CLOSE
    for origin in (made, tmp_path / "saved"):
        back = from_pyvene(origin, subject, "z")
        assert relative(back.apply(subject, BASE, SOURCE), expected) < CLOSE
        assert back.places == handle.places
    unedited = record_pairs(subject, (BASE, SOURCE))[0].base_outputs
    assert relative(expected, unedited) > 1e-3


@pytest.mark.parametrize(
    "name",
    [
        "attention_output.2@early",
        "mlp_output.0@third",
        "head_output.2.1",
        "head_output.1.3@early",
        "block_output.2@early",
    ],
)
@pytest.mark.parametrize("kind", ["neurons", "strength", "rotation"])
def test_every_kind_of_place_and_position(subject, name, kind):
    handle = handle_of(subject, some_edit(kind, subject, subject.place(name)))
    made = to_pyvene(handle, subject)
    expected = handle.apply(subject, BASE, SOURCE)
    assert relative(through_pyvene(made, handle, subject), expected) < CLOSE
    assert relative(from_pyvene(made, subject, "z").apply(subject, BASE, SOURCE), expected) < CLOSE


def test_several_places_take_from_one_clean_source_run(subject, tmp_path):
    names = ["block_output.0@early", "head_output.1.2", "block_output.1@early", "block_output.1", "mlp_output.3"]
    kinds = ["neurons", "rotation", "strength", "closed form", "whole"]
    edits = [some_edit(k, subject, subject.place(n)) for n, k in zip(names, kinds, strict=True)]
    handle = handle_of(subject, *edits)
    expected = handle.apply(subject, BASE, SOURCE)
    made = to_pyvene(handle, subject, tmp_path / "saved")
    assert relative(through_pyvene(made, handle, subject), expected) < CLOSE
    loaded = pyvene.IntervenableModel.load(str(tmp_path / "saved"), subject.decoder.model)
    assert relative(through_pyvene(loaded, handle, subject), expected) < CLOSE
    assert from_pyvene(loaded, subject, "z").places == handle.places


@pytest.mark.parametrize("family", ["qwen3", "phi"])
@pytest.mark.parametrize("name", ["block_output.1", "head_output.2.1@early", "attention_output.0"])
@pytest.mark.parametrize("kind", ["whole", "two neurons", "rotation", "strength", "closed form"])
def test_models_that_pyvene_does_not_know_go_by_module_paths(family, name, kind, tmp_path):
    subject = subject_of(family)
    handle = handle_of(subject, some_edit(kind, subject, subject.place(name)))
    expected = handle.apply(subject, BASE, SOURCE)
    to_pyvene(handle, subject, tmp_path / "saved")
    loaded = pyvene.IntervenableModel.load(str(tmp_path / "saved"), pyvene_model(subject))
    assert relative(through_pyvene(loaded, handle, subject), expected) < CLOSE
    assert relative(from_pyvene(tmp_path / "saved", subject, "z").apply(subject, BASE, SOURCE), expected) < CLOSE


def test_all_tokens_at_once():
    prompts = torch.tensor([[4, 9, 7, 3], [8, 5, 30, 12], [11, 6, 50, 21]])
    subject = DecoderSubject(
        network("llama"), lambda rows: (prompts[rows[:, 0]], torch.ones(len(rows), 4).long()), ANSWERS, tokens=4
    )
    place, base, source = subject.place("block_output.1@all"), torch.tensor([[0], [1]]), torch.tensor([[1], [2]])
    for frame, g in ((Frame.identity(64), gains(64, 5, 40)), (Frame.orthonormal(orthonormal(3, 64, 2)), torch.ones(2))):
        handle = handle_of(subject, Edit(place, frame, g))
        made = to_pyvene(handle, subject)
        with torch.no_grad():
            logits = made(**pyvene_inputs(handle, subject, base, source))[1].logits[:, -1]
        found = torch.stack([logits[:, list(a)].amax(dim=1) for a in ANSWERS], dim=1)
        assert relative(found, handle.apply(subject, base, source)) < CLOSE


# -- other networks ---------------------------------------------------------------------------------------------------


def module_outputs(handle: Handle, subject: ModuleSubject, base: Tensor, source: Tensor, **options: bool) -> Tensor:
    with torch.no_grad():
        return subject.output(to_pyvene(handle, subject, **options)(**pyvene_inputs(handle, subject, base, source))[1])


@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_an_mlp_at_two_layers(strength, tmp_path):
    subject = MLPSubject(mlp(4, 6, 7, 3))
    base, source = rand(1, 9, 4), rand(2, 9, 4)
    edits = (
        Edit(subject.places[0], Frame.identity(6), gains(6, 1, 2, 5, value=strength)),
        Edit(subject.places[1], Frame.orthonormal(orthonormal(5, 7, 3)), torch.ones(3)),
    )
    handle = Handle("z", edits, subject.identity())
    expected = handle.apply(subject, base, source)
    assert relative(module_outputs(handle, subject, base, source), expected) < CLOSE
    to_pyvene(handle, subject, tmp_path / "saved")
    loaded = pyvene.IntervenableModel.load(str(tmp_path / "saved"), pyvene_model(subject))
    with torch.no_grad():
        assert relative(loaded(**pyvene_inputs(handle, subject, base, source))[1], expected) < CLOSE
    assert relative(from_pyvene(tmp_path / "saved", subject, "z").apply(subject, base, source), expected) < CLOSE


def test_a_das_rotation_of_an_mlp():
    planted = planted_plane()
    [fit] = planted.banks(40)
    [recording] = record(planted.subject, fit)
    place = planted.subject.places[0]
    [rotation] = train_rotations(
        recording,
        place,
        ["p"],
        [2],
        as_readout("softmax"),
        DasSpec(most=3, batch=20),
        torch.Generator().manual_seed(1000),
    )
    handle = Handle("p", (Edit(place, rotation.frame, torch.ones(2)),), planted.subject.identity())
    found = module_outputs(handle, planted.subject, fit.base, fit.source, native_only=True)
    assert relative(found, handle.apply(planted.subject, fit.base, fit.source)) < CLOSE


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps, self.head = nn.Conv2d(1, 2, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.maps(x.unflatten(1, (1, 3, 3))).tanh().flatten(1))


def test_maps_that_the_subject_flattens():
    subject = ModuleSubject(Conv(), ["maps"], rand(0, 1, 9))
    base, source = rand(1, 5, 9), rand(2, 5, 9)
    rotation = Edit(subject.places[0], Frame.orthonormal(orthonormal(5, 8, 3)), torch.ones(3))
    for edit in (rotation, Edit(subject.places[0], Frame.identity(8), gains(8, 0, 6))):
        handle = Handle("z", (edit,), subject.identity())
        assert relative(module_outputs(handle, subject, base, source), handle.apply(subject, base, source)) < CLOSE
        with pytest.raises(PlotError, match="not a vector per row"):
            to_pyvene(handle, subject, native_only=True)


@pytest.mark.parametrize("position", [1, -1, lambda rows: (rows[:, 0] > 0).long()], ids=["first", "last", "moving"])
def test_positions_of_any_module(position):
    net = nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Linear(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    subject = ModuleSubject(net, ["2"], rand(0, 1, 6), position=position)
    base, source = rand(1, 5, 6), rand(2, 5, 6)
    handle = Handle("z", (Edit(subject.places[0], Frame.identity(4), gains(4, 0, 3)),), subject.identity())
    expected = handle.apply(subject, base, source)
    assert relative(module_outputs(handle, subject, base, source, native_only=True), expected) < CLOSE


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OURS)
def test_native_only_says_what_does_not_fit(kind):
    subject = subject_of("llama")
    handle = handle_of(subject, some_edit(kind, subject, subject.place("block_output.1")))
    with pytest.raises(PlotError, match="oblique" if kind == "closed form" else "strength other than 1"):
        to_pyvene(handle, subject, native_only=True)


@pytest.mark.parametrize("kind", NATIVE)
def test_native_only_uses_pyvenes_own_classes(kind):
    subject = subject_of("llama")
    made = to_pyvene(handle_of(subject, some_edit(kind, subject, subject.places[3])), subject, native_only=True)
    assert all(type(i).__module__ == "pyvene.models.interventions" for i in made.interventions.values())


def test_an_oblique_frame_that_is_a_swap_after_all_is_folded_in():
    subject = subject_of("llama")
    Q, place = orthonormal(7, 16, 3), subject.place("block_output.1")
    turn = rand(8, 3, 3)
    frame = Frame.oblique(Q @ turn, Q @ torch.linalg.inv(turn).T / torch.tensor([1.0, 2.0, 4.0]))
    handle = handle_of(subject, Edit(place, frame, torch.tensor([1.0, 2.0, 4.0])))
    made = to_pyvene(handle, subject, native_only=True)
    assert relative(through_pyvene(made, handle, subject), handle.apply(subject, BASE, SOURCE)) < CLOSE


def test_other_networks_and_empty_handles_are_refused(tmp_path):
    subject = MLPSubject(mlp(4, 6, 7, 3))
    edit = Edit(subject.places[0], Frame.identity(6), torch.zeros(6))
    with pytest.raises(PlotError, match="changes nothing"):
        to_pyvene(Handle("z", (edit,), subject.identity()), subject)
    with pytest.raises(PlotError, match="belongs to network"):
        to_pyvene(Handle("z", (edit,), "another"), subject)
    gru = GRUSubject(GRUNet(2, 5), 3)
    with pytest.raises(PlotError, match="GRUSubject"):
        to_pyvene(Handle("z", (Edit(gru.places[1], Frame.identity(5), torch.ones(5)),), gru.identity()), gru)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PlotError, match="not an empty directory"):
        to_pyvene(
            Handle("z", (Edit(subject.places[0], edit.frame, torch.ones(6)),), subject.identity()), subject, tmp_path
        )
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_pairs_must_pair_up():
    subject = MLPSubject(mlp(4, 6, 7, 3))
    handle = Handle("z", (Edit(subject.places[0], Frame.identity(6), torch.ones(6)),), subject.identity())
    with pytest.raises(PlotError, match="pair up"):
        pyvene_inputs(handle, subject, rand(1, 3, 4), rand(2, 2, 4))


# -- what was trained in pyvene ---------------------------------------------------------------------------------------


def trained(subject: DecoderSubject, kind: type, **options: object) -> object:
    representation = pyvene.RepresentationConfig(1, "block_output", "pos", 1, **options)
    config = pyvene.IntervenableConfig(representations=[representation], intervention_types=kind)
    return pyvene.IntervenableModel(config, subject.decoder.model)


def pyvene_outputs(model: object, subject: DecoderSubject, subspaces: object = None) -> Tensor:
    whole = handle_of(subject, Edit(subject.place("block_output.1"), Frame.identity(16), torch.ones(16)))
    with torch.no_grad():
        inputs = pyvene_inputs(whole, subject, BASE, SOURCE) | {"subspaces": subspaces}
        return model(**inputs)[1].logits[:, -1]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (pyvene.RotatedSpaceIntervention, {}),
        (pyvene.LowRankRotatedSpaceIntervention, {"low_rank_dimension": 3}),
        (pyvene.BoundlessRotatedSpaceIntervention, {}),
        (pyvene.SigmoidMaskIntervention, {}),
        (pyvene.VanillaIntervention, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_interventions_trained_in_pyvene_become_handles(kind, options, tmp_path):
    subject = subject_of("llama")
    torch.manual_seed(1000)
    model = trained(subject, kind, **options)
    [intervention] = model.interventions.values()
    if hasattr(intervention, "rotate_layer"):
        r = intervention.rotate_layer.weight.shape[1]
        intervention.rotate_layer.weight = orthonormal(1003, 16, r)
    if hasattr(intervention, "temperature"):
        intervention.set_temperature(torch.tensor(2.0))
    if hasattr(intervention, "mask"):
        intervention.mask.data.normal_()
    if kind in (pyvene.RotatedSpaceIntervention, pyvene.VanillaIntervention):
        intervention.set_interchange_dim(5)
    expected = pyvene_outputs(model, subject)
    model.save(str(tmp_path / "saved"))
    for origin in (model, tmp_path / "saved", str(tmp_path / "saved")):
        handle = from_pyvene(origin, subject, "z")
        assert handle.places == ["block_output.1"]
        assert relative(handle.apply(subject, BASE, SOURCE), expected) < CLOSE


def test_the_parts_of_a_partition_are_asked_for(tmp_path):
    subject = subject_of("llama")
    partition = [[0, 4], [4, 9], [9, 12, 15]]
    for kind in (pyvene.VanillaIntervention, pyvene.RotatedSpaceIntervention):
        model = trained(subject, kind, subspace_partition=partition)
        model.save(str(tmp_path / kind.__name__))
        expected = pyvene_outputs(model, subject, [[[0, 2]] * len(BASE)])
        with pytest.raises(PlotError, match="partition of 3 parts"):
            from_pyvene(tmp_path / kind.__name__, subject, "z")
        handle = from_pyvene(tmp_path / kind.__name__, subject, "z", subspaces=[0, 2])
        assert relative(handle.apply(subject, BASE, SOURCE), expected) < CLOSE


def test_the_token_is_ours_to_say():
    subject = subject_of("gpt2")
    model = trained(subject, pyvene.LowRankRotatedSpaceIntervention, low_rank_dimension=2)
    assert from_pyvene(model, subject, "z", place="block_output.1@early").places == ["block_output.1@early"]
    with pytest.raises(PlotError, match=r"Unknown place 'block_output\.9'"):
        from_pyvene(model, subject, "z", place="block_output.9")
    with pytest.raises(PlotError, match="name a place for each"):
        from_pyvene(model, subject, "z", place=["block_output.1", "block_output.2"])


def test_what_is_no_edit_is_refused(tmp_path):
    subject = subject_of("gpt2")
    model = trained(subject, pyvene.AdditionIntervention)
    model.save(str(tmp_path / "saved"))
    for origin in (model, tmp_path / "saved"):
        with pytest.raises(PlotError, match="AdditionIntervention is not an edit"):
            from_pyvene(origin, subject, "z")
    with pytest.raises(PlotError, match="this Linear"):
        from_pyvene(nn.Linear(2, 2), subject, "z")


# -- damaged and hostile directories ----------------------------------------------------------------------------------


class Bomb:
    """Unpickled, it would write a file."""

    def __init__(self, path: object) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


def rewritten(change: Callable[[dict], object]) -> Callable:
    def damage(directory, _) -> None:
        config = json.loads((directory / "config.json").read_text())
        change(config)
        (directory / "config.json").write_text(json.dumps(config))

    return damage


def with_tensors(value: Callable) -> Callable:
    return lambda directory, weights: torch.save(value(torch.load(weights), directory), weights)


ORIGINAL = "rotate_layer.parametrizations.weight.original"
DAMAGES: dict[str, Callable] = {
    "no config": lambda d, w: (d / "config.json").unlink(),
    "config is no JSON": lambda d, w: (d / "config.json").write_text("{"),
    "config is a list": lambda d, w: (d / "config.json").write_text("[]"),
    "nested deeply": lambda d, w: (d / "config.json").write_text("[" * 5000 + "]" * 5000),
    "no types": rewritten(lambda c: c.pop("intervention_types")),
    "types of a wrong type": rewritten(lambda c: c.update(intervention_types=3)),
    "another class": rewritten(lambda c: c.update(intervention_types=["<class 'os.system'>"])),
    "more representations": rewritten(lambda c: c["representations"].append(c["representations"][0])),
    "a representation too long": rewritten(lambda c: c["representations"][0].extend([0] * 20)),
    "path traversal": rewritten(lambda c: c["representations"][0].__setitem__(1, "../../../etc/passwd.x")),
    "absolute path": rewritten(lambda c: c["representations"][0].__setitem__(1, "/etc/passwd")),
    "another place": rewritten(lambda c: c["plot_ot"].update(places=["block_output.77"])),
    "note of a wrong shape": rewritten(lambda c: c["plot_ot"].update(places=[])),
    "many units": rewritten(lambda c: c["representations"][0].__setitem__(3, 4)),
    "no weights": lambda d, w: w.unlink(),
    "weights truncated": lambda d, w: w.write_bytes(w.read_bytes()[:-30]),
    "weights empty": lambda d, w: w.write_bytes(b""),
    "weights random": lambda d, w: w.write_bytes(bytes(range(256)) * 8),
    "weights are a directory": lambda d, w: (w.unlink(), w.mkdir()),
    "a pickle that runs code": with_tensors(lambda t, d: {**t, "x": Bomb(d / "ran")}),
    "a list": with_tensors(lambda t, d: [1, 2]),
    "no rotation": with_tensors(lambda t, d: {}),
    "wrong shape": with_tensors(lambda t, d: {**t, ORIGINAL: torch.zeros(5, 2)}),
    "NaN": with_tensors(lambda t, d: {**t, ORIGINAL: t[ORIGINAL] * torch.nan}),
    "zeros of a huge shape": with_tensors(lambda t, d: {**t, ORIGINAL: torch.zeros(1).expand(1 << 20, 1 << 20)}),
    "integers": with_tensors(lambda t, d: {**t, ORIGINAL: torch.ones(16, 2).long()}),
    "sparse": with_tensors(lambda t, d: {**t, ORIGINAL: torch.ones(16, 2).to_sparse()}),
    "larger than the place": with_tensors(lambda t, d: {**t, "more": torch.zeros(1 << 20)}),
    "an old-style file": lambda d, w: torch.save(torch.load(w), w, _use_new_zipfile_serialization=False),
}


@pytest.fixture(scope="module")
def rotated(tmp_path_factory) -> tuple:
    subject = subject_of("llama")
    handle = handle_of(subject, some_edit("rotation", subject, subject.place("block_output.1")))
    directory = tmp_path_factory.mktemp("pyvene") / "saved"
    to_pyvene(handle, subject, directory)
    return subject, {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_and_hostile_directories_are_refused_in_one_line(rotated, damage, tmp_path):
    subject, files = copy.copy(rotated)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    from_pyvene(tmp_path, subject, "z")
    damage(tmp_path, next(tmp_path.glob("*.bin")))
    with pytest.raises(PlotError) as refusal:
        from_pyvene(tmp_path, subject, "z")
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 2000
    assert not (tmp_path / "ran").exists()


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(PlotError, match="is missing"):
        from_pyvene(tmp_path / "nowhere", MLPSubject(mlp(4, 6, 7, 3)), "z")


def test_features_of_an_encoder_are_refused():
    subject = MLPSubject(mlp(4, 6, 7, 3))
    frame = Frame.encoded(rand(1, 6, 2), rand(2, 6, 2), Encoder(torch.zeros(2), torch.arange(2)))
    handle = Handle("z", (Edit(subject.places[0], frame, torch.ones(2)),), subject.identity())
    with pytest.raises(PlotError, match="nonlinear encoder"):
        to_pyvene(handle, subject)
