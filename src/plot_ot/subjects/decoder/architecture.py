"""The usual decoder shape: embedding, a list of blocks, final norm, unembedding; found by structure, not by name.

A tiny probe forward says which modules run after the blocks, whether attention is causal, and whether the logits are
what norm and unembedding give: a model that differs is refused before any time is spent.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from plot_ot.errors import PlotError
from plot_ot.subjects.decoder.offload import carried_to, working_device
from plot_ot.subjects.memory import OutOfMemory, is_out_of_memory
from plot_ot.subjects.protocol import frozen

KINDS = ("head_output", "attention_output", "mlp_output", "block_output")
"""What can be looked at in a block, in the order in which it is computed."""
VOCABULARY_AT_ONCE = 8192
"""Columns of logits computed at a time where only their maximum is wanted."""


FACTS = (
    *("hidden_act", "hidden_activation", "activation_function", "num_attention_heads", "num_key_value_heads"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "sliding_window", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier"),
)
"""Settings that change what a model of the same weights computes."""


@dataclass(frozen=True)
class Anatomy:
    """The parts of a block, where they are modules of their own."""

    attention: nn.Module | None
    projection: nn.Module | None
    """Takes the heads' outputs, side by side."""
    mlp: nn.Module | None
    head_outputs: int
    """Width of all heads together."""


@dataclass(frozen=True)
class Decoder:
    """A causal language model taken apart."""

    model: nn.Module
    trunk: nn.Module
    """The module that owns embedding, blocks and final norm."""
    blocks: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]
    """What runs between the last block and the unembedding: the final norm."""
    head: nn.Module
    anatomy: tuple[Anatomy, ...]
    width: int
    heads: int
    vocabulary: int
    cap: float | None
    """Gemma's soft cap of the final logits."""
    scale: float
    configs: tuple[Any, ...] = field(repr=False)
    """Every configuration object in which attention modules look up how to attend."""

    @classmethod
    def of(cls, model: nn.Module) -> Decoder:
        """Take a live model apart, or say what is missing."""
        model = _without_wrapper(model)
        name = type(model).__name__
        config = getattr(model, "config", None)
        if config is None or not hasattr(model, "get_output_embeddings"):
            raise _strange(name, "it is no Hugging Face model")
        if getattr(config, "is_encoder_decoder", False):
            raise _strange(name, "it has an encoder and a decoder")
        head = model.get_output_embeddings()  # type: ignore[operator]
        if head is None:
            raise _strange(name, "it has no unembedding (language-model head)")
        path, blocks = _block_list(model, name)
        trunk = model.get_submodule(path.rpartition(".")[0])
        if "position_ids" not in inspect.signature(trunk.forward).parameters:
            raise _strange(name, "it takes no position_ids, so left-padded prompts would shift")
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        if getattr(text, "attn_logit_softcapping", None) and text._attn_implementation == "sdpa":
            raise PlotError(f"{name} caps its attention, which 'sdpa' leaves out: load it with 'eager' attention.")
        configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        scale = float(getattr(text, "logit_scale", 1.0) or 1.0) / float(getattr(text, "logits_scaling", 1.0) or 1.0)
        parts = {
            "model": model,
            "trunk": trunk,
            "blocks": tuple(blocks),
            "head": head,
            "heads": int(text.num_attention_heads),
            "vocabulary": int(getattr(head, "out_features", None) or head.weight.shape[0]),
            "cap": getattr(text, "final_logit_softcapping", None),
            "scale": scale,
            "configs": tuple(configs.values()),
        }
        return _probe(cls, parts, name)

    # -- looking and editing ------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    def shows(self, layer: int, kind: str) -> int:
        """The width of what a block shows of this kind; refuses what it does not have."""
        parts = self.anatomy[layer]
        missing = {"head_output": parts.projection, "attention_output": parts.attention, "mlp_output": parts.mlp}
        if kind in missing and missing[kind] is None:
            raise PlotError(f"Block {layer} of {type(self.model).__name__} has no module of its own for '{kind}'.")
        return parts.head_outputs if kind == "head_output" else self.width

    def hook(self, layer: int, kind: str, change: Callable[[Tensor], Tensor | None]) -> Any:
        """Let `change` see, and replace if it returns something, the [rows, tokens, width] activations of this kind."""
        parts = self.anatomy[layer]
        if kind == "head_output":

            def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
                new = change(args[0])
                return None if new is None else (new, *args[1:])

            return parts.projection.register_forward_pre_hook(before)  # type: ignore[union-attr]
        outputs = {"attention_output": parts.attention, "mlp_output": parts.mlp, "block_output": self.blocks[layer]}

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            new = change(first(output))
            return None if new is None else (new, *output[1:]) if isinstance(output, tuple) else new

        return outputs[kind].register_forward_hook(after)  # type: ignore[union-attr]

    # -- reading out --------------------------------------------------------------------------------------

    def logits(
        self, h: Float[Tensor, "rows d"], tokens: tuple[int, ...] | slice | None = None
    ) -> Float[Tensor, "rows k"]:
        """Logits of some tokens (all by default) from the residual after the last block, in float32.

        They are where the unembedding is.
        """
        return self._unembed(self.normed(h), tokens)

    def normed(self, h: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        """The residual after the final norm, on the unembedding's device: parts of a model may be on several."""
        for module in self.after:
            h = module(carried_to(module, h))
        return carried_to(self.head, h)

    def largest(
        self, h: Float[Tensor, "rows d"], without: tuple[int, ...] = ()
    ) -> tuple[Float[Tensor, " rows"], Int[Tensor, " rows"]]:
        """The largest logit, and its token, of all tokens but some, without ever holding the whole vocabulary."""
        x = self.normed(h)
        with torch.no_grad():
            logit, token = x.new_full((len(x),), -torch.inf, dtype=torch.float32), torch.zeros_like(x[:, 0]).long()
            for at in range(0, self.vocabulary, VOCABULARY_AT_ONCE):
                piece = slice(at, min(at + VOCABULARY_AT_ONCE, self.vocabulary))
                logits = self._unembed(x, piece)
                if inside := tuple(t - at for t in without if piece.start <= t < piece.stop):
                    logits.index_fill_(1, _numbers(inside, logits.device), -torch.inf)
                best, index = logits.max(dim=1)
                token = torch.where(best > logit, index + at, token)
                logit = torch.maximum(best, logit)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return logit, token
        if self._plain is None:
            return self._unembed(x, None).gather(1, token.unsqueeze(1)).squeeze(1), token
        weight, bias = self._plain
        raw = (x * weight[token]).sum(dim=1)  # the way back is that of the largest alone
        return self._capped(raw if bias is None else raw + bias[token]), token

    def _unembed(self, x: Tensor, tokens: tuple[int, ...] | slice | None) -> Tensor:
        if tokens is None:
            return self._capped(self.head(x))
        columns = _numbers(tokens, x.device) if isinstance(tokens, tuple) else tokens
        if self._plain is not None:
            weight, bias = self._plain
            raw = F.linear(x, weight[columns], None if bias is None else bias[columns])
        else:  # an adapted, quantised or offloaded unembedding has no plain rows to pick
            raw = self.head(x)[:, columns]
        return self._capped(raw)

    @property
    def _plain(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of the unembedding, where it is nothing but a linear map with its weights at hand."""
        plain = type(self.head) is nn.Linear and self.head.weight.device.type != "meta"
        return (self.head.weight, self.head.bias) if plain else None  # type: ignore[return-value]

    def _capped(self, raw: Tensor) -> Tensor:
        raw = raw.float() * self.scale if self.scale != 1.0 else raw.float()
        return raw if self.cap is None else self.cap * torch.tanh(raw / self.cap)

    @property
    def device(self) -> torch.device:
        """Where tokens are embedded."""
        return working_device(self.model.get_input_embeddings())  # type: ignore[operator]

    @property
    def facts(self) -> dict[str, Any]:
        """The settings, where the model has them, that tell it from others of the same weights."""
        text = self.trunk.config.get_text_config()  # type: ignore[union-attr, operator]
        return {name: value for name in FACTS if (value := getattr(text, name, None)) is not None}

    @property
    def dtype(self) -> torch.dtype:
        """What the blocks compute in."""
        return next(p.dtype for p in self.blocks[0].parameters() if p.is_floating_point())

    # -- attention ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def attending(self, implementation: str) -> Iterator[None]:
        """While open, the model's attention modules use this implementation."""
        found = [c._attn_implementation for c in self.configs]
        try:
            for c in self.configs:
                c._attn_implementation = implementation
            yield
        finally:
            for c, before in zip(self.configs, found, strict=True):
                c._attn_implementation = before

    def stops(self, layer: int) -> bool:
        """Whether a block may be left halfway: not where its weights come and go with its calls."""
        return not any(hasattr(module, "_hf_hook") for module in self.blocks[layer].modules())

    @property
    def masking(self) -> str:
        """An implementation that shows its masks: the model's own, or one in place of a fused kernel."""
        own = self.trunk.config._attn_implementation  # type: ignore[union-attr]
        if own in ("eager", "sdpa"):
            return str(own)
        return "sdpa" if getattr(self.model, "_supports_sdpa", False) else "eager"


def transformers_library() -> Any:
    """The transformers package, which is an extra."""
    try:
        import transformers
    except ImportError as e:
        raise PlotError("Language models need the `hf` extra: pip install 'plot-ot[hf]'.") from e
    return transformers


def first(output: Any) -> Tensor:
    """The hidden states of what a module returned."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


def refuse_answers(answers: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Refuse candidate answers without a token, with unknown tokens, or that share one."""
    tokens = [t for group in answers for t in group]
    if not answers or not all(answers):
        raise PlotError("Every answer needs at least one token that spells it.")
    if not all(0 <= t < vocabulary for t in tokens):
        raise PlotError(f"Answer tokens must lie in 0..{vocabulary - 1}; found {min(tokens)} to {max(tokens)}.")
    owners: dict[int, int] = {}
    for j, group in enumerate(answers):
        for t in group:
            if owners.setdefault(t, j) != j:
                raise PlotError(
                    f"Answers {owners[t]} and {j} share token {t}: the tokenizer does not tell them apart. Choose "
                    f"answers that differ in their first token."
                )


def _strange(name: str, why: str) -> PlotError:
    return PlotError(
        f"{name} does not have the usual decoder shape: {why}. DecoderSubject needs a causal language model of "
        f"transformers (AutoModelForCausalLM). Use ModuleSubject for other networks."
    )


def _without_wrapper(model: nn.Module) -> nn.Module:
    """The model inside a compiled or a peft wrapper; its adapter layers sit in the blocks and stay."""
    model = getattr(model, "_orig_mod", model)
    config = getattr(model, "peft_config", None)
    if config and hasattr(model, "get_base_model"):
        if any(getattr(c, "is_prompt_learning", False) for c in config.values()):
            raise PlotError("A prompt-learning adapter changes every prompt; use an adapter of the weights (LoRA).")
        inner: nn.Module = model.get_base_model()  # type: ignore[operator]
        return inner
    return model


def _block_list(model: nn.Module, name: str) -> tuple[str, Sequence[nn.Module]]:
    """The list of modules that holds most of the weights."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise _strange(name, "it has no list of blocks")
    path, found = max(lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))
    return path, list(found)


@lru_cache(maxsize=256)
def _numbers(numbers: tuple[int, ...], device: torch.device) -> Int[Tensor, " k"]:
    """Whole numbers on a device, moved there once."""
    with torch.inference_mode(False):  # who asks first may be in it; the next may need gradients
        return torch.tensor(numbers, device=device)


def _probe(make: Callable[..., Decoder], parts: dict[str, Any], name: str) -> Decoder:
    """Run two prompts that differ in the last token only, and look at what happens."""
    model, trunk, blocks = parts["model"], parts["trunk"], parts["blocks"]
    ran: list[tuple[nn.Module, tuple[Any, ...], Mapping[str, Any], Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        ran.append((module, args, kwargs, first(output)))

    after = [m for m in trunk.children() if not isinstance(m, (nn.ModuleList, nn.ModuleDict))]
    inner = [m for b in blocks for child in b.children() for m in (child, *child.children())]
    hooks = [m.register_forward_hook(note, with_kwargs=True) for m in dict.fromkeys([*blocks, *after, *inner])]
    device = working_device(model.get_input_embeddings())
    ids = torch.tensor([[1, 2, 3], [1, 2, 4]], device=device) % parts["vocabulary"]
    try:
        with torch.no_grad(), frozen(model):
            logits = model(input_ids=ids, use_cache=False).logits
    except Exception as e:
        if is_out_of_memory(e):
            raise OutOfMemory.for_one("input", e) from e
        raise _strange(name, f"it does not run on token ids alone ({type(e).__name__}: {e})") from e
    finally:
        for hook in hooks:
            hook.remove()
    modules = [m for m, *_ in ran]
    if [m for m in modules if m in blocks] != list(blocks):
        raise _strange(name, "its blocks do not run once each, one after the other")
    end = modules.index(blocks[-1])
    last = ran[end][3]
    if last.ndim != 3:
        raise _strange(name, f"its blocks return {tuple(last.shape)} instead of [rows, tokens, width]")
    noise = 1e-5 if last.dtype in (torch.float32, torch.float64) else 1e-2
    if float((last[0, :2] - last[1, :2]).abs().max()) > noise * float(last.abs().max()):
        raise _strange(name, "earlier tokens see later ones")
    parts["after"] = tuple(m for m in modules[end + 1 :] if m in after)
    parts["anatomy"] = tuple(_anatomy(block, ran) for block in blocks)
    decoder = make(width=last.shape[-1], **parts)
    with torch.no_grad(), frozen(model):
        ours = decoder.logits(last[:, -1])
    theirs = logits[:, -1].float().to(ours.device)
    if not bool(torch.isfinite(theirs).all()):
        raise _strange(name, "its logits are NaN or infinite")
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max())):
        raise _strange(name, "its logits are not its unembedding of the final norm")
    return decoder


def _anatomy(block: nn.Module, ran: Sequence[tuple[nn.Module, tuple[Any, ...], Mapping[str, Any], Tensor]]) -> Anatomy:
    """Attention is the part that was given the mask, the MLP the other one with matrices; the projection comes last."""
    children = list(block.children())
    called = [(m, kwargs, output) for m, _, kwargs, output in ran if m in children]
    attention = next((m for m, kwargs, _ in called if "attention_mask" in kwargs), None)
    others = [(m, o) for m, _, o in called if m is not attention and any(p.ndim > 1 for p in m.parameters())]
    projection, heads = None, 0
    for m, args, *_ in ran:
        if attention is not None and m in list(attention.children()) and any(p.ndim > 1 for p in m.parameters()):
            projection, heads = m, args[0].shape[-1]
    # an MLP that is no module of its own ends in the last of the block's matrices
    mlp = None
    if others and (len(others) == 1 or all(isinstance(m, nn.Linear) for m, _ in others)):
        mlp = others[-1][0] if others[-1][1].ndim == 3 else None  # some lose sight of the tokens there
    return Anatomy(attention, projection, mlp, heads)
