"""Figures: files from a run directory, showing the run's numbers, whatever is missing from it; and causal graphs."""

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.text import Text

from plot_ot.abstract import graph
from plot_ot.abstract.causal_model import CausalModel, Mechanism
from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.files.run_directory import RunDirectory
from plot_ot.files.run_layout import handle_path
from plot_ot.files.run_reading import read_run
from plot_ot.files.seals import digest, sealed
from plot_ot.handles import Edit, Handle
from plot_ot.report import figures, handle_figure, style
from plot_ot.report.figures import draw_figures
from plot_ot.subjects import Place

NAMES = ("accuracy", "epsilon", "handles", "layers", "runtime", "sizes", "summary")
VARIABLES = ("z_$a", "z_$b")  # a dollar sign must not start a formula
PLACES = (Place("layer1", 4, 1), Place("layer2", 4, 2))
GAINS = torch.tensor([0.0, 0.5, 2.0, 0.0], dtype=torch.float64)
ROTATION = torch.linalg.qr(torch.arange(16.0).reshape(4, 4).cos())[0][:, :2]
PLAN = [[0.05, 0.1, 0.15, 0.0, 0.0, 0.2, 0.0, 0.0], [0.2, 0.0, 0.0, 0.1, 0.1, 0.0, 0.05, 0.05]]
SITES = [f"{p.name}[{k}]" for p in PLACES for k in range(4)]


def handle(method, variable):
    if method == "das":
        edit, chosen = Edit(PLACES[1], Frame.orthonormal(ROTATION, "das"), torch.ones(2)), {"k": 2, "support": "layer2"}
    else:
        edit, chosen = Edit(PLACES[0], Frame.identity(4), GAINS), {"K": 2, "strength": 2.5, "epsilon": 4.0}
        chosen |= {"beta": None, "support": "layer1"}
    return Handle(variable, (edit,), "a network", {**chosen, "by_support": {"layer1": 0.9, "layer2": 0.7, "all": None}})


def unit(seed, method):
    """What a study writes for one method, with numbers that depend on the seed."""
    key = {"task": "heq", "subject": "mlp", "seed": seed, "method": method}
    banks = [(v, bank) for v in VARIABLES for bank in ("sensitivity", "invariance")]
    score = {"accuracy": 0.9 + 0.02 * seed, "interval": [0.85, 0.99], "full_patch": 0.5}
    found: dict = {"records": [{**key, "variable": v, "bank": bank, **score} for v, bank in banks]}
    if method in ("no-edit", "copy-source"):
        return found
    own = {v: handle(method, v) for v in VARIABLES}
    found["selection"] = [
        {**key, "variable": v, "size": h.size, "places": h.places, "chosen": dict(h.chosen)} for v, h in own.items()
    ]
    parts = {"recording": 0.25, "calibration": 1.0 + seed, "test": 0.001}
    found["runtimes"] = [{**key, "seconds": sum(parts.values()), "parts": parts}]
    if method == "plot":
        coupling = {"variables": list(VARIABLES), "sites": SITES, "plan": PLAN, "kind": "eot", "epsilon": 4.0}
        coupling |= {
            "beta": None,
            "scale": "none",
            "flags": [{"kind": "saturated", "detail": "2, 2 sites tie for the top"}],
        }
        found["couplings"] = [{**key, **coupling}]
        flags = {0.01: [{"kind": "not converged"}], 0.1: [{"kind": "saturated"}], 1.0: []}
        sweep = {"parameter": "epsilon", "accuracy": 0.9 + 0.02 * seed, "calibration": 0.97}
        found["sweeps"] = [{**key, **sweep, "value": e, "flags": f} for e, f in flags.items()]
    return found


def make_run(path, methods=("plot", "das"), seeds=(1, 2)):
    run = RunDirectory.open(path, {"task": "heq", "methods": list(methods), "seeds": list(seeds)}, {})
    for seed in seeds:
        for method in (*methods, "no-edit", "copy-source"):
            made = [handle(method, v) for v in VARIABLES] if method in methods else []
            run.finish(seed, method, unit(seed, method), made)
    run.finish(99, "failed", {"failures": [{"task": "heq", "seed": 99, "reason": "not trained"}]})
    run.compile(methods)
    return run


def drawn(run, name):
    """A figure without writing it."""
    with style.look():
        return getattr(figures, f"draw_{name}")(read_run(run.path))


def words(figure):
    return " | ".join(t.get_text() for t in figure.findobj(Text))


# -- files ------------------------------------------------------------------------------------------------------------


def test_every_figure_is_written_as_png_and_pdf_at_the_papers_widths(tmp_path):
    run = make_run(tmp_path / "run")
    (run.path / "figures").mkdir()
    (run.path / "figures" / "epsilon.png").write_bytes(b"an old figure")
    draw_figures(read_run(run.path))
    files = {p.name: p.read_bytes() for p in (run.path / "figures").iterdir()}
    assert sorted(files) == sorted(f"{n}.{kind}" for n in NAMES for kind in ("png", "pdf"))
    for name, data in files.items():
        if name.endswith("png"):
            assert data.startswith(b"\x89PNG\r\n\x1a\n"), name
            assert int.from_bytes(data[16:20], "big") in (round(3.3 * 200), round(6.75 * 200)), name
        else:
            assert data.startswith(b"%PDF"), name
            assert b"/FontFile2" in data, f"{name}: fonts are not embedded"


def test_an_empty_run_draws_nothing_and_removes_old_figures(tmp_path):
    run = make_run(tmp_path / "run", methods=(), seeds=())
    (run.path / "figures").mkdir()
    (run.path / "figures" / "handles.pdf").write_bytes(b"an old figure")
    (run.path / "figures" / "mine.pdf").write_bytes(b"not ours")
    draw_figures(read_run(run.path))
    assert [p.name for p in (run.path / "figures").iterdir()] == ["mine.pdf"]


def test_lists_and_couplings_that_are_not_there_leave_out_their_figures_only(tmp_path):
    run = make_run(tmp_path / "run")
    results = json.loads((run.path / "results.json").read_text())
    fewer = {k: results[k] for k in ("task", "units", "selection")} | {"couplings": digest([])}
    (run.path / "results.json").write_text(json.dumps(sealed(fewer)))
    (run.path / "couplings.json").unlink()
    left = {name for name in NAMES if drawn(run, name) is not None}
    assert left == {"handles", "sizes", "layers"}


def test_a_damaged_handle_is_an_error_that_names_the_file(tmp_path):
    run = make_run(tmp_path / "run")
    path = handle_path(run.path, 1, "das", VARIABLES[1])
    path.write_bytes(b"not a handle")
    with pytest.raises(PlotError, match=path.name):
        drawn(run, "handles")


# -- what they show ---------------------------------------------------------------------------------------------------


def grids(figure):
    """The heatmaps of the handles figure, row by row, as [variable][place, neuron]."""
    meshes = [ax.findobj(QuadMesh)[0] for ax in figure.subfigs[0].axes if ax.get_label() != "<colorbar>"]
    return [np.ma.filled(m.get_array(), np.nan).reshape(2, 4) for m in meshes]


def test_the_heatmaps_are_coupling_rows_gains_row_norms_and_swapped_coordinates(tmp_path):
    figure = drawn(make_run(tmp_path / "run"), "handles")
    before_a, before_b, after, _, norms, _, marked, _ = grids(figure)
    np.testing.assert_allclose(before_a, np.reshape(PLAN[0], (2, 4)) / 0.2)
    np.testing.assert_allclose(before_b, np.reshape(PLAN[1], (2, 4)) / 0.2)
    np.testing.assert_allclose(after, [[0, 0.25, 1, 0], [0, 0, 0, 0]])
    rows = ROTATION.norm(dim=1).numpy()
    np.testing.assert_allclose(norms, [np.zeros(4), rows / rows.max()], rtol=1e-6)
    np.testing.assert_allclose(marked, [[0, 0, 0, 0], [1, 1, 0, 0]])
    said = words(figure)
    for expected in (*VARIABLES, "K = 2, λ = 2.5", "k = 2", "ε = 4", "0.920", "2.25", "Seed 1", "saturated"):
        assert expected in said, expected


def test_places_stand_in_forward_order_however_a_search_proposed_them():
    """The blocks of a language model stood as transport had ranked them."""
    noted = [{"name": f"block.{k}", "width": 4} for k in range(12)]
    data = SimpleNamespace(results={"notes": [{"places": noted}]})
    found = figures.in_forward_order(data, ["block.11", "all", "block.9", "elsewhere", "block.2", "block.9"])
    assert found == ["block.2", "block.9", "block.11", "elsewhere", "all"]


@pytest.mark.parametrize(("methods", "panels", "missing"), [(("plot",), 4, "DAS"), (("das",), 4, "PLOT")])
def test_without_a_method_its_panels_are_left_out_and_the_caption_says_so(tmp_path, methods, panels, missing):
    run = make_run(tmp_path / "run", methods)
    figure = drawn(run, "handles")
    assert len(grids(figure)) == panels
    assert f"{missing} is missing" in words(figure)
    others = [name for name in NAMES if name != "epsilon" or "plot" in methods]
    assert all(drawn(run, name) is not None for name in others)


def test_heatmaps_take_the_first_seed_with_all_handles_or_what_there_is(tmp_path):
    run = make_run(tmp_path / "run")
    handle_path(run.path, 1, "das", VARIABLES[0]).unlink()
    assert "Seed 2" in words(drawn(run, "handles"))
    handle_path(run.path, 2, "das", VARIABLES[0]).unlink()
    assert "DAS is missing" in words(drawn(run, "handles"))
    for path in (run.path / "handles").rglob("*.safetensors"):
        path.unlink()
    assert drawn(run, "handles") is None


def test_runtime_stacks_the_parts_and_marks_the_published_seconds(tmp_path):
    run = make_run(tmp_path / "run")
    left, right = drawn(run, "runtime").axes
    ends = {round(bar.get_x() + bar.get_width(), 6) for bar in left.patches}
    assert {0.25, 2.75, 2.751} == ends  # recording, + mean calibration, + everything below 1 %
    points = {line.get_label(): line.get_xdata().tolist() for line in right.lines}
    assert points["published, other machine"] == [4.4, 131.0]
    results = json.loads((run.path / "results.json").read_text())
    (run.path / "results.json").write_text(json.dumps(sealed({**results, "task": "something else"})))
    assert "published" not in words(drawn(run, "runtime"))


def test_epsilon_marks_couplings_that_saturate_or_do_not_converge(tmp_path):
    [ax] = drawn(make_run(tmp_path / "run"), "epsilon").axes
    marks = {line.get_label(): line.get_xdata().tolist() for line in ax.lines if line.get_label() in style.MARKS}
    assert marks == {"not converged": [0.01], "saturated (ties)": [0.1], "sound coupling": [1.0]}
    assert "cost scale: none" in ax.get_xlabel()


def test_accuracy_shows_controls_and_spread_over_seeds_or_the_interval_of_one(tmp_path):
    def whiskers(run):
        lines = [c.get_segments()[0] for c in drawn(run, "accuracy").axes[0].collections if len(c.get_segments()) == 1]
        return lines[0][:, 0].tolist()

    two = make_run(tmp_path / "two")
    assert "copy-source 0.930" in words(drawn(two, "accuracy"))
    assert "1 failed" in words(drawn(two, "accuracy"))
    assert whiskers(two) == pytest.approx([0.92, 0.94])
    assert whiskers(make_run(tmp_path / "one", seeds=(1,))) == pytest.approx([0.85, 0.99])


def marked(ax, label):
    """Where the line of that label has its points."""
    return next(np.transpose(line.get_data()).tolist() for line in ax.lines if line.get_label() == label)


def test_the_summary_shows_accuracy_against_seconds_with_the_published_points_marked_as_such(tmp_path):
    run = make_run(tmp_path / "run")
    figure = drawn(run, "summary")
    ax = figure.subfigs[0].axes[0]
    mine = [line.get_xydata()[0].tolist() for line in ax.lines if line.get_marker() == "o"]
    assert mine == [pytest.approx([2.751, 0.93])] * 2
    published = [line.get_xydata()[0].tolist() for line in ax.lines if line.get_marker() == "D"]
    assert published == [[4.4, 0.991], [131.0, 0.995]]
    said = words(figure)
    for expected in ("published, other machine", "0.991 ± 0.008", "uniform banks", "1, 2", "no-edit 0.930"):
        assert expected in said, expected
    results = json.loads((run.path / "results.json").read_text())
    (run.path / "results.json").write_text(json.dumps(sealed({**results, "task": "something else"})))
    assert "ublished" not in words(drawn(run, "summary")) + words(drawn(run, "accuracy"))


def test_accuracy_marks_what_the_paper_published_in_the_rows_of_its_methods(tmp_path):
    wide = drawn(make_run(tmp_path / "run"), "accuracy").axes[0]
    assert marked(wide, "published") == [[0.991, 0.0], [0.995, 1.0]]


# -- handles of many variables, each in its own basis -----------------------------------------------------------------

CARRIES = ("C1", "C2", "C3")
PCA = torch.linalg.qr(torch.arange(16.0).reshape(4, 4).sin())[0][:, :2]
OBLIQUE = torch.tensor([[3.0], [0.0], [4.0], [0.0]])
ROWS = {  # method -> (frame, gains, chosen, coupling's sites)
    "stage-a": (Frame.identity(4), torch.ones(4), {}, [p.name for p in PLACES]),
    "coordinates": (Frame.identity(4), GAINS, {"K": 2, "sites": ["layer1[0:2]", "layer1[2:4]"]}, None),
    "components": (
        Frame.orthonormal(PCA, "pca"),
        torch.tensor([2.0, 0.5]),
        {"K": 1, "sites": ["layer1.pc[0:2]"]},
        None,
    ),
    "again": (Frame.identity(4), GAINS, {"K": 2, "sites": ["layer1[0:2]", "layer1[2:4]"]}, None),
    "formula": (Frame.oblique(torch.ones(4, 1), OBLIQUE, "closed"), torch.ones(1), {"strength": 1.5}, None),
    "guided": (Frame.orthonormal(ROTATION, "das"), torch.ones(2), {"k": 2}, None),
    "between": (Frame.orthonormal(ROTATION, "das"), torch.ones(2), {"k": 2}, None),
    "full": (Frame.orthonormal(ROTATION, "das"), torch.ones(2), {"k": 2}, None),
    "oblique": (Frame.oblique(torch.ones(4, 1), OBLIQUE, "das-oblique"), torch.ones(1), {"k": 1}, None),
}


def make_wide_run(path):
    """Three variables; a coarse stage, transport in two bases, a closed form, and several kinds of DAS."""
    run = RunDirectory.open(path, {"task": "another", "methods": list(ROWS), "seeds": [7]}, {})
    for method, (frame, gains, chosen, sites) in ROWS.items():
        key = {"task": "another", "subject": "net", "seed": 7, "method": method}
        chosen = {"epsilon": 0.1, "beta": None, "strength": 2.0} | chosen if "K" in chosen else chosen
        handles = {v: Handle(v, (Edit(PLACES[0], frame, gains),), "a network", chosen) for v in CARRIES}
        for v, h in handles.items():
            h.save(handle_path(run.path, 7, method, v))
        found: dict = {
            "selection": [
                {**key, "variable": v, "size": h.size, "places": h.places, "chosen": dict(h.chosen)}
                for v, h in handles.items()
            ],
            "records": [
                {**key, "variable": v, "bank": bank, "accuracy": accuracy, "interval": [0.5, 1.0], "full_patch": 0.7}
                for v in CARRIES
                for bank, accuracy in (("sensitivity", 0.75), ("invariance", 0.875))
            ],
            "runtimes": [{**key, "seconds": 0.5, "parts": {"recording": 0.5}}],
        }
        names = sites or chosen.get("sites")
        if names:
            plan = [[1 / len(CARRIES) / len(names)] * len(names)] * len(CARRIES)
            coupling = {"variables": list(CARRIES), "sites": names, "plan": plan, "kind": "eot", "epsilon": 0.1}
            found["couplings"] = [{**key, **coupling, "beta": None, "scale": "none", "flags": []}]
        run.finish(7, method, found)
    run.compile(list(ROWS))
    return run


def test_many_variables_are_rows_and_every_method_is_shown_in_its_own_basis(tmp_path):
    figure = drawn(make_wide_run(tmp_path / "run"), "handles")
    axes = [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]
    assert len(axes) == 15
    titles = [t.get_text() for ax in axes[:5] for t in ax.texts]
    assert titles == ["coordinates", "components", "formula", "guided", "full"]
    assert [ax.get_ylabel() for ax in axes[::5]] == list(CARRIES)
    meshes = [np.ma.filled(ax.findobj(QuadMesh)[0].get_array(), np.nan).reshape(2, 4) for ax in axes[5:10]]
    rows = ROTATION.norm(dim=1).numpy()
    first = [[0, 0.25, 1, 0], [1, 0.25, np.nan, np.nan], [0.75, 0, 1, 0], rows / rows.max(), rows / rows.max()]
    for mesh, expected in zip(meshes, first, strict=True):
        np.testing.assert_allclose(mesh, [expected, np.zeros(4)], rtol=1e-6)  # nothing at the second place
    assert [ax.get_xlabel() for ax in axes[10:]] == ["neuron", "principal component", "neuron", "neuron", "neuron"]
    said = words(figure)
    for expected in ("Seed 7", "K = 2, λ = 2", "1 of 4, λ = 1.5", "k = 2", "0.812", "written along"):
        assert expected in said, expected


def test_masses_of_overlapping_sites_add_up_in_the_coupling_that_the_handle_is_from(tmp_path):
    data = read_run(make_wide_run(tmp_path / "run").path)
    own = {"seed": 7, "method": "m", "variables": ["C1"], "epsilon": 0.1, "beta": None}
    nested = {**own, "sites": ["layer1.pc[0:1]", "layer1.pc[0:3]"], "plan": [[0.5, 0.25]]}
    finer = {**own, "sites": ["layer1.pc[0:1]", "layer1.pc[1:2]"], "plan": [[1.0, 1.0]]}
    chosen = {"epsilon": 0.1, "beta": None, "sites": ["layer1.pc[0:3]"]}
    handle = Handle("C1", (Edit(PLACES[0], Frame.identity(4), GAINS),), "a network", chosen)
    mass = handle_figure._mass(replace(data, couplings=[nested, finer]), 7, "m", handle, ["layer1", "layer2"])
    np.testing.assert_allclose(mass, [[0.75, 0.25, 0.25, np.nan], [np.nan] * 4])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layer1", ("layer1", slice(None))),
        ("layer1[3]", ("layer1", slice(3, 4))),
        ("layer1.pc[0:4]", ("layer1", slice(0, 4))),
        ("block.output[0:4]", ("block.output", slice(0, 4))),
        ("block.output.band8[4:6]", ("block.output", slice(4, 6))),
    ],
)
def test_a_site_is_read_as_its_place_and_directions_whatever_dots_are_in_the_name(name, expected):
    assert handle_figure._site(name, ["layer1", "block.output"]) == expected


# -- causal graphs ----------------------------------------------------------------------------------------------------


def adder(bits=4):
    """A ripple-carry adder: S_i and C_(i+1) from A_i, B_i and C_i."""
    mechanisms = {}
    for i in range(bits):
        parents = (f"A{i}", f"B{i}", *([f"C{i}"] if i else []))
        mechanisms[f"S{i}"] = Mechanism(parents, lambda *bits: sum(bits) % 2)
        mechanisms[f"C{i + 1}"] = Mechanism(parents, lambda *bits: sum(bits) // 2)
    mechanisms["y"] = Mechanism((f"C{bits}", *(f"S{i}" for i in range(bits))), lambda *bits: torch.stack(bits, 1))
    inputs = [f"{name}{i}" for name in "AB" for i in reversed(range(bits))]
    return CausalModel(inputs, mechanisms, "y", [f"C{i}" for i in range(1, bits)])


def odd_model():
    """An unused input, a variable without parents, one that is read twice, and one after the output."""
    first = lambda *values: values[0]  # noqa: E731
    parents = {"root": (), "y": ("a", "a"), "a long name, with $": ("a", "y")}
    return CausalModel(["a", "unused"], {n: Mechanism(p, first) for n, p in parents.items()}, "y", ["root"])


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".SVG", b"<?xml")])
def test_draw_writes_the_kind_of_file_its_suffix_names_and_the_same_each_time(tmp_path, suffix, start):
    for name in ("one", "two"):
        odd_model().draw(tmp_path / "new directory" / f"{name}{suffix}")
    one, two = ((tmp_path / "new directory" / f"{name}{suffix}").read_bytes() for name in ("one", "two"))
    assert one.startswith(start)
    assert one == two


@pytest.mark.parametrize("name", ["graph.gif", "graph"])
def test_draw_refuses_other_suffixes_and_names_the_legal_ones(tmp_path, name):
    with pytest.raises(PlotError, match=r"graph.*\.png, \.pdf, \.svg"):
        odd_model().draw(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_roles_tell_inputs_variables_to_localize_others_and_the_output():
    roles = {name: graph._role(adder(2), name) for name in ("A0", "C1", "S0", "y")}
    assert roles == {"A0": "input", "C1": "variable", "S0": "other variable", "y": "output"}


@pytest.mark.parametrize("model", [adder(), adder(9), odd_model()])
def test_arrows_point_down_one_layer_at_a_time_and_nodes_never_overlap(model):
    level = graph._levels(model)
    assert all(level[p] < level[n] for n in model.mechanisms for p in model.parents(n))
    chains = graph._chains(model, level)
    layers = graph._layers(model, level, chains)
    width = {n: graph._width(n) for n in level}
    x = graph._columns(layers, graph._neighbours(chains), width)
    depth = {n: k for k, layer in enumerate(layers) for n in layer}
    assert all(depth[b] == depth[a] + 1 for chain in chains for a, b in pairwise(chain))
    for layer in layers:  # waypoints of long arrows keep clear of nodes too
        for a, b in pairwise(layer):
            assert x[b] - x[a] > (width.get(a, 0) + width.get(b, 0)) / 2


@pytest.mark.parametrize(
    ("low", "high", "named"), [(1320, 1800, True), (2, 9, True), (0.5, 20, False), (8, 200, False)]
)
def test_a_logarithmic_axis_always_says_numbers(low, high, named):
    figure = Figure()
    axes = figure.subplots()
    axes.plot([low, high], [0, 1])
    style.log_scale(axes)
    axes.set_xlim(low, high)
    FigureCanvasAgg(figure).draw()
    ticks = (*axes.xaxis.get_major_ticks(), *axes.xaxis.get_minor_ticks())
    seen = [t.label1.get_text() for t in ticks if low <= t.get_loc() <= high]
    assert len([text for text in seen if text]) >= (3 if named else 1)
    assert any(t.label1.get_text() for t in axes.xaxis.get_minor_ticks()) == named
