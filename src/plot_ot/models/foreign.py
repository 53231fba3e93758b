"""Language models that live in other tools: TransformerLens' bridges and nnsight's envelopes, opened up.

Both keep an ordinary Hugging Face model inside. That model, with the very same weights, is what is recorded and
resumed here; the tool's own object stays as it is, and can be used beside.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from plot_ot.errors import PlotError

EXACT = 1e-4
"""The largest relative difference of logits between a bridge and the model inside it: attention is computed
differently in the two."""


def opened_up(model: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """A model of another tool as the Hugging Face model inside it and its tokenizer; any other model as it is."""
    tool = _tool(model)
    if tool == "nnsight":
        return _inside_nnsight(model), tokenizer or getattr(model, "tokenizer", None)
    if tool == "transformer_lens" and hasattr(model, "original_model"):
        return _inside_bridge(model), tokenizer or getattr(model, "tokenizer", None)
    return model, tokenizer


def is_hooked(model: Any) -> bool:
    """Whether this is a model of TransformerLens itself, a HookedTransformer or a bridge, to be run as a module."""
    return _tool(model) == "transformer_lens" and isinstance(model, nn.Module)


def hooked_options() -> dict[str, Any]:
    """How a TransformerLens model is looked at as a module: rows are tokens, places and outputs the last token's."""
    return {"encode": lambda rows: rows.long(), "position": -1, "output": lambda logits: logits[:, -1]}


def _tool(model: Any) -> str:
    """The package that the model's class, or one that it is derived from, was written in."""
    packages = [kind.__module__.partition(".")[0] for kind in type(model).__mro__]
    return next((name for name in packages if name in ("nnsight", "transformer_lens")), "")


def _inside_nnsight(envelope: Any) -> nn.Module:
    module = getattr(envelope, "_module", None)
    if not isinstance(module, nn.Module):
        raise PlotError(f"This {type(envelope).__name__} of nnsight holds no model; found {type(module).__name__}.")
    if any(p.device.type == "meta" for p in module.parameters()):
        raise PlotError(
            f"This {type(envelope).__name__} of nnsight has not loaded its weights. Make it with dispatch=True, or run "
            f"it where the weights are: plot_ot.exchange.NnsightSubject(model, ..., remote=True)."
        )
    return without_wrappers(module)


def _inside_bridge(bridge: Any) -> nn.Module:
    """The model inside a bridge without the bridge's own modules, and a check that it computes the same."""
    plain = without_wrappers(bridge.original_model).eval()
    _drop_added(plain)
    config: Any = plain.config
    tokens = torch.arange(1, 9).unsqueeze(0) % config.get_text_config().vocab_size
    tokens = tokens.to(next(plain.parameters()).device)
    try:
        with torch.no_grad():
            ours, theirs = plain(input_ids=tokens).logits.float(), bridge(tokens).float()
    except Exception as e:
        raise _not_the_same(str(e).partition("\n")[0]) from e
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if not difference <= EXACT:
        raise _not_the_same(f"their logits differ by {difference:.2g}")
    return plain


def _drop_added(plain: nn.Module) -> None:
    """Take out the zero biases that a bridge adds, so that the network has the identity that it has elsewhere."""
    with torch.device("meta"):
        own = set(type(plain)(plain.config).state_dict())
    for name, tensor in plain.state_dict().items():
        path, _, leaf = name.rpartition(".")
        if name not in own and not bool(tensor.any()):
            module = plain.get_submodule(path)
            module._buffers.pop(leaf, None)
            module._parameters.pop(leaf, None)
            module.register_parameter(leaf, None)


def _not_the_same(why: str) -> PlotError:
    return PlotError(
        f"This TransformerBridge no longer computes what the model inside it does ({why}): its weights were processed. "
        f"Give load_subject the bridge before enable_compatibility_mode, or the bridge as a module, with places such "
        f"as 'blocks.3.hook_resid_post' and an example row of tokens."
    )


def without_wrappers(module: nn.Module, done: dict[int, nn.Module] | None = None) -> nn.Module:
    """A copy of a tree of modules without what a tool put around them and into them; the weights are the same tensors.

    A bridge gives way to what it bridges, and a `forward` or a hook from outside is left behind.
    """
    done = {} if done is None else done
    inside = getattr(module, "original_component", None)
    if isinstance(inside, nn.Module):
        return without_wrappers(inside, done)
    if id(module) not in done:
        plain = done[id(module)] = copy.copy(module)
        plain.__dict__.pop("forward", None)
        plain.__dict__.update(
            _parameters=dict(module._parameters),
            _buffers=dict(module._buffers),
            _forward_hooks=OrderedDict(),
            _forward_pre_hooks=OrderedDict(),
        )
        children = {n: m if m is None else without_wrappers(m, done) for n, m in module._modules.items()}
        plain.__dict__["_modules"] = children
    return done[id(module)]
