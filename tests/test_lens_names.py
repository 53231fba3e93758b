"""TransformerLens' names of places, which need no TransformerLens."""

from __future__ import annotations

import pytest

import decoders
from plot_ot import DecoderSubject, PlotError
from plot_ot.subjects.decoder.architecture import KINDS
from plot_ot.subjects.decoder.lens_names import from_lens, to_lens


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("blocks.7.hook_resid_post", "block_output.7"),
        ("blocks.7.hook_resid_pre", "block_output.6"),
        ("blocks.7.hook_out", "block_output.7"),
        ("blocks.7.hook_in", "block_output.6"),
        ("blocks.7.hook_attn_out", "attention_output.7"),
        ("blocks.7.attn.hook_out", "attention_output.7"),
        ("blocks.7.hook_mlp_out", "mlp_output.7"),
        ("blocks.7.mlp.hook_out@subject", "mlp_output.7@subject"),
        ("blocks.7.attn.hook_z.3", "head_output.7.3"),
        ("blocks.12.attn.hook_z.10@subject", "head_output.12.10@subject"),
        ("block_output.7", None),
        ("blocks.7.hook_resid_mid", None),
        ("blocks.7.attn.hook_z", None),
        ("blocks.x.hook_out", None),
    ],
)
def test_names_are_translated(theirs: str, ours: str | None) -> None:
    assert from_lens(theirs) == ours


def test_every_kind_of_place_has_a_hook_that_leads_back() -> None:
    for kind in KINDS:
        name = to_lens(kind, 3) + (".1" if kind == "head_output" else "")
        assert (from_lens(name) or "").startswith(f"{kind}.3")


def test_the_embedding_is_no_place() -> None:
    with pytest.raises(PlotError, match="before any block"):
        from_lens("blocks.0.hook_resid_pre")


def test_a_subject_finds_places_by_these_names() -> None:
    subject = DecoderSubject(
        decoders.network("llama"), decoders.encode, decoders.ANSWERS, kinds=KINDS, positions=decoders.POSITIONS
    )
    assert subject.place("blocks.1.hook_resid_post") is subject.place("block_output.1")
    assert subject.place("blocks.1.hook_attn_out@early") is subject.place("attention_output.1@early")
    assert subject.place("blocks.1.attn.hook_z.2").width == 4
    with pytest.raises(PlotError, match=r"block_output\.9"):
        subject.place("blocks.9.hook_resid_post")


def test_hooks_behind_a_norm_are_refused() -> None:
    subject = DecoderSubject(decoders.network("gemma2"), decoders.encode, decoders.ANSWERS, kinds=KINDS)
    with pytest.raises(PlotError, match=r"behind a norm.*blocks\.1\.mlp\.hook_out"):
        subject.place("blocks.1.hook_mlp_out")
    assert subject.place("blocks.1.mlp.hook_out").name == "mlp_output.1"
