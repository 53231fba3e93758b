"""Everything runs on a GPU as on the CPU: on the counterfeit one, which refuses to mix devices and counts waits."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import decoders as d
import half_precision as half
import test_trie as alike
import waits
from counterfeit import counterfeit
from nets import planted_neurons
from plot_ot import Handle, localize
from plot_ot.abstract.banks import Bank
from plot_ot.edits import EditBatch, Frame, respond, resume_edited
from plot_ot.handles import Edit
from plot_ot.judging import bench
from plot_ot.methods import MethodKind
from plot_ot.studies.study import Study
from plot_ot.subjects import DecoderSubject, ModuleSubject, record, record_pairs
from plot_ot.subjects.decoder.pages import NodePages, Pages
from plot_ot.subjects.decoder.vectors import Spilled

KINDS = ("block_output", "attention_output", "mlp_output", "head_output")
SCENES = {
    "named tokens": (
        d.encode,
        torch.arange(6).unsqueeze(1),
        {"positions": d.POSITIONS, "kinds": KINDS, "layers": [1, 3]},
    ),
    "trie": (alike.encode, alike.ROWS, {"positions": {"early": alike.position}}),
    "in files": (alike.encode, alike.ROWS, {"memory": 300_000}),
}


def spread(model: nn.Module, devices: int) -> nn.Module:
    """The model on one GPU, or with the first half of its blocks on one and the rest on the other."""
    if devices == 1:
        return model.to("cuda")
    accelerate = pytest.importorskip("accelerate")
    blocks = next(n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == d.DEPTH)
    trunk = blocks.rpartition(".")[0]
    where = {f"{blocks}.{k}": f"cuda:{int(k >= d.DEPTH // 2)}" for k in range(d.DEPTH)}
    for name, _ in model.get_submodule(trunk).named_children():
        late = "norm" in name or name == "ln_f"
        where.setdefault(f"{trunk}.{name}", f"cuda:{int(late)}") if f"{trunk}.{name}" != blocks else None
    tied = getattr(model.config, "tie_word_embeddings", False)
    for name, _ in model.named_children():
        if not trunk.startswith(name):
            where[name] = "cuda:0" if tied else "cuda:1"
    return accelerate.dispatch_model(model, where, main_device="cuda:0", force_hooks=True)


def responses(model: nn.Module, scene: str) -> list[Tensor]:
    """Recorded outputs, edits at every place, at two together, and a gradient."""
    encode, rows, options = SCENES[scene]
    subject = DecoderSubject(model, encode, d.ANSWERS, **options)
    [recording] = record_pairs(subject, (rows, rows.roll(1, 0)))
    found = [recording.base_outputs]
    gains = torch.tensor([[0.0, 0, 0], [1, 1, 0], [1, 0.5, 2]])
    for place in subject.places:
        frame = Frame.orthonormal(torch.linalg.qr(torch.ones(place.width, 3).tril() - 0.5)[0])
        found.append(respond(recording, [EditBatch(place, frame, gains)]))
    ends = subject.places[0], subject.places[-1]
    found.append(respond(recording, [EditBatch(p, Frame.identity(p.width), torch.ones(2, p.width)) for p in ends]))
    gain = torch.ones(2, ends[0].width, requires_grad=True)
    there = gain.to(subject.device)
    resume_edited(recording, [EditBatch(ends[0], Frame.identity(ends[0].width), there)]).sum().backward()
    return [x.detach().cpu().float() for x in (*found, gain.grad)]


def agree(family: str, scene: str, devices: int, dtype: torch.dtype = torch.float32) -> None:
    expected = responses(d.network(family).to(dtype), scene)
    with counterfeit():
        found = responses(spread(d.network(family).to(dtype), devices), scene)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1  # attention's kernels differ
    for a, b in zip(found, expected, strict=True):
        assert d.relative(a, b) < tolerance


@pytest.mark.parametrize(
    ("family", "scene", "devices"),
    [("llama", "named tokens", 2), ("gpt2", "trie", 2), ("gemma2", "trie", 1), ("llama", "in files", 2)],
)
def test_decoders_record_and_resume_on_gpus(family, scene, devices):
    agree(family, scene, devices)


def test_decoders_in_half_precision_over_two_gpus():
    agree("llama", "trie", 2, torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("family", [*d.FAMILIES, *d.NAMED, *d.UNNAMED])
def test_every_family_records_and_resumes_on_gpus(family, scene, devices, dtype):
    agree(family, scene, devices, dtype)


# -- methods and verdicts --------------------------------------------------------------------------------------------


def study_of(kind: str, device: str, names: list[str] | None) -> dict[str, tuple]:
    torch.manual_seed(1000)
    task = half.task_of(kind, "float32")
    prepared = half.prepared(kind, task, torch.float32)
    waits.network_of(prepared.subject).to(device)
    study, known, found = Study(prepared), {**task.methods(), **half.learners()}, {}
    for name in names or known:
        judged = name == "plot"
        method = known[name] if judged else replace(known[name], kind=MethodKind.BASELINE)
        unit, handles = study.run(method, task.random_method)
        states = {v: [(e.place.name, e.gains.cpu()) for e in h.edits] for v, h in handles.items()}
        found[name] = [r["accuracy"] for r in unit["records"]], states, [v["status"] for v in unit.get("verdicts", [])]
    return found


def compare_studies(kind: str, names: list[str] | None) -> None:
    warnings.simplefilter("ignore")
    expected = study_of(kind, "cpu", names)
    with counterfeit():
        found = study_of(kind, "cuda", names)
    for name, (accuracies, handles, statuses) in expected.items():
        assert found[name][0] == accuracies, name
        assert found[name][2] == statuses, name
        for variable, edits in handles.items():
            for (place, gains), (there, same) in zip(edits, found[name][1][variable], strict=True):
                assert place == there, name
                torch.testing.assert_close(gains, same, rtol=1e-4, atol=1e-5)


@pytest.fixture
def few_controls(monkeypatch):
    monkeypatch.setattr(bench, "RANDOM_HANDLES", 2)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("mlp", ["plot", "plot-closed-form", "das by adam", "das by oblique", "boundless", "mask", "linearised"]),
        ("gru", ["plot", "plot-newton", "das by riemannian", "linearised"]),
        ("module", ["plot-layered", "das by riemannian"]),
        ("decoder", ["plot-closed-form"]),  # begins with the stages of `plot`
    ],
)
def test_methods_find_the_same_on_a_gpu(few_controls, kind, names):
    compare_studies(kind, names)


@pytest.mark.long
@pytest.mark.parametrize("kind", half.KINDS)
def test_every_method_finds_the_same_on_a_gpu(few_controls, kind):
    compare_studies(kind, None)


# -- waits -----------------------------------------------------------------------------------------------------------

MOST = {"recording": 2, "signatures": 6, "calibration": 6, "das": 2.5, "newton": 2, "verdict": 6}
"""Waits and blocking uploads per batch that each part may have on the small GRU, where most batches come alone."""


def test_the_cpu_rarely_waits_for_a_gpu(few_controls):
    warnings.simplefilter("ignore")
    found = {name: sum(part.per_batch()) for name, part in waits.counted("gru").items()}
    assert {name: found[name] for name, most in MOST.items() if found[name] > most} == {}


def test_keys_and_vectors_in_files_are_fetched_without_waiting(tmp_path):
    """Pinned and non-blocking: the copy runs beside what the GPU computes."""
    numbers = torch.arange(48.0).reshape(2, 2, 3, 4)
    with counterfeit() as gpu:
        there = numbers.to("cuda")
        pages, nodes = (made(tmp_path, there) for made in (_pages, _nodes))
        vectors = Spilled(3, {"h": 4}, there.device)
        vectors.write("h", torch.arange(3), there[0, 0])
        gpu.count.taken()
        keys, values = pages.read(torch.tensor([1, 0]), slice(0, 3))
        along = nodes.read(torch.tensor([[0, 1]]))
        kept = vectors["h"]
        assert (gpu.count.waits, gpu.count.uploads) == (0, 0)
        assert gpu.count.bytes["upload"] > 0
        assert torch.equal(torch.cat([keys, values], dim=-1).cpu(), numbers[[1, 0]])
        assert torch.equal(torch.cat(along, dim=-1).cpu(), numbers[0, :, :2].unsqueeze(0))
        assert torch.equal(kept.cpu(), numbers[0, 0])


def _pages(folder: Path, page: Tensor) -> Pages:
    made = Pages(tuple(page.shape), page, folder, 2)
    made.write(torch.arange(2), page)
    return made


def _nodes(folder: Path, page: Tensor) -> NodePages:
    lines = page[0].transpose(0, 1).contiguous()
    made = NodePages(tuple(lines.shape), lines, folder, 2, 3)
    made.write(0, lines)
    return made


# -- handles ---------------------------------------------------------------------------------------------------------


def handle_of(subject: DecoderSubject, *names: str) -> Handle:
    edits = [
        Edit(place, Frame.identity(place.width), torch.linspace(0, 1, place.width))
        for place in map(subject.place, names)
    ]
    return Handle("z", tuple(edits), subject.identity())


@pytest.mark.parametrize("devices", [1, 2])
def test_handles_act_on_live_models_on_gpus(devices, tmp_path):
    def answers(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        subject = DecoderSubject(model, d.encode, d.ANSWERS)
        handle = handle_of(subject, "block_output.0", "block_output.3")
        handle.save(tmp_path / "h.safetensors")
        handle = Handle.load(tmp_path / "h.safetensors")
        base, source = d.BASE[1:4:2], d.SOURCE[1:4:2]  # prompts of one length
        ids = torch.tensor([d.PROMPTS[int(r)] for r in base]).to(subject.device)
        with handle.on(subject, source), torch.no_grad():
            live = model(input_ids=ids).logits[:, -1]
            told = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        return handle.apply(subject, base, source).cpu(), live.float().cpu(), told.cpu()

    expected = answers(d.network("llama"))
    with counterfeit():
        found = answers(spread(d.network("llama"), devices))
    assert d.relative(found[0], expected[0]) < 1e-5
    assert d.relative(found[1], expected[1]) < 1e-5
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("how", [{"size": 60}, {"budget": "auto"}])
def test_localize_places_the_same_on_a_gpu(how):
    warnings.simplefilter("ignore")

    def found(device: str) -> dict[str, tuple]:
        planted = planted_neurons(seed=1000)  # its users encode inputs on the CPU
        planted.subject.net.to(device)
        rows = torch.cartesian_prod(*[torch.arange(4)] * 5)[::3]
        result = localize(planted.subject, planted.causal, rows, seed=1000, progress=False, **how)
        places = {v: [e.place.name for e in h.edits] for v, h in result.handles.items()}
        return {v: (x.status, places[v]) for v, x in result.verdicts.items()}

    expected = found("cpu")
    with counterfeit():
        assert found("cuda") == expected


def test_positions_that_are_functions_of_the_rows_are_found_on_a_gpu():
    """Modules hooked at a token that is elsewhere in every input, and called with a mapping that users encode."""

    def outputs(device: str) -> Tensor:
        torch.manual_seed(1000)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)).to(device)
        subject = ModuleSubject(
            net,
            ["1"],
            torch.zeros(1, 12),
            encode=lambda rows: rows.float().unflatten(1, (3, 4)),
            position=lambda rows: rows[:, 0].long() % 3,
        )
        rows = torch.arange(60.0).reshape(5, 12)
        [recording] = record_pairs(subject, (rows, rows.flip(0)))
        place = subject.places[0]
        return respond(recording, [EditBatch(place, Frame.identity(6), torch.ones(2, 6))]).cpu()

    expected = outputs("cpu")
    with counterfeit():
        assert torch.equal(outputs("cuda"), expected)


def test_values_are_set_on_a_gpu():
    """`handle.set` writes a value that was learned from a recording into a live network on a GPU."""

    def outputs(device: str) -> list[Tensor]:
        planted, rows = planted_neurons(seed=1000), torch.cartesian_prod(*[torch.arange(4)] * 5)[::7]
        subject = planted.subject
        subject.net.to(device)
        place = subject.place("layer2")
        bank = Bank.from_pairs(planted.causal, rows, rows.flip(0), name="pairs", variables=["p"])
        handle = Handle("p", (Edit(place, Frame.identity(place.width), torch.ones(place.width)),), subject.identity())
        able, found = handle.with_values(record(subject, bank)[0]), []
        for value in able.values:
            found.append(able.set(value).apply(subject, rows))
            with able.set(value).on(subject), torch.no_grad():
                found.append(subject.net(subject.encode(rows).to(device)))
        return [x.cpu() for x in found]

    expected = outputs("cpu")
    with counterfeit():
        found = outputs("cuda")
    assert len(found) == 4
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
