"""Triplets of MIB and bundles of causalab: read back as their own loaders read them, they give our outputs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from decoders import ANSWERS, BASE, POSITIONS, SOURCE, encode, network, plain, relative, where
from nets import mlp, orthonormal, rand
from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.exchange import from_causalab, from_mib, to_causalab, to_mib
from plot_ot.handles import Edit, Handle
from plot_ot.sites import principal_frame
from plot_ot.subjects import DecoderSubject, MLPSubject, record_pairs

CLOSE = 1e-5


@pytest.fixture(scope="module")
def subject() -> DecoderSubject:
    kinds = ("block_output", "attention_output", "head_output")
    made = DecoderSubject(network("gemma2"), encode, ANSWERS, kinds=kinds, positions=POSITIONS)
    return made.watching(vocabulary=True)


def gains(width: int, *at: int, value: float = 1.0) -> Tensor:
    g = torch.zeros(width)
    g[list(at)] = value
    return g


def some_handle(subject: DecoderSubject, kind: str, name: str = "block_output.1") -> Handle:
    place = subject.place(name)
    d = place.width
    frame, g = {
        "neurons": lambda: (Frame.identity(d), gains(d, 0, 1, 5)),
        "whole": lambda: (Frame.identity(d), torch.ones(d)),
        "strength": lambda: (Frame.identity(d), gains(d, 0, 5, value=2.5)),
        "negative": lambda: (Frame.identity(d), gains(d, 0, 5, value=-1.0)),
        "rotation": lambda: (Frame.orthonormal(orthonormal(1001, d, 3)), torch.ones(3)),
        "square rotation": lambda: (Frame.orthonormal(orthonormal(1001, d, d)), gains(d, *range(d - 1))),
        "soft rotation": lambda: (Frame.orthonormal(orthonormal(1001, d, 3)), torch.tensor([0.5, 1.0, 3.0])),
        "pca": lambda: ((f := principal_frame(record_pairs(subject, (BASE, SOURCE))[0], place)), gains(f.rank, 0, 2)),
        "oblique": lambda: (Frame.oblique(rand(1002, d, 2), rand(1003, d, 2)), torch.ones(2)),
    }[kind]()
    return Handle("z", (Edit(place, frame, g),), subject.identity())


def hooked_outputs(subject: DecoderSubject, name: str, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Logits when the vector at a place becomes change(vector, clean source vector), by plain forward passes."""
    [recording] = record_pairs(subject, (BASE, SOURCE))
    sources = recording.source_at(subject.place(name))
    one = [
        plain(subject.decoder.model, row, {name: lambda a, s=s: change(a, s)}, where(row))
        for row, s in zip(BASE, sources, strict=True)
    ]
    return torch.stack(one).detach()


# -- MIB --------------------------------------------------------------------------------------------------------------


class TheirRotation(nn.Module):
    """The layer that CausalAbstraction rebuilds: pyvene's, behind torch's orthogonal parametrization."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        layers = pytest.importorskip("pyvene.models.layers")
        layer = layers.LowRankRotateLayer(*matrix.shape, init_orth=False)
        layer.weight.data.copy_(matrix)
        self.rotate = nn.utils.parametrizations.orthogonal(layer)


def as_mib_loads(base: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """Their loader: rebuild the module that `model_info` names, load the state strictly, swap the indexed features."""
    halves = [torch.load(f"{base}{suffix}", weights_only=True) for suffix in ("_featurizer", "_inverse_featurizer")]
    info, indices = halves[0]["model_info"], json.loads(Path(f"{base}_indices").read_text())
    assert halves[1]["model_info"]["inverse_featurizer_class"] == info["inverse_featurizer_class"]
    if info["featurizer_class"] == "IdentityFeaturizerModule":
        assert not halves[0]["state_dict"]
        assert not halves[1]["state_dict"]
        forward = backward = torch.eye(info["n_features"])
    else:
        assert info["featurizer_class"] == "SubspaceFeaturizerModule"
        both = [TheirRotation(info["additional_config"]["rotation_matrix"]) for _ in halves]
        for module, half in zip(both, halves, strict=True):
            module.load_state_dict(half["state_dict"], strict=True)
        forward, backward = (m.rotate.weight.detach() for m in both)
        assert forward.shape[1] == info["n_features"]

    def change(base: Tensor, source: Tensor) -> Tensor:
        f, f_source = base @ forward, source @ forward
        error = base - f @ forward.T
        if indices is None:
            f = f_source
        else:
            f[..., indices] = f_source[..., indices]
        return f @ backward.T + error

    return change


@pytest.mark.parametrize("kind", ["neurons", "whole", "rotation", "square rotation", "pca"])
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("block_output.1", "ResidualStream(Layer-1,Token-last_token)"),
        ("block_output.2@early", "ResidualStream(Layer-2,Token-early)"),
        ("head_output.0.3", "AttentionHead(Layer-0,Head-3,Token-last_token)"),
    ],
)
def test_a_triplet_gives_our_outputs_as_mib_loads_it_and_comes_back(subject, kind, name, unit, tmp_path):
    handle = some_handle(subject, kind, name)
    base = to_mib(handle, tmp_path)
    assert base == tmp_path / unit
    assert {p.name for p in tmp_path.iterdir()} == {
        f"{unit}_{s}" for s in ("featurizer", "inverse_featurizer", "indices")
    }
    expected = handle.apply(subject, BASE, SOURCE)
    assert relative(hooked_outputs(subject, name, as_mib_loads(base)), expected) < CLOSE
    back = from_mib(tmp_path, subject, "z")
    assert back.places == [name]
    assert relative(back.apply(subject, BASE, SOURCE), expected) < CLOSE


def test_the_tasks_name_of_the_token_goes_into_the_file_name(subject, tmp_path):
    handle = some_handle(subject, "rotation", "block_output.2@early")
    theirs = "correct_symbol"
    assert to_mib(handle, tmp_path, token=theirs).name == "ResidualStream(Layer-2,Token-correct_symbol)"
    with pytest.raises(PlotError, match=r"Unknown place 'block_output\.2@correct_symbol'"):
        from_mib(tmp_path, subject, "z")
    assert from_mib(tmp_path, subject, "z", place="block_output.2@early").places == handle.places
    for token in ("../up", "a/b", "a,b", "x\n"):
        with pytest.raises(PlotError, match="cannot be part of a file name"):
            to_mib(handle, tmp_path, token=token)


def test_units_of_later_versions_say_which_side_of_the_block(subject, tmp_path):
    base = to_mib(some_handle(subject, "rotation", "block_output.1"), tmp_path)
    for suffix in ("_featurizer", "_inverse_featurizer", "_indices"):
        named = "ResidualStream(Layer-2,block_input,Token-last_token)"
        Path(f"{base}{suffix}").rename(tmp_path / f"{named}{suffix}")
    assert from_mib(tmp_path, subject, "z").places == ["block_output.1"]


def test_one_of_several_triplets_is_named(subject, tmp_path):
    for layer in (1, 2):
        to_mib(some_handle(subject, "rotation", f"block_output.{layer}"), tmp_path)
    with pytest.raises(PlotError, match="has 2 triplets"):
        from_mib(tmp_path, subject, "z")
    unit = "ResidualStream(Layer-2,Token-last_token)"
    assert from_mib(tmp_path, subject, "z", unit=unit).places == ["block_output.2"]
    with pytest.raises(PlotError, match="has 0 triplets"):
        from_mib(tmp_path, subject, "z", unit="../elsewhere")


# -- causalab ---------------------------------------------------------------------------------------------------------


def as_causalab_loads(path: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """A loaded `subspace`: f = Wᵀ a with the rest as error term; a swap puts the source's f in place of the base's."""
    W = load_file(path)["weight"]
    return lambda base, source: (source @ W) @ W.T + (base - (base @ W) @ W.T)


@pytest.mark.parametrize("kind", ["neurons", "strength", "rotation", "soft rotation", "pca"])
@pytest.mark.parametrize("name", ["block_output.1", "attention_output.2@early", "head_output.0.3"])
def test_a_bundle_gives_our_outputs_as_causalab_loads_it_and_comes_back(subject, kind, name, tmp_path):
    handle = some_handle(subject, kind, name)
    to_causalab(handle, tmp_path / "z.safetensors", model_key="tiny/gemma2")
    expected = handle.apply(subject, BASE, SOURCE)
    assert relative(hooked_outputs(subject, name, as_causalab_loads(tmp_path / "z.safetensors")), expected) < CLOSE
    back = from_causalab(tmp_path / "z.safetensors", subject, "z")
    assert back.places == [name]  # its token, too, which the bundle's site does not know
    assert relative(back.apply(subject, BASE, SOURCE), expected) < CLOSE
    assert back.size == handle.size


def test_the_bundle_says_what_causalabs_loader_compares(subject, tmp_path):
    path = tmp_path / "z.safetensors"
    to_causalab(some_handle(subject, "rotation", "head_output.2.1"), path, model_key="tiny/gemma2", model_dtype="bf16")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["site"]) == {"component": "attention_premix", "layers": [2], "head": 1}
    expected = {
        "model_key": "tiny/gemma2",
        "model_dtype": "bf16",
        "k": "3",
        "parametrization": "cayley",
        "dtype": "fp32",
    }
    assert {key: metadata[key] for key in expected} == expected
    assert "model_revision" not in metadata
    assert from_causalab(path, subject, "z").places == ["head_output.2.1"]


def test_an_entry_of_a_sweep_is_named(subject, tmp_path):
    path, site = tmp_path / "z.safetensors", json.dumps({"component": "block_output", "layers": [2]})
    tensors = {f"weight[k={k}]": orthonormal(k, 16, k).contiguous() for k in (2, 4)}
    save_file(tensors, path, metadata={"entries": json.dumps({n: {"slot": "weight", "site": site} for n in tensors})})
    with pytest.raises(PlotError, match="has 2 subspaces"):
        from_causalab(path, subject, "z")
    handle = from_causalab(path, subject, "z", entry="weight[k=4]")
    assert (handle.places, handle.size) == (["block_output.2"], 4)


def test_a_basis_that_is_not_orthogonal_means_what_it_means_there(subject, tmp_path):
    path = tmp_path / "z.safetensors"
    save_file({"weight": rand(1004, 16, 3) / 4}, path)
    with pytest.raises(PlotError, match="name the `place`"):
        from_causalab(path, subject, "z")
    handle = from_causalab(path, subject, "z", place="block_output.1")
    expected = hooked_outputs(subject, "block_output.1", as_causalab_loads(path))
    assert relative(handle.apply(subject, BASE, SOURCE), expected) < CLOSE


# -- what does not fit, and damage ------------------------------------------------------------------------------------

EXPORTS = {
    "mib": to_mib,
    "causalab": lambda handle, path: to_causalab(handle, path / "z.safetensors", model_key="tiny"),
}


@pytest.mark.parametrize(
    ("kind", "export", "match"),
    [
        ("strength", "mib", r"a strength other than 1 \(2\.5\)"),
        ("soft rotation", "mib", r"strengths from 0\.5 to 3"),
        ("oblique", "mib", "oblique"),
        ("oblique", "causalab", "oblique"),
        ("negative", "causalab", r"a strength other than 1 \(-1\)"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(subject, kind, export, match, tmp_path):
    with pytest.raises(PlotError, match=match):
        EXPORTS[export](some_handle(subject, kind), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("export", EXPORTS)
def test_several_places_and_other_networks_are_refused(subject, export, tmp_path):
    edits = tuple(some_handle(subject, "rotation", f"block_output.{k}").edits[0] for k in (0, 1))
    with pytest.raises(PlotError, match=r"one place.*block_output\.0, block_output\.1"):
        EXPORTS[export](Handle("z", edits, subject.identity()), tmp_path)
    net = MLPSubject(mlp(4, 6, 7, 3))
    edit = Edit(net.places[0], Frame.identity(6), torch.ones(6))
    with pytest.raises(PlotError, match="not a place of a language model"):
        EXPORTS[export](Handle("z", (edit,), net.identity()), tmp_path)


def test_mib_knows_no_attention_output(subject, tmp_path):
    with pytest.raises(PlotError, match="residual stream or an attention head"):
        to_mib(some_handle(subject, "rotation", "attention_output.1"), tmp_path)


class Bomb:
    def __init__(self, path: object) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


def saved(change: Callable[[dict, Path], object]) -> Callable[[Path], None]:
    """Damage what a featurizer file holds."""

    def damage(base: Path) -> None:
        held = torch.load(f"{base}_featurizer", weights_only=True)
        torch.save(change(held, base.parent) or held, f"{base}_featurizer")

    return damage


def indices(text: str) -> Callable[[Path], None]:
    return lambda base: Path(f"{base}_indices").write_text(text) and None


ORIGINAL = "rotate.parametrizations.weight.original"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "no featurizer": lambda b: Path(f"{b}_featurizer").unlink(),
    "no inverse": lambda b: Path(f"{b}_inverse_featurizer").unlink(),
    "no indices": lambda b: Path(f"{b}_indices").unlink(),
    "truncated": lambda b: Path(f"{b}_featurizer").write_bytes(Path(f"{b}_featurizer").read_bytes()[:-40]),
    "random bytes": lambda b: Path(f"{b}_featurizer").write_bytes(bytes(range(256))),
    "runs code": saved(lambda held, d: {**held, "x": Bomb(d / "ran")}),
    "another class": saved(lambda held, d: held["model_info"].update(featurizer_class="SAEFeaturizerModule")),
    "no class": saved(lambda held, d: held["model_info"].clear()),
    "a list": saved(lambda held, d: [held]),
    "another rotation": saved(lambda held, d: held["state_dict"].update({ORIGINAL: torch.eye(16)[:, 2:5]})),
    "wrong shape": saved(lambda held, d: held["state_dict"].update({ORIGINAL: torch.eye(5)})),
    "huge shape": saved(lambda held, d: held["state_dict"].update({ORIGINAL: torch.ones(1).expand(1 << 30, 1 << 20)})),
    "huge file": saved(lambda held, d: held.update(more=torch.zeros(1 << 20))),
    "indices are code": indices("__import__('os')"),
    "indices outside": indices("[0, 7]"),
    "indices negative": indices("[-1]"),
    "indices twice": indices("[1, 1]"),
    "indices are words": indices('["a"]'),
    "indices are true": indices("[true]"),
    "indices are lists": indices("[[0]]"),
    "no index": indices("[]"),
    "a number": indices("3"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_and_hostile_triplets_are_refused_in_one_line(subject, damage, tmp_path):
    base = to_mib(some_handle(subject, "rotation"), tmp_path)
    from_mib(tmp_path, subject, "z")
    damage(base)
    with pytest.raises(PlotError) as refusal:
        from_mib(tmp_path, subject, "z")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "ran").exists()


BUNDLES: dict[str, Callable[[Path], object]] = {
    "missing": lambda p: p.unlink(),
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-20]),
    "empty": lambda p: p.write_bytes(b""),
    "a huge header": lambda p: p.write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
    "a directory": lambda p: (p.unlink(), p.mkdir()),
    "no weight": lambda p: save_file({"theta": torch.ones(16)}, p),
    "wrong shape": lambda p: save_file({"weight": torch.ones(5, 2)}, p, {"site": SITE}),
    "a vector": lambda p: save_file({"weight": torch.ones(16)}, p, {"site": SITE}),
    "NaN": lambda p: save_file({"weight": torch.full((16, 2), torch.nan)}, p, {"site": SITE}),
    "whole numbers": lambda p: save_file({"weight": torch.ones(16, 2).long()}, p, {"site": SITE}),
    "a site of words": lambda p: save_file({"weight": torch.ones(16, 2)}, p, {"site": "{"}),
    "a site elsewhere": lambda p: save_file({"weight": torch.ones(16, 2)}, p, {"site": SITE.replace("1", "99")}),
    "entries of a wrong type": lambda p: save_file({"weight": torch.ones(16, 2)}, p, {"site": SITE, "entries": "[[]]"}),
    "layers of a wrong type": lambda p: save_file(
        {"weight": torch.ones(16, 2)}, p, {"site": '{"component": "block_output", "layers": 3}'}
    ),
}
SITE = '{"component": "block_output", "layers": [1]}'


@pytest.mark.parametrize("damage", BUNDLES.values(), ids=BUNDLES)
def test_damaged_bundles_are_refused_in_one_line(subject, damage, tmp_path):
    path = tmp_path / "z.safetensors"
    to_causalab(some_handle(subject, "rotation"), path, model_key="tiny")
    from_causalab(path, subject, "z")
    damage(path)
    with pytest.raises(PlotError) as refusal:
        from_causalab(path, subject, "z")
    assert "\n" not in str(refusal.value)
