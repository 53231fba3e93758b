"""The names that TransformerLens has for places: `blocks.7.hook_resid_post` is the output of block 7."""

from __future__ import annotations

import re

from plot_ot.errors import PlotError

_HOOK = re.compile(
    r"blocks\.(?P<layer>\d{1,4})\."
    r"(?P<hook>hook_resid_post|hook_resid_pre|hook_out|hook_in|attn\.hook_out|hook_attn_out|mlp\.hook_out|hook_mlp_out"
    r"|attn\.hook_z\.(?P<head>\d{1,4}))(?:@(?P<position>.+))?"
)
_KINDS = {
    "hook_resid_post": "block_output",
    "hook_out": "block_output",
    "attn.hook_out": "attention_output",
    "hook_attn_out": "attention_output",
    "mlp.hook_out": "mlp_output",
    "hook_mlp_out": "mlp_output",
}
_HOOKS = {"block_output": "hook_out", "attention_output": "attn.hook_out", "mlp_output": "mlp.hook_out"}
AFTER_A_NORM = ("hook_attn_out", "hook_mlp_out")
"""Hooks that TransformerLens puts behind a norm, where a block has one after its attention and its MLP."""


def from_lens(name: str, *, sandwiched: bool = False) -> str | None:
    """Our name of a TransformerLens hook, or None where it is not the name of one.

    One head of `attn.hook_z` is written with its number, `blocks.3.attn.hook_z.1`; a token other than the last as
    everywhere, `...@subject`. `sandwiched` blocks have a norm after their attention and their MLP.
    """
    found = _HOOK.fullmatch(name)
    if found is None:
        return None
    layer, hook, at = int(found["layer"]), found["hook"], f"@{found['position']}" if found["position"] else ""
    if found["head"] is not None:
        return f"head_output.{layer}.{int(found['head'])}{at}"
    if hook in ("hook_resid_pre", "hook_in"):
        if layer == 0:
            raise PlotError(f"'{name}' is the embedding, before any block; places begin with the output of block 0.")
        return f"block_output.{layer - 1}{at}"
    if sandwiched and hook in AFTER_A_NORM:
        own = f"blocks.{layer}.{hook.removeprefix('hook_').removesuffix('_out')}.hook_out"
        raise PlotError(
            f"'{name}' lies behind a norm in this model, and places are the outputs of modules. Take '{own}', which "
            f"is before it."
        )
    return f"{_KINDS[hook]}.{layer}{at}"


def to_lens(kind: str, layer: int) -> str:
    """TransformerLens' name of a kind of place; of heads the hook that has them all, [rows, tokens, heads, d]."""
    return f"blocks.{layer}.{_HOOKS.get(kind, 'attn.hook_z')}"
