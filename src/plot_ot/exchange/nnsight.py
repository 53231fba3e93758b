"""A language model that nnsight runs, here or on a machine far away, as a subject.

What goes to the machine that has the weights is plain: token ids, and vectors to put at a block's token. All arithmetic
of edits happens here, so nothing of this library has to be installed there. Handles over several places take one trace
for each place, because a later place's own activation must come back before it can be edited.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from plot_ot.errors import PlotError
from plot_ot.models.foreign import without_wrappers
from plot_ot.subjects import Place, Subject
from plot_ot.subjects.decoder.architecture import Anatomy, Decoder, refuse_answers
from plot_ot.subjects.decoder.layout import Positions, Spot, counted_back, spots
from plot_ot.subjects.decoder.offload import ModelWeights
from plot_ot.subjects.decoder.subject import Encode
from plot_ot.subjects.open_edits import OpenEdit, Rewrites
from plot_ot.subjects.protocol import Rewrite, Store
from plot_ot.subjects.shape import Shape


@dataclass(frozen=True)
class _Stop:
    """What a trace does at one module: read the vectors of a spot, and perhaps put others there first."""

    module: Any
    """nnsight's own object for the module."""
    before: bool
    """Whether the vectors are in what the module is given, not in what it gives."""
    columns: slice
    token: Int[Tensor, " rows"]
    new: Float[Tensor, "rows d"] | None


class NnsightSubject(Subject):
    """A causal language model that nnsight runs, by full forward passes: for models that are elsewhere, or in parts.

    `model` is nnsight's `LanguageModel` (or `TransformersModel`), `encode` and `answers` are as for `DecoderSubject`;
    without `answers` the outputs are the logits of the whole vocabulary. `remote` is nnsight's: False runs here, True
    on NDIF's machines, "local" here after everything went through the same packing as for a remote run. Places have the
    names they have elsewhere; `layers`, `kinds` and `positions` choose them. `at_once` rows go into one trace.
    """

    language = True
    whole_passes = True
    differentiable = False

    def __init__(
        self,
        model: Any,
        encode: Encode,
        answers: Sequence[Sequence[int]] | None = None,
        *,
        layers: Sequence[int] | None = None,
        kinds: Sequence[str] = ("block_output",),
        positions: Positions | None = None,
        remote: bool | str = False,
        at_once: int = 64,
    ) -> None:
        inside = getattr(model, "_module", None)
        if not hasattr(model, "trace") or not isinstance(inside, nn.Module):
            raise PlotError(f"Expected nnsight's LanguageModel; found {type(model).__name__}.")
        if remote not in (False, True, "local"):
            raise PlotError(f"`remote` is False, True or 'local', as in nnsight; found {remote!r}.")
        if at_once < 1:
            raise PlotError(f"`at_once` is the number of rows in one trace, at least 1; found {at_once}.")
        self.model, self.encode, self.remote, self.at_once = model, encode, remote, at_once
        plain = without_wrappers(inside)
        self.far = any(p.device.type == "meta" for p in plain.parameters())
        """Whether the weights are not on this machine."""
        self.decoder = _by_example(plain) if self.far else Decoder.of(plain)
        self.positions = dict(positions or {})
        self._spots = spots(self.decoder, kinds, layers, list(self.positions), None)
        self.places = tuple(spot.place for spot in self._spots.values())
        self.answers = None if answers is None else tuple(tuple(int(t) for t in group) for group in answers)
        if self.answers is not None:
            refuse_answers(self.answers, self.decoder.vocabulary)
        names = {id(module): name for name, module in self.decoder.model.named_modules()}
        self._stops = {name: self._module(names, spot) for name, spot in self._spots.items()}

    # -- Subject -----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where vectors are kept: here, wherever the weights are."""
        return torch.device("cpu")

    @property
    def responses_per_batch(self) -> int:
        return self.at_once

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.decoder.model.parameters())  # their number is known wherever they are

    def weights(self) -> Mapping[str, Tensor]:
        return ModelWeights(self.decoder.model)

    def structure(self) -> str:
        return json.dumps(self.decoder.facts, default=str)

    def identity(self) -> str:
        """That of the same weights elsewhere; of weights that are far away, a digest of the model's name and shape."""
        if not self.far:
            return super().identity()
        named = [getattr(self.model, name, None) for name in ("repo_id", "revision")]
        return f"nnsight-{hashlib.sha256(json.dumps([named, self.structure()]).encode()).hexdigest()[:16]}"

    def lengths(self, inputs: Tensor) -> Int[Tensor, " rows"]:
        mask: Tensor = self.encode(inputs)[1]
        return mask.sum(dim=1)

    def encoded(self, inputs: Tensor) -> tuple[Int[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]]:
        ids, mask = self.encode(inputs)
        return ids, mask.bool()

    def tails(self, place: Place, inputs: Tensor) -> Int[Tensor, " rows"]:
        position = self._spots[place.name].position
        named = {name: where for name, where in self.positions.items() if name == position}
        return counted_back(named, inputs, self.lengths(inputs), None)[position]

    def shape(self, outputs: int) -> Shape:
        """Every response is a whole pass over its prompt, and no keys are kept."""
        d = self.decoder
        one = Shape.of_decoder(type(d.model).__name__, d.model, d.blocks, d.model.config, d.dtype.itemsize)
        return replace(one, places=self.places, after=(len(d.blocks),) * len(self.places), groups=0)

    def record(self, inputs: Tensor, bases: Int[Tensor, " bases"] | None = None) -> Store:
        return self.record_in_chunks(inputs, self._recorded)

    def resume(
        self, store: Store, rows: Tensor, start: Place, activation: Tensor, later: Mapping[str, Rewrite]
    ) -> Tensor:
        if activation.requires_grad:
            raise PlotError(
                "Gradients do not come back from a trace: train on the weights themselves (load_subject(model, ...)), "
                "or use a method without training."
            )
        variants, pairs, _ = activation.shape
        inputs = store.inputs[rows.to(store.inputs.device)].repeat(variants, *[1] * (store.inputs.ndim - 1))
        new = {start.name: activation.flatten(0, 1).detach()}
        order = [name for name in self._spots if name in later]
        for name in order:  # what is there now must be known before it can be rewritten
            _, vectors = self._run(inputs, new, [name])
            current = vectors[name].unflatten(0, (variants, pairs))
            new[name] = later[name](current).flatten(0, 1)
        outputs: Tensor = self._run(inputs, new, [])[0].unflatten(0, (variants, pairs))
        return outputs

    def intervene(self, rewrites: Rewrites) -> contextlib.AbstractContextManager[OpenEdit]:
        raise PlotError(
            "nnsight runs a model trace by trace, so no edit stays open on it: use `handle.apply`, or open the handle "
            "on the subject that load_subject makes of a model with local weights."
        )

    # -- parts -------------------------------------------------------------------------------------------

    def _module(self, names: Mapping[int, str], spot: Spot) -> tuple[Any, bool]:
        """nnsight's object for a spot's module, and whether the spot is in what goes into it."""
        parts, block = self.decoder.anatomy[spot.place.layer], self.decoder.blocks[spot.place.layer]
        inner = {"head_output": parts.projection, "attention_output": parts.attention, "mlp_output": parts.mlp}
        at = self.model
        for step in names[id(inner.get(spot.kind, block))].split("."):
            at = at[int(step)] if step.isdigit() else getattr(at, step)
        return at, spot.kind == "head_output"

    def _recorded(self, inputs: Tensor) -> Store:
        outputs, vectors = self._run(inputs, {}, list(self._spots))
        return Store(inputs, vectors, outputs)

    def _run(
        self, inputs: Tensor, new: Mapping[str, Tensor], wanted: Sequence[str]
    ) -> tuple[Float[Tensor, "rows c"], dict[str, Float[Tensor, "rows d"]]]:
        """Outputs of the inputs with new vectors at some places, and the vectors at the wanted ones."""
        ids, mask = (t.cpu() for t in self.encode(inputs))
        length, lengths = ids.shape[1], mask.sum(dim=1)
        back = counted_back(self.positions, inputs, lengths, None)
        names = [name for name in self._spots if name in new or name in wanted]
        stops = []
        for name in names:
            spot, (module, before) = self._spots[name], self._stops[name]
            stops.append(_Stop(module, before, spot.columns, length - back[spot.position], new.get(name)))
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)  # left padding does not shift the prompt
        given = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}
        logits, read = _traced(self.model, given, stops, self.remote)
        return self._read(logits), {n: v for n, v in zip(names, read, strict=True) if n in wanted}

    def _read(self, logits: Float[Tensor, "rows vocabulary"]) -> Float[Tensor, "rows c"]:
        if self.answers is None:
            return logits
        return torch.stack([logits[:, list(group)].amax(dim=1) for group in self.answers], dim=1)


def _traced(
    model: Any, given: Mapping[str, Tensor], stops: Sequence[_Stop], remote: bool | str
) -> tuple[Tensor, list[Tensor]]:
    """One trace. Its body is sent away as it stands, so it uses tensors, numbers and nnsight's objects only."""
    plan = [(s.module, s.before, s.columns.start, s.columns.stop, s.token, s.new) for s in stops]
    rows = torch.arange(len(given["input_ids"]))
    with torch.no_grad(), model.trace(dict(given), remote=remote):
        read: Any = []
        for module, before, first, last, token, new in plan:
            whole = module.input if before else module.output
            whole = whole[0] if isinstance(whole, tuple) else whole
            if new is not None:
                whole[rows.to(whole.device), token.to(whole.device), first:last] = new.to(whole)
            read.append(whole[rows.to(whole.device), token.to(whole.device), first:last].float().cpu())
        read = read.save()
        logits = model.output.logits[:, -1].float().cpu().save()
    return logits.detach(), [vector.detach() for vector in read]


def _by_example(model: nn.Module) -> Decoder:
    """A model without its weights, taken apart by the example of a model with one such block and random weights."""
    whole: Any = model
    config = copy.deepcopy(whole.config)
    text = config.get_text_config()
    depth, vocabulary = int(text.num_hidden_layers), int(text.vocab_size)
    if not isinstance(whole.get_output_embeddings(), nn.Module):
        raise PlotError(f"{type(model).__name__} has no unembedding (language-model head).")
    text.num_hidden_layers, text.vocab_size = 1, min(64, vocabulary)
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    config._attn_implementation = "eager"
    example = Decoder.of(type(whole)(config).eval())
    paths = {id(module): name for name, module in example.model.named_modules()}
    at = paths[id(example.blocks[0])]
    blocks = [model.get_submodule(f"{at.rpartition('.')[0]}.{k}") for k in range(depth)]

    def there(part: nn.Module | None, block: nn.Module) -> nn.Module | None:
        return None if part is None else block.get_submodule(paths[id(part)].removeprefix(f"{at}."))

    [known] = example.anatomy
    anatomy = [
        Anatomy(there(known.attention, b), there(known.projection, b), there(known.mlp, b), known.head_outputs)
        for b in blocks
    ]
    return replace(
        example,
        model=model,
        trunk=model.get_submodule(paths[id(example.trunk)]),
        blocks=tuple(blocks),
        head=whole.get_output_embeddings(),
        anatomy=tuple(anatomy),
        vocabulary=vocabulary,
    )
