"""Sparse autoencoders: planted features are found, edits equal a plain hooked computation, files are checked."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nets import Planted, hooked_subject, mlp, planted_plane, rand
from plot_ot.edits import EditBatch, Frame, respond, resume_edited
from plot_ot.edits import encoder as encoding
from plot_ot.errors import PlotError, PlotWarning
from plot_ot.handles import Edit, Handle, handle_from_edits
from plot_ot.signatures import as_readout, measure_signatures
from plot_ot.sites.sae import SAE, load_sae, sae_features
from plot_ot.stages.calibrate import Search, calibrate, correct
from plot_ot.stages.problem import Candidate
from plot_ot.subjects import MLPSubject, record, record_pairs
from plot_ot.transport import Transport, couple
from refusals import assert_refused

READOUT = as_readout("softmax")
ARCHITECTURES = ("standard", "jumprelu", "topk", "gated")


# -- autoencoders as SAELens defines them, unfolded ---------------------------------------------------------------


class Plain:
    """Random weights and the encoder by its definition; `save` writes what SAELens writes."""

    def __init__(self, architecture: str, d: int = 6, size: int = 11, seed: int = 1000, **config: object) -> None:
        names = {"gated": ("b_gate", "b_mag", "r_mag"), "jumprelu": ("b_enc", "threshold")}
        self.w = {"W_enc": rand(seed, d, size), "W_dec": rand(seed + 1, size, d), "b_dec": rand(seed + 2, d)}
        for k, name in enumerate(names.get(architecture, ("b_enc",))):
            self.w[name] = 0.5 * rand(seed + 3 + k, size)
        if "threshold" in self.w:
            self.w["threshold"] = self.w["threshold"].abs()
        self.config = {"architecture": architecture, "d_in": d, "d_sae": size, "dtype": "float32", **config}
        if architecture == "topk":
            self.config.setdefault("k", 4)

    def encode(self, a: Tensor) -> Tensor:
        w, kind = self.w, self.config["architecture"]
        x = a * self.config.get("test_scale", 1.0)
        x = x - w["b_dec"] if self.config.get("apply_b_dec_to_input", True) else x
        if kind == "gated":
            return (x @ w["W_enc"] + w["b_gate"] > 0) * (x @ (w["W_enc"] * w["r_mag"].exp()) + w["b_mag"]).relu()
        pre = x @ w["W_enc"] + w["b_enc"]
        if kind == "jumprelu":
            return pre.relu() * (pre > w["threshold"])
        if kind == "standard":
            return pre.relu()
        if self.config.get("rescale_acts_by_decoder_norm"):
            pre = pre * w["W_dec"].norm(dim=-1)
        top = pre.topk(self.config["k"], dim=-1)
        return torch.zeros_like(pre).scatter(-1, top.indices, top.values.relu())

    @property
    def write(self) -> Tensor:
        """W_dec as the decoder uses it, one row per feature, in the units of the network's activations."""
        back = self.w["W_dec"] / self.config.get("test_scale", 1.0)
        return back / self.w["W_dec"].norm(dim=-1)[:, None] if self.config.get("rescale_acts_by_decoder_norm") else back

    def save(self, path: Path) -> Path:
        path.mkdir(exist_ok=True)
        save_file({name: t.contiguous() for name, t in self.w.items()}, path / "sae_weights.safetensors")
        (path / "cfg.json").write_text(json.dumps(self.config))
        return path


PLAINS: dict[str, Callable[[], Plain]] = {
    **{kind: lambda kind=kind: Plain(kind) for kind in ARCHITECTURES},
    "jumprelu, not centred": lambda: Plain("jumprelu", apply_b_dec_to_input=False),
    "topk by decoder norm": lambda: Plain("topk", rescale_acts_by_decoder_norm=True),
    "topk before version 6": lambda: Plain("standard", activation_fn_str="topk", activation_fn_kwargs={"k": 3}),
    "scaled": lambda: Plain("standard", normalize_activations="expected_average_only_in", test_scale=1.7),
}
plains = pytest.mark.parametrize("make", PLAINS.values(), ids=PLAINS)


def loaded(plain: Plain, path: Path) -> SAE:
    sae = load_sae(plain.save(path), scale=plain.config.get("test_scale"))
    if "activation_fn_kwargs" in plain.config:
        plain.config |= {"architecture": "topk", **plain.config["activation_fn_kwargs"]}
    return sae


@plains
def test_features_are_those_of_the_saved_autoencoder(make, tmp_path):
    plain, a = make(), rand(5, 40, 6)
    sae = loaded(plain, tmp_path)
    expected = plain.encode(a)
    torch.testing.assert_close(sae.encode(a), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sae.frame.lift(expected), expected @ plain.write, rtol=1e-4, atol=1e-4)
    assert 0 < float((expected != 0).float().mean()) < 1


def test_gemma_scope_files_hold_the_same_autoencoder(tmp_path):
    plain, a = Plain("jumprelu", apply_b_dec_to_input=False), rand(5, 40, 6)
    np.savez(tmp_path / "params.npz", **{name: t.numpy() for name, t in plain.w.items()})
    for path in (tmp_path, tmp_path / "params.npz"):
        torch.testing.assert_close(load_sae(path).encode(a), plain.encode(a), rtol=1e-4, atol=1e-4)


# -- edits against the plain hooked forward -----------------------------------------------------------------------


def hooked(net: torch.nn.Sequential, parts: dict[int, tuple[Plain, Tensor]], base: Tensor, source: Tensor) -> Tensor:
    """A clean source run, then a base run in which the features of each hooked layer are swapped."""
    clean, hooks = {}, []
    for at in parts:
        hooks.append(net[at].register_forward_hook(lambda _, __, out, at=at: clean.__setitem__(at, out)))
    net(source)
    for hook in hooks:
        hook.remove()
    for at, (plain, gains) in parts.items():

        def swap(_: object, __: object, a: Tensor, plain: Plain = plain, gains: Tensor = gains, at: int = at) -> Tensor:
            return a + (gains * (plain.encode(clean[at]) - plain.encode(a))) @ plain.write

        hooks.append(net[at].register_forward_hook(swap))
    outputs = net(base)
    for hook in hooks:
        hook.remove()
    return outputs


@plains
@pytest.mark.parametrize("small", [False, True], ids=["in one piece", "in parts"])
def test_an_edit_equals_the_hooked_computation_at_one_place_and_at_two(make, small, tmp_path, monkeypatch):
    if small:
        monkeypatch.setattr(encoding, "AT_ONCE", 40)
    plain, net, base, source = make(), mlp(4, 6, 6, 3, seed=1000), rand(1, 9, 4), rand(2, 9, 4)
    sae = loaded(plain, tmp_path)
    one = torch.eye(11)  # one feature each: read and written by itself
    gains = torch.cat([one, 2 * rand(3, 4, 11).relu(), torch.ones(1, 11), torch.zeros(1, 11)])
    later = gains.flip(0)
    for subject in (MLPSubject(net), hooked_subject(net)):
        [recording] = record_pairs(subject, (base, source))
        places = subject.places
        first = respond(recording, [EditBatch(places[0], sae.frame, gains)])
        both = respond(recording, [EditBatch(places[k], sae.frame, g) for k, g in enumerate((gains, later))])
        with torch.no_grad():
            for v in range(len(gains)):
                expected = hooked(net, {1: (plain, gains[v])}, base, source)
                torch.testing.assert_close(first[v], expected, rtol=1e-4, atol=1e-4)
                expected = hooked(net, {1: (plain, gains[v]), 3: (plain, later[v])}, base, source)
                torch.testing.assert_close(both[v], expected, rtol=1e-4, atol=1e-4)
    assert (first[:11] - net(base)).abs().amax(dim=(1, 2)).gt(1e-3).any()


@plains
def test_some_features_of_a_frame_are_read_as_in_the_whole(make, tmp_path):
    """Features that are left out still compete with those that stay."""
    plain, a, some = make(), rand(5, 40, 6), torch.tensor([9, 2, 4, 7])
    frame = loaded(plain, tmp_path).frame.only(some)
    torch.testing.assert_close(frame.coordinates(a), plain.encode(a)[:, some], rtol=1e-4, atol=1e-4)
    fewer = frame.only(torch.tensor([3, 0]))
    torch.testing.assert_close(fewer.coordinates(a), plain.encode(a)[:, [7, 9]], rtol=1e-4, atol=1e-4)
    assert fewer.encoder.features.tolist() == [7, 9]


def test_gains_have_gradients_where_they_are_zero():
    plain, net = Plain("standard", seed=1010), mlp(4, 6, 6, 3, seed=1000)
    sae = SAE.of(plain.w["W_enc"], plain.w["W_dec"], plain.w["b_enc"], plain.w["b_dec"])
    [recording] = record_pairs(MLPSubject(net), (rand(1, 9, 4), rand(2, 9, 4)))
    place, step = recording.subject.places[0], 1e-2

    def total(gains: Tensor) -> Tensor:
        return resume_edited(recording, [EditBatch(place, sae.frame, gains)]).sum(dim=(1, 2))

    gains = torch.zeros(1, 11, requires_grad=True)
    [slope] = torch.autograd.grad(total(gains).sum(), gains)
    differences = (total(step * torch.eye(11)) - total(-step * torch.eye(11))) / (2 * step)
    torch.testing.assert_close(slope[0], differences, rtol=1e-2, atol=1e-3)
    assert slope.abs().max() > 0.1


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_an_edit_in_a_language_model_equals_the_plain_hooked_forward(family, tmp_path):
    decoders = pytest.importorskip("decoders")
    plain = Plain("topk", d=decoders.WIDTH, size=30, seed=1020, k=8)
    sae = loaded(plain, tmp_path)
    model = decoders.network(family)
    recording = decoders.recorded(model)
    place = recording.subject.place("block_output.1")
    gains = torch.stack([torch.ones(30), torch.eye(30)[int(plain.encode(recording.source_at(place))[0].argmax())]])
    found = respond(recording, [EditBatch(place, sae.frame, gains)])
    for v in range(len(gains)):
        for t, row in enumerate(decoders.BASE):
            taken = plain.encode(recording.source_at(place)[t])
            edit = {place.name: lambda a, v=v, s=taken: a + (gains[v] * (s - plain.encode(a))) @ plain.write}
            with torch.no_grad():
                expected = decoders.as_answers(decoders.plain(model, row, edit))
            assert decoders.relative(found[v, t], expected) < 1e-4


# -- a planted dictionary -----------------------------------------------------------------------------------------


def dictionary(planted: Planted, seed: int, **options: object) -> SAE:
    """Features 3v .. 3v + 2 are the corners of variable v's triangle at `layer1`; 20 more point anywhere."""
    rotation = planted.subject.net[0].weight.detach()  # every input's corners, one column per value
    spare = torch.nn.functional.normalize(rand(seed, 8, 20), dim=0)
    directions = torch.cat([rotation, spare], dim=1)
    bias = torch.cat([torch.zeros(12), torch.full((20,), -1.5)])
    write = torch.cat([rotation, 0.3 * spare], dim=1).T
    return SAE.of(directions, write, bias, torch.zeros(8), **options)


@pytest.mark.parametrize("seed", [1000, 1001])
@pytest.mark.parametrize("kind", ["relu", "jumprelu", "topk"])
def test_plot_ranks_a_variables_own_features_first_and_its_handle_is_always_right(seed, kind, tmp_path):
    options = {"relu": {}, "jumprelu": {"threshold": torch.full((32,), 0.2)}, "topk": {"k": 8}}[kind]
    planted = planted_plane(seed)
    sae = dictionary(planted, seed, **options)
    fit, calibration, fresh = record(planted.subject, *planted.banks(240, 240, 240, seed=seed))
    family = sae_features(sae, place="layer1")(fit, planted.subject.places)
    [coupling] = couple(
        measure_signatures(fit, family, READOUT), Transport("uot-one-sided", (0.05,), (1.0,), scale="median")
    )
    for v, first in (("p", 0), ("q", 3)):
        names = {f"layer1.sae[{first + k}]" for k in range(3)}
        assert {family.sites[j].name for j in coupling.ranking(v)[:3]} == names
        search = Search((1, 2, 3, 4), (1.0, 2.0, 3.0))
        handle = calibrate(calibration, [Candidate(family, coupling)], v, search, READOUT).handle
        assert correct(fresh, handle, READOUT).all()
        assert set(handle.edits[0].frame.encoder.features.tolist()) <= {first, first + 1, first + 2}
        handle.save(tmp_path / "h.safetensors")
        again = Handle.load(tmp_path / "h.safetensors", planted.subject)
        inputs = planted.subject, fresh.bank.base, fresh.bank.source
        assert torch.equal(again.apply(*inputs), handle.apply(*inputs))
        assert again.size == handle.size
        assert (again.edits[0].frame.encoder.rivals is None) == (kind != "topk")


def test_the_menu_keeps_the_features_that_can_matter():
    planted = planted_plane(1000)
    sae = dictionary(planted, 1000)
    [fit] = record(planted.subject, *planted.banks(240))
    places = planted.subject.places
    differs = (sae.encode(fit.base_at(places[0])) - sae.encode(fit.source_at(places[0]))).abs()
    active = (differs.amax(dim=0) > 0).nonzero().flatten().tolist()
    assert 12 < len(active) < 32

    def kept(keep: object) -> list[int]:
        family = sae_features(sae, "layer1", keep)(fit, places)
        assert [s.directions for s in family.sites] == [(j,) for j in range(len(family))]
        assert family.places == [places[0]]
        return family.frames["layer1"].encoder.features.tolist()

    assert kept("active") == active
    assert kept("all") == list(range(32))
    assert kept([30, 2]) == [30, 2]
    moved = (differs.sum(dim=0) * sae.frame.write.norm(dim=0)).topk(13).indices.sort().values
    assert kept(13) == moved.tolist()
    assert kept(99) == active


def test_an_autoencoder_of_another_place_is_told_by_what_it_explains():
    planted = planted_plane(1000)
    [fit] = record(planted.subject, *planted.banks(60))
    a = fit.base_at(planted.subject.places[0])
    assert dictionary(planted, 1000, k=4).explained(a) == pytest.approx(1, abs=1e-4)
    other = dictionary(planted_plane(1001), 1000)
    assert other.explained(a) < 0.95
    far = SAE(other.frame, other.offset + 10, "")
    with pytest.warns(PlotWarning, match="layer1 worse than their mean"):
        sae_features(far, "layer1")(fit, planted.subject.places)


def test_the_place_of_a_saved_autoencoder_is_read_off_its_hook(tmp_path):
    for hook, place in (("blocks.3.hook_resid_post", "block_output.3"), ("blocks.3.hook_resid_pre", "block_output.2")):
        for config in ({"hook_name": hook}, {"metadata": {"hook_name": hook}}):
            assert load_sae(Plain("standard", **config).save(tmp_path)).place == place


# -- what is refused ----------------------------------------------------------------------------------------------

CONFIGS = {
    "architecture": ({"architecture": "transcoder"}, ["transcoder", "standard, jumprelu, topk, gated"]),
    "activation": ({"activation_fn": "tanh-relu"}, ["tanh-relu", "relu, topk"]),
    "normalisation": ({"normalize_activations": "layer_norm"}, ["layer_norm", "expected_average_only_in"]),
    "no scale": ({"normalize_activations": "expected_average_only_in"}, ["scale=", "None"]),
    "heads": ({"reshape_activations": "hook_z"}, ["hook_z"]),
    "k": ({"architecture": "topk"}, ["whole number k", "None"]),
    "k too large": ({"architecture": "topk", "k": 12}, ["11 features", "12"]),
    "width": ({"d_in": 7}, ["d_in = 7", "(6, 11)"]),
    "missing tensor": ({"architecture": "jumprelu"}, ["lacks threshold"]),
    "not an object": ([1, 2], ["JSON object", "list"]),
}


@pytest.mark.parametrize(("config", "words"), CONFIGS.values(), ids=CONFIGS)
def test_settings_that_would_change_results_are_refused_by_name(config, words, tmp_path):
    plain = Plain("standard")
    plain.config = {**plain.config, **config} if isinstance(config, dict) else config
    assert_refused(lambda: load_sae(plain.save(tmp_path)), [str(tmp_path), *words])


TENSORS = {
    "NaN": ("W_dec", torch.full((11, 6), torch.nan), ["W_dec", "finite"]),
    "integers": ("b_enc", torch.zeros(11, dtype=torch.int64), ["b_enc", "int64"]),
    "shape": ("b_dec", torch.zeros(5), ["b_dec", "(5,)", "(6,)"]),
    "transposed": ("W_dec", torch.zeros(6, 11), ["W_dec", "(6, 11)", "(11, 6)"]),
    "a vector": ("W_enc", torch.zeros(6), ["W_enc", "(6,)"]),
    "empty": ("W_enc", torch.zeros(6, 0), ["W_enc", "(6, 0)"]),
    "rescaled": ("scaling_factor", torch.full((11,), 2.0), ["scaling_factor"]),
}


@pytest.mark.parametrize(("name", "tensor", "words"), TENSORS.values(), ids=TENSORS)
def test_weights_that_do_not_fit_are_refused(name, tensor, words, tmp_path):
    plain = Plain("standard")
    plain.config = {"architecture": "standard"}
    plain.w[name] = tensor
    assert_refused(lambda: load_sae(plain.save(tmp_path)), [str(tmp_path), *words])


def write_npy(path: Path, header: dict, data: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive, archive.open("W_enc.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(data)


def test_damaged_files_are_refused_without_running_or_unpickling_them(tmp_path):
    path = Plain("standard").save(tmp_path / "sae")
    for part in ("cfg.json", "sae_weights.safetensors"):
        whole = (path / part).read_bytes()
        for damage in (whole[: len(whole) // 2], b"\x00" * 50, b""):
            (path / part).write_bytes(damage)
            assert_refused(lambda: load_sae(path), [part])
        (path / part).unlink()
        assert_refused(lambda: load_sae(path), ["no ", part])
        (path / part).write_bytes(whole)
    npz = tmp_path / "params.npz"
    huge = {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 1 << 10)}
    pickled = {"descr": "|O", "fortran_order": False, "shape": (1,)}
    for attempt in (
        lambda: npz.write_bytes(b"no archive"),
        lambda: write_npy(npz, huge, b"1234"),
        lambda: write_npy(npz, pickled, b"cos\nsystem\n(S'true'\ntR."),
        lambda: np.savez(npz, W_enc=np.array([{}], dtype=object)),
    ):
        attempt()
        assert_refused(lambda: load_sae(npz), ["params.npz", "not a readable"])
    np.savez(npz, W_enc=np.zeros((2, 3), dtype=np.float32))
    assert_refused(lambda: load_sae(npz), ["params.npz", "lacks W_dec"])
    assert_refused(lambda: load_sae(tmp_path / "nothing"), ["nothing", "cfg.json"])


def test_menus_that_fit_nothing_are_refused():
    planted = planted_plane(1000)
    sae = dictionary(planted, 1000)
    [fit] = record(planted.subject, *planted.banks(60))
    first, second = planted.subject.places
    assert_refused(lambda: sae_features(sae), ["does not say", "place="])
    assert_refused(lambda: sae_features(sae, "layer1", "some"), ["'some'", "active, all"])
    assert_refused(lambda: sae_features(sae, "layer1", 0), ["at least one"])
    assert_refused(lambda: sae_features({"layer1": sae}, "layer1"), ["not both"])
    assert_refused(lambda: sae_features(sae, "layer1", [32])(fit, [first]), ["0..31"])
    assert_refused(lambda: sae_features(sae, "layer1", [1, 1])(fit, [first]), ["once"])
    assert_refused(lambda: sae_features(sae, "layer1")(fit, [second]), ["layer1", "layer2"])
    assert_refused(lambda: sae_features(sae, "layer2")(fit, [second]), ["width 8", "width 9"])
    silent = SAE.of(torch.zeros(8, 3), torch.zeros(3, 8), torch.zeros(3), torch.zeros(8))
    assert_refused(lambda: sae_features(silent, "layer1")(fit, [first]), ["No feature"])


def test_what_needs_a_linear_frame_says_so():
    frame = dictionary(planted_plane(1000), 1000).frame
    assert_refused(lambda: frame.compose(Frame.orthonormal(torch.eye(32)[:, :2])), ["encoder", "TrainMask"])
    assert_refused(lambda: Frame.stack([frame, frame]), ["encoder", "gains"])
    assert_refused(lambda: Frame.encoded(frame.read, frame.write[:, :2], frame.encoder), ["(8, 32)", "(8, 2)"])
    assert_refused(
        lambda: SAE.of(*[torch.ones(1, 1)] * 2, *[torch.ones(1)] * 2, threshold=torch.ones(1), k=1), ["both"]
    )


# -- handle files -------------------------------------------------------------------------------------------------

DAMAGES = {
    "no bias": lambda tensors, header: tensors.pop("0.bias"),
    "NaN bias": lambda tensors, header: tensors["0.bias"].fill_(math.nan),
    "short bias": lambda tensors, header: tensors.update({"0.bias": torch.zeros(1)}),
    "float features": lambda tensors, header: tensors.update({"0.features": torch.zeros(2)}),
    "wide rivals": lambda tensors, header: tensors.update({"0.rivals": torch.zeros(9, 30)}),
    "rivals alone": lambda tensors, header: tensors.pop("0.rival_bias"),
    "k is a word": lambda tensors, header: header["edits"][0]["encoder"].update({"k": "all"}),
    "k is zero": lambda tensors, header: header["edits"][0]["encoder"].update({"k": 0}),
    "no write": lambda tensors, header: tensors.pop("0.write"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_encoder_in_a_handle_is_refused(damage, tmp_path):
    from safetensors import safe_open

    planted, path = planted_plane(1000), tmp_path / "h.safetensors"
    frame = dictionary(planted, 1000, k=8).frame.only(torch.tensor([3, 5]))
    Handle("p", (Edit(planted.subject.places[0], frame, torch.ones(2)),), "x").save(path)
    Handle.load(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["plot_ot"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    assert header["format"] == "plot-ot handle 2"
    damage(tensors, header)
    save_file(tensors, path, metadata={"plot_ot": json.dumps(header)})
    with pytest.raises(PlotError, match=r"h\.safetensors is not a readable"):
        Handle.load(path)


def test_a_handle_that_takes_no_feature_does_nothing():
    planted = planted_plane(1000)
    [fit] = record(planted.subject, *planted.banks(60))
    place = planted.subject.places[0]
    edit = EditBatch(place, dictionary(planted, 1000).frame, torch.zeros(1, 32))
    handle = handle_from_edits("p", [edit], 0, planted.subject, {})
    assert handle.size == 0
    found = handle.apply(planted.subject, fit.bank.base, fit.bank.source)
    torch.testing.assert_close(found, fit.base_outputs)
