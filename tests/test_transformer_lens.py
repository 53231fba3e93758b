"""With the real TransformerLens: bridges as subjects, handles on them by hooks, and HookedTransformer as a module."""

from __future__ import annotations

import copy

import pytest
import torch

import decoders
from foreign import SETS, handle, run_page, subject_of, tokenizer
from plot_ot import Edit, Frame, Handle, LanguageModel, PlotError, load_subject
from plot_ot.exchange import lens_hooks
from plot_ot.models.foreign import opened_up

lens = pytest.importorskip("transformer_lens")
FAMILIES = ("gpt2", "llama", "gemma2", "qwen2")
bridged = pytest.mark.skipif(not hasattr(lens, "TransformerBridge"), reason="an old TransformerLens")


@pytest.fixture(params=FAMILIES)
def both(request, tmp_path):
    """A bridge, and the same model as it was before it was bridged."""
    from transformer_lens.model_bridge import TransformerBridge

    model = decoders.network(request.param)
    before = copy.deepcopy(model)
    options = {"hf_model": model, "tokenizer": tokenizer(tmp_path), "device": "cpu"}
    return TransformerBridge.boot_transformers("local", **options), before


@bridged
def test_a_bridge_is_the_network_inside_it(both) -> None:
    bridge, before = both
    subject, plain = subject_of(opened_up(bridge)[0]), subject_of(before)
    assert subject.identity() == plain.identity()  # so handles of the one fit the other
    shared = {p.data_ptr() for p in bridge.original_model.parameters()}
    assert {p.data_ptr() for p in subject.decoder.model.parameters()} <= shared  # no copy of the weights
    for names in SETS:
        made = handle(plain, names)
        ours, theirs = (made.apply(s, decoders.BASE, decoders.SOURCE) for s in (plain, subject))
        assert decoders.relative(theirs, ours) < 1e-5
    ids = torch.tensor([decoders.PROMPTS[0]])
    assert torch.isfinite(bridge(ids)).all()  # the bridge still runs


@bridged
@pytest.mark.parametrize("names", SETS)
def test_a_handle_on_a_bridge_does_what_it_does_here(both, names: tuple[str, ...]) -> None:
    bridge, _ = both
    subject = subject_of(opened_up(bridge)[0])
    made, everything = handle(subject, names), subject.watching(vocabulary=True)
    ours = made.apply(everything, decoders.BASE, decoders.SOURCE)
    for k, (base, source) in enumerate(zip(decoders.BASE, decoders.SOURCE, strict=True)):
        hooks = lens_hooks(made, subject, base[None], source[None])
        ids = torch.tensor([decoders.PROMPTS[int(base)]])
        with torch.no_grad():
            theirs = bridge.run_with_hooks(ids, fwd_hooks=hooks)[0, -1]
            unedited = bridge(ids)[0, -1]
        assert decoders.relative(theirs, ours[k]) < 1e-5
        assert decoders.relative(unedited, ours[k]) > 1e-4  # it did something, and nothing stays behind


@bridged
def test_load_subject_takes_a_bridge_and_its_tokenizer(both) -> None:
    bridge, before = both
    loaded = load_subject(bridge)
    assert isinstance(loaded, LanguageModel)
    assert loaded.tokenizer is bridge.tokenizer
    assert subject_of(loaded.model).identity() == subject_of(before).identity()


@bridged
def test_hooks_refuse_what_does_not_fit(both) -> None:
    bridge, _ = both
    subject = subject_of(opened_up(bridge)[0])
    made = handle(subject, SETS[0])
    with pytest.raises(PlotError, match="4 source rows for 6 base rows"):
        lens_hooks(made, subject, decoders.BASE, decoders.SOURCE[:4])
    hooks = lens_hooks(made, subject, decoders.BASE[:1], decoders.SOURCE[:1])
    with pytest.raises(PlotError, match="made for 1 rows, but the model runs 2"):
        bridge.run_with_hooks(torch.tensor([decoders.PROMPTS[0]] * 2), fwd_hooks=hooks)
    with pytest.raises(PlotError, match="belongs to network"):
        lens_hooks(Handle("x", made.edits, "another"), subject, decoders.BASE, decoders.SOURCE)


@bridged
@pytest.mark.parametrize("both", ["gpt2"], indirect=True)
def test_a_bridge_with_processed_weights_is_a_module_and_nothing_else(both) -> None:
    bridge, _ = both
    bridge.enable_compatibility_mode()
    with pytest.raises(PlotError, match="no longer computes"):
        load_subject(bridge)
    base, source = torch.tensor([decoders.PROMPTS[0], decoders.PROMPTS[0][::-1]])
    name = "blocks.1.hook_out"
    subject = load_subject(bridge, places=[name], example=base[None])
    whole = Edit(subject.places[0], Frame.identity(decoders.WIDTH), torch.ones(decoders.WIDTH))
    made = Handle("x", (whole,), subject.identity())
    with torch.no_grad():
        _, clean = bridge.run_with_cache(source[None])

        def hook(activation: torch.Tensor, hook: object) -> torch.Tensor:
            return torch.cat([activation[:, :-1], clean[name][:, -1:]], dim=1)

        theirs = bridge.run_with_hooks(base[None], fwd_hooks=[(name, hook)])[:, -1]
    assert decoders.relative(made.apply(subject, base[None], source[None]), theirs) < 1e-5


@pytest.mark.skipif(hasattr(lens, "TransformerBridge"), reason="only TransformerLens before 4 has HookedTransformer")
def test_a_hooked_transformer_is_a_module_with_hooks_as_places() -> None:
    shape = {"n_layers": 2, "d_model": 16, "n_ctx": 32, "d_head": 4, "n_heads": 4, "d_mlp": 32, "d_vocab": 50}
    config = lens.HookedTransformerConfig(**shape, act_fn="gelu_new", normalization_type="LN", device="cpu", seed=1000)
    model = lens.HookedTransformer(config)
    base, source = torch.randint(50, (2, 5, 6), generator=torch.Generator().manual_seed(1000))
    names = ["blocks.0.hook_resid_post", "blocks.1.hook_mlp_out"]
    subject = load_subject(model, places=names, example=base)
    frame = Frame.orthonormal(torch.linalg.qr(torch.randn(16, 3))[0])
    made = Handle("x", tuple(Edit(subject.place(n), frame, torch.ones(3)) for n in names), subject.identity())
    _, clean = model.run_with_cache(source)

    def hook(activation: torch.Tensor, hook: object) -> torch.Tensor:
        new = activation.clone()
        new[:, -1] += (clean[hook.name][:, -1] - activation[:, -1]) @ frame.read @ frame.read.T
        return new

    theirs = model.run_with_hooks(base, fwd_hooks=[(n, hook) for n in names])[:, -1].detach()
    assert decoders.relative(made.apply(subject, base, source), theirs) < 1e-5
    with pytest.raises(PlotError, match="give the `places`"):
        load_subject(model)


@bridged
def test_the_page_about_it_runs() -> None:
    run_page("needs: lens")
