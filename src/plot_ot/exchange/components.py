"""Where a subject's places are for pyvene: the component, the unit, and the columns of what pyvene shows there.

A place of a model that pyvene knows gets pyvene's own name (`block_output`, `head_attention_value_output`), after a
check that the name leads to the very module we edit and has the same width; any other place is named by the dotted path
of its module, which pyvene takes for every network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from plot_ot.errors import PlotError
from plot_ot.subjects import DecoderSubject, MLPSubject, ModuleSubject, Place, Subject
from plot_ot.subjects.decoder.layout import Spot, counted_back

NAMES = {
    "block_output": "block_output",
    "attention_output": "attention_output",
    "mlp_output": "mlp_output",
    "head_output": "head_attention_value_output",
}
"""pyvene's component for each kind of place."""


@dataclass(frozen=True)
class Component:
    """A place as pyvene addresses it."""

    name: str
    layer: int
    unit: str
    width: int
    """The width of what an intervention sees."""
    columns: slice
    """The columns of what an intervention sees that hold the place's vector."""
    head: int | None = None
    units: int = 1
    """How many tokens an intervention sees at once."""
    flat: bool = True
    """Whether an intervention sees one vector [d], and not several that the subject flattens into one."""


POSITIONAL = "first_argument"


class PlainModel(nn.Module):
    """Any network in the form pyvene takes: called by keywords, with a `config`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config = SimpleNamespace(to_dict=dict)

    @property
    def device(self) -> torch.device:
        """The device of the parameters, which pyvene asks a model for."""
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    def forward(self, **given: Any) -> Any:
        return self.module(given[POSITIONAL]) if POSITIONAL in given else self.module(**given)


def pyvene_library() -> Any:
    """The pyvene package, which is an extra."""
    try:
        import pyvene  # type: ignore[import-untyped]
    except ImportError as e:
        raise PlotError("This needs pyvene: pip install 'plot-ot[pyvene]'.") from e
    return pyvene


def pyvene_model(subject: Subject) -> nn.Module:
    """The network as pyvene takes it, and pyvene told of the widths it does not know.

    Call it before `pyvene.IntervenableModel.load(directory, pyvene_model(subject))` in a fresh process.
    """
    pyvene_library()
    from pyvene.models.intervenable_modelcard import (  # type: ignore[import-untyped]
        type_to_dimension_mapping,
    )

    model = _network(subject)
    known = type_to_dimension_mapping.setdefault(type(model), {})
    for place in subject.places:
        try:
            at = component(subject, place)
        except PlotError:
            continue  # a place that pyvene cannot address needs no width there
        if "." in at.name:
            known[at.name] = (str(at.width // at.units),)  # pyvene multiplies by the units
    return model


def component(subject: Subject, place: Place) -> Component:
    """Where pyvene finds a place of this subject."""
    subject.require(place)
    if isinstance(subject, DecoderSubject):
        return _in_decoder(subject, place)
    tap = subject._taps[place.name] if isinstance(subject, ModuleSubject) else None
    several = tap is not None and isinstance(tap.position, (tuple, slice))
    if not isinstance(subject, ModuleSubject) or tap is None or tap.run is not None or several or not tap.is_output:
        raise PlotError(
            f"pyvene cannot address {place.name} of this {type(subject).__name__}: it knows what modules that run once "
            f"put out, and tokens of it, but no timesteps of a module, pixels, inputs, parts, sums or several tokens."
        )
    flat = tap.position is not None or isinstance(subject, MLPSubject)
    return Component(path_of(subject, place), 0, "pos", place.width, slice(0, place.width), flat=flat)


def path_of(subject: DecoderSubject | ModuleSubject, place: Place) -> str:
    """The component by the path of its module: `transformer.h.3.attn.output`, `module.1.output`."""
    if isinstance(subject, ModuleSubject):
        path = _path(subject.module, subject._taps[place.name].module)
        return ".".join(["module", *([path] if path else []), "output"])
    return f"{_path(subject.decoder.model, _module(subject, place))}.{_side(subject, place)}"


def spot(subject: DecoderSubject, place: Place) -> Spot:
    """Kind, layer, columns and token of a decoder's place."""
    return subject._spots[place.name]


def _network(subject: Subject) -> nn.Module:
    if isinstance(subject, DecoderSubject):
        return subject.decoder.model
    if isinstance(subject, ModuleSubject):
        return PlainModel(subject.module)
    raise PlotError(f"pyvene takes language models and modules whose places run once, not a {type(subject).__name__}.")


def _in_decoder(subject: DecoderSubject, place: Place) -> Component:
    from pyvene.models.intervenable_modelcard import type_to_module_mapping
    from pyvene.models.modeling_utils import (  # type: ignore[import-untyped]
        get_dimension_by_component,
        getattr_for_torch_module,
    )

    at, model = spot(subject, place), subject.decoder.model
    name, inside = NAMES[at.kind], at.kind == "head_output"
    known = type_to_module_mapping.get(type(model), {}).get(name)
    if known is not None:
        side = "register_forward_pre_hook" if inside else "register_forward_hook"
        try:
            theirs = getattr_for_torch_module(model, known[0] % place.layer)
            width = get_dimension_by_component(type(model), model.config, name)
        except (AttributeError, AssertionError, TypeError):
            theirs, width = None, 0
        if theirs is _module(subject, place) and known[1] == side and width * at.tokens == place.width:
            head, whole = at.columns.start // width if inside else None, slice(0, place.width)
            unit = "h.pos" if inside else "pos"
            return Component(name, place.layer, unit, place.width, whole, head, at.tokens, at.tokens == 1)
    total = subject.decoder.shows(place.layer, at.kind)
    if not inside:
        total *= at.tokens
        return Component(path_of(subject, place), 0, "pos", total, slice(0, total), None, at.tokens, at.tokens == 1)
    if at.tokens > 1:
        raise PlotError(f"pyvene has no name for the heads of {type(model).__name__}, so not for {place.name} either.")
    return Component(path_of(subject, place), 0, "pos", total, at.columns)


def _module(subject: DecoderSubject, place: Place) -> nn.Module:
    kind, parts = spot(subject, place).kind, subject.decoder.anatomy[place.layer]
    inner = {"head_output": parts.projection, "attention_output": parts.attention, "mlp_output": parts.mlp}
    module = inner.get(kind, subject.decoder.blocks[place.layer])
    assert module is not None  # noqa: S101 - the subject lists no place that its blocks do not have
    return module


def _side(subject: DecoderSubject, place: Place) -> str:
    return "input" if spot(subject, place).kind == "head_output" else "output"


def _path(model: nn.Module, module: nn.Module) -> str:
    return next(str(path) for path, m in model.named_modules() if m is module)


# -- inputs -----------------------------------------------------------------------------------------------------------


def encoded(subject: Subject, rows: Tensor) -> dict[str, Any]:
    """The keyword arguments that pyvene calls the network with."""
    if isinstance(subject, DecoderSubject):
        ids, real = subject.encoded(rows)
        device = subject.device
        positions = (real.long().cumsum(dim=1) - 1).clamp(min=0)  # left padding does not shift the prompt
        return {
            "input_ids": ids.to(device),
            "attention_mask": real.long().to(device),
            "position_ids": positions.to(device),
        }
    assert isinstance(subject, ModuleSubject)  # noqa: S101
    inputs = subject.encode(rows)
    given = dict(inputs) if isinstance(inputs, Mapping) else {POSITIONAL: inputs}
    if not all(isinstance(value, Tensor) for value in given.values()):
        raise PlotError(
            f"pyvene takes inputs as tensors, but this subject's `encode` gives {type(inputs).__name__}. Pass an "
            f"`encode` that gives a tensor, or a mapping of tensors."
        )
    return given


def tokens(subject: Subject, places: Sequence[Place], rows: Tensor) -> list[Int[Tensor, " rows"] | None]:
    """For each place, the index of its (first) token in every padded row; None where it has no position."""
    if isinstance(subject, DecoderSubject):
        ids, real = subject.encoded(rows)
        back = counted_back(subject.positions, rows, real.sum(dim=1), subject.tokens)
        return [ids.shape[1] - back[spot(subject, place).position] for place in places]
    assert isinstance(subject, ModuleSubject)  # noqa: S101
    return [_token(subject, place, rows) for place in places]


def _token(subject: ModuleSubject, place: Place, rows: Tensor) -> Int[Tensor, " rows"] | None:
    position = subject._taps[place.name].position
    if position is None:
        return None
    assert not isinstance(position, slice)  # noqa: S101 - `component` refuses these
    shape = _shape(subject, place, rows)
    if len(shape) != 3:
        raise PlotError(f"pyvene takes positions in [rows, positions, d]; {place.name} outputs {tuple(shape)}.")
    index = torch.as_tensor(position(rows) if callable(position) else position).cpu().long().expand(len(rows))
    return index % shape[1]


def _shape(subject: ModuleSubject, place: Place, rows: Tensor) -> torch.Size:
    """The shape of what the place's module outputs."""
    shapes: list[torch.Size] = []

    def look(_: nn.Module, __: Any, output: Any) -> None:
        shapes.append((output[0] if isinstance(output, tuple) else output).shape)

    hook = subject._taps[place.name].module.register_forward_hook(look)
    try:
        with torch.no_grad():
            subject._outputs(rows[:1])
    finally:
        hook.remove()
    return shapes[0]
