"""Readouts: how outputs are looked at, by the network and by the causal model (φ of Section 3.1).

Besides one answer of several (`softmax`, `logits`, `sigmoid`) there are real values, numbers of a list, distributions,
logit differences and sets of answers; `docs/outputs.md` says what φ, loss and being right mean for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from plot_ot.errors import PlotError, unknown


@dataclass(frozen=True)
class Readout:
    """How outputs are looked at: φ on both sides, and the answer an output gives.

    `neural` maps network outputs [..., c] to features [..., p]; `abstract` maps labels [rows, ...] to features
    [rows, p] in the same space (told c); `decide` maps outputs to labels; `loss` is what DAS minimises, per response.
    `linear` says that `neural` is linear: then features can be linearised themselves.

    `right` says whether outputs give labels, [variants, pairs] booleans; by default whether `decide` gives them
    exactly. `accepts` says, for two labels, whether what is right for the second may also be right for the first; by
    default whether they are equal. Pairs on which it holds cannot tell the two apart. `logits` says that
    outputs times a factor give the same answers, more surely. `numbers` says that labels are real numbers themselves,
    and not the numbers of answers.
    """

    name: str
    neural: Callable[[Tensor], Tensor]
    abstract: Callable[[Tensor, int], Tensor]
    decide: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    linear: bool = False
    right: Callable[[Tensor, Tensor], Tensor] | None = None
    accepts: Callable[[Tensor, Tensor], Tensor] | None = None
    logits: bool = True
    numbers: bool = False

    @property
    def one_answer(self) -> bool:
        """Whether exactly one of the network's answers is right."""
        return self.abstract is _one_hot

    def refuse_others(self, labels: Tensor, width: int) -> None:
        """Refuse labels that cannot be compared with a network of so many outputs, and say which readout could."""
        if not self.one_answer:
            self.abstract(labels, width)  # which refuses what it cannot look at
            return
        if labels.ndim > 1 or not bool((labels == labels.long()).all()):
            found = f"{tuple(labels.shape[1:])} numbers each" if labels.ndim > 1 else f"{labels.flatten()[:3].tolist()}"
            raise PlotError(
                f"The causal model answers in real numbers or several ({found}), and '{self.name}' wants one of the "
                f"network's answers, by its number. Give readout=plot_ot.real_values(tolerance), 'sigmoid' for bits, "
                f"or another one of docs/outputs.md."
            )
        if width == 1:
            raise PlotError(
                f"The network has one output, and '{self.name}' chooses among several. Give readout='sigmoid' if it is "
                f"the logit of yes, or plot_ot.real_values(tolerance) if it is a number."
            )

    def refuse_outside(self, labels: Tensor, width: int) -> None:
        """Refuse labels that are none of a network's so many answers, where one of these is right."""
        if self.one_answer:
            _refuse_outside(labels, width)

    def correct(self, outputs: Float[Tensor, "variants pairs c"], labels: Tensor) -> Tensor:
        """Whether each response gives its pair's label: [variants, pairs] booleans."""
        if self.right is not None:
            return self.right(outputs, labels)
        answers = self.decide(outputs)
        if answers.ndim == 3 and labels.ndim == 1:  # one bit per pair
            labels = labels.unsqueeze(1)
        equal = answers == labels
        return equal if equal.ndim == 2 else equal.flatten(2).all(dim=2)


def _refuse_outside(labels: Tensor, classes: int) -> None:
    if bool((labels.long() < 0).any() | (labels.long() >= classes).any()):
        found = labels.unique().tolist()
        shown = f"{found[:8]}" if len(found) <= 8 else f"{', '.join(map(str, found[:4]))}, ... up to {found[-1]}"
        raise PlotError(
            f"The causal model's answers (labels) must lie in 0..{classes - 1}, the network's outputs; found {shown}."
        )


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    _refuse_outside(labels, classes)
    return F.one_hot(labels.long(), classes).float()


def _bits(labels: Tensor, width: int) -> Tensor:
    labels = labels.unsqueeze(1) if labels.ndim == 1 else labels
    if labels.flatten(1).shape[1] != width:
        raise PlotError(f"Labels have {labels.flatten(1).shape[1]} bits, the network {width} outputs.")
    return labels.flatten(1).float()


def _argmax(outputs: Tensor) -> Tensor:
    # torch.argmax over a short last dimension is many times slower than the comparison itself
    return outputs[..., 1] > outputs[..., 0] if outputs.shape[-1] == 2 else outputs.argmax(dim=-1)


def _cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    index = labels.long().expand(outputs.shape[:-1]).unsqueeze(-1)
    return outputs.logsumexp(dim=-1) - outputs.gather(-1, index).squeeze(-1)


def _bit_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    labels = labels.unsqueeze(1) if labels.ndim == 1 else labels  # one bit per pair
    target = labels.to(outputs.dtype).expand_as(outputs)
    return F.binary_cross_entropy_with_logits(outputs, target, reduction="none").mean(dim=-1)


READOUTS: dict[str, Readout] = {
    "softmax": Readout("softmax", lambda y: y.softmax(dim=-1), _one_hot, _argmax, _cross_entropy),
    "logits": Readout("logits", lambda y: y, _one_hot, _argmax, _cross_entropy, linear=True),
    "sigmoid": Readout("sigmoid", torch.sigmoid, _bits, lambda y: y >= 0, _bit_entropy),
}

MADE = {
    "real_values": "tolerance",
    "nearest_value": "values",
    "logit_difference": "tolerance",
    "distributions": "tolerance",
    "answer_sets": "sets, classes=...",
}
"""Readouts that functions make, and what these ask for."""


def as_readout(name: str | Readout) -> Readout:
    """A readout by name (`softmax`, `logits`, `sigmoid`), or one of your own."""
    if isinstance(name, Readout):
        return name
    if name in MADE:
        raise PlotError(f"'{name}' is made with settings of its own: give readout=plot_ot.{name}({MADE[name]}).")
    if name not in READOUTS:
        unknown("readout", name, [*READOUTS, *MADE])
    return READOUTS[name]


# -- numbers ----------------------------------------------------------------------------------------------------------


def real_values(tolerance: float) -> Readout:
    """Outputs and labels are real numbers, one or several: right within `tolerance` of the label in every entry.

    φ is the output itself, the loss half the squared error in units of the tolerance.
    """
    _require_positive("tolerance", tolerance)
    return _measured(f"real values ± {tolerance:g}", lambda y: y, _entries, tolerance)


def logit_difference(tolerance: float, first: int | None = None, second: int | None = None) -> Readout:
    """The logit of one answer minus that of another is a real number, which the label gives; see `real_values`.

    `first` and `second` are the two output columns. Without them every label has three entries: the columns of its own
    two answers, and the difference. Labels about different columns are different answers.
    """
    _require_positive("tolerance", tolerance)
    if (first is None) != (second is None) or (first is not None and first == second):
        raise PlotError(f"Give two different columns, or none for labels that name them; found {first} and {second}.")
    fixed = None if first is None or second is None else (first, second)

    def pick(outputs: Tensor, labels: Tensor) -> Tensor:
        if fixed is not None:
            return outputs[..., fixed[0]] - outputs[..., fixed[1]]
        both: Tensor = outputs.gather(-1, labels[..., :2].long().expand(*outputs.shape[:-1], 2))
        return both[..., 0] - both[..., 1]

    def off(outputs: Tensor, labels: Tensor) -> Tensor:
        wanted = labels if fixed is not None else labels[..., 2]
        return (pick(outputs, labels) - wanted.to(outputs.dtype)) / tolerance

    def abstract(labels: Tensor, classes: int) -> Tensor:
        if labels.ndim != (1 if fixed else 2) or (fixed is None and labels.shape[1] != 3):
            wanted = "one number" if fixed else "two columns and a number"
            raise PlotError(f"The label of a logit difference must be {wanted}; found shape {tuple(labels.shape)}.")
        named = labels.new_tensor(fixed).expand(len(labels), 2) if fixed else labels[:, :2]
        one, other = (_one_hot(named[:, k], classes) for k in (0, 1))
        return (one - other) * (labels if fixed else labels[:, 2]).float().unsqueeze(1) / 2

    def neural(outputs: Tensor) -> Tensor:
        return outputs - outputs.mean(dim=-1, keepdim=True)

    return Readout(
        f"logit difference ± {tolerance:g}",
        neural,
        abstract,
        lambda y: y[..., fixed[0]] - y[..., fixed[1]] if fixed else y,
        lambda y, labels: 0.5 * off(y, labels).square(),
        linear=True,
        right=lambda y, labels: off(y, labels).abs() <= 1,
        accepts=_within(2 * tolerance) if fixed else _same_difference(2 * tolerance),
        logits=False,
        numbers=True,
    )


def nearest_value(values: Sequence[float]) -> Readout:
    """The output is one number, and the answer the nearest of `values`; labels are indices into these.

    φ is the output, the loss half the squared error in units of the smallest gap between values.
    """
    numbers = [v for v in values if isinstance(v, (int, float)) or getattr(v, "ndim", None) == 0]
    known = torch.tensor([float(v) for v in numbers])
    if len(known) < max(2, len(values)) or not bool(torch.isfinite(known).all()) or len(known.unique()) < len(known):
        raise PlotError(f"`values` must be at least two different finite numbers; found {list(values)!r:.100}.")
    gap = float(known.sort().values.diff().min())

    def number(outputs: Tensor) -> Tensor:
        if outputs.shape[-1] != 1:
            raise PlotError(f"A number has one output; the network has {outputs.shape[-1]}. Choose one with `output`.")
        return outputs

    def abstract(labels: Tensor, width: int) -> Tensor:
        _require_indices(labels, len(known), "values")
        return known[labels.long()].unsqueeze(1)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        target = known.to(outputs)[labels.long()]
        return 0.5 * ((number(outputs).squeeze(-1) - target) / gap).square()

    def decide(outputs: Tensor) -> Tensor:
        return (number(outputs) - known.to(outputs)).abs().argmin(dim=-1)

    return Readout("nearest value", number, abstract, decide, loss, linear=True, logits=False)


def distributions(tolerance: float) -> Readout:
    """Labels are probabilities, one for each output: right where no probability is off by more than `tolerance`.

    φ is the softmax, the loss the Kullback-Leibler divergence from the label.
    """
    _require_positive("tolerance", tolerance)

    def abstract(labels: Tensor, classes: int) -> Tensor:
        if labels.ndim != 2 or labels.shape[1] != classes:
            raise PlotError(f"Labels must be {classes} probabilities each; found shape {tuple(labels.shape)}.")
        if bool((labels < 0).any()) or not bool(
            torch.isclose(labels.sum(dim=1), labels.new_tensor(1.0), atol=1e-4).all()
        ):
            raise PlotError("Labels must be probabilities: none below 0, and summing to 1.")
        return labels.float()

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        target = labels.to(outputs.dtype)
        return (torch.xlogy(target, target) - target * outputs.log_softmax(dim=-1)).sum(dim=-1)

    def right(outputs: Tensor, labels: Tensor) -> Tensor:
        return ((outputs.softmax(dim=-1) - labels.to(outputs.dtype)).abs() <= tolerance).all(dim=-1)

    name = f"distribution ± {tolerance:g}"
    accepts = _within(2 * tolerance)
    return Readout(name, _softmax, abstract, _softmax, loss, right=right, accepts=accepts, logits=False, numbers=True)


def _softmax(outputs: Tensor) -> Tensor:
    return outputs.softmax(dim=-1)


# -- sets -------------------------------------------------------------------------------------------------------------


def answer_sets(sets: Sequence[Sequence[int]], *, classes: int, mass: float = 0.5) -> Readout:
    """Any answer of a set is right: labels are indices into `sets`, each a list of output columns.

    An output is right where the set holds more than `mass` of the probability. φ is the mass of every set, the loss
    minus its logarithm. A label whose set contains another's is also met by what meets the other.
    """
    members = torch.zeros(len(sets), classes)
    for k, some in enumerate(sets):
        if not some or min(some) < 0 or max(some) >= classes:
            raise PlotError(f"Set {k} must be a list of output columns in 0..{classes - 1}; found {list(some)!r:.80}.")
        members[k, list(some)] = 1
    if len(members.unique(dim=0)) < max(2, len(members)):
        raise PlotError(f"There must be at least two sets, all different; found {len(members)}.")
    if not 0 < mass < 1:
        raise PlotError(f"`mass` must lie between 0 and 1; found {mass}.")
    within = members @ (1 - members.T) == 0  # [a, b]: a is a subset of b

    def held(outputs: Tensor) -> Tensor:
        if outputs.shape[-1] != classes:
            raise PlotError(f"The sets are of {classes} answers, the network has {outputs.shape[-1]} outputs.")
        return outputs.softmax(dim=-1) @ members.to(outputs).T

    def abstract(labels: Tensor, width: int) -> Tensor:
        _require_indices(labels, len(sets), "sets")
        even = members / members.sum(dim=1, keepdim=True)
        return (even @ members.T)[labels.long()]

    def of(outputs: Tensor, labels: Tensor) -> Tensor:
        own = members.to(outputs)[labels.long()].expand(*outputs.shape[:-1], classes)
        return (outputs.log_softmax(dim=-1) + own.log()).logsumexp(dim=-1)

    def decide(outputs: Tensor) -> Tensor:
        """The smallest set that holds enough, or of all the one that holds most."""
        shares, size = held(outputs), members.sum(dim=1).to(outputs)
        enough = shares > mass
        return torch.where(enough, 2 - size / (classes + 1), shares - 1).argmax(dim=-1)

    def accepts(labels: Tensor, others: Tensor) -> Tensor:
        return within[others.long().cpu(), labels.long().cpu()].to(labels.device)

    return Readout(
        f"sets of answers > {mass:g}",
        held,
        abstract,
        decide,
        lambda y, labels: -of(y, labels),
        right=lambda y, labels: of(y, labels).exp() > mass,
        accepts=accepts,
        logits=False,
    )


def _require_indices(labels: Tensor, count: int, what: str) -> None:
    wrong = (labels != labels.long()) | (labels < 0) | (labels >= count)
    if bool(wrong.any()):
        raise PlotError(
            f"Labels are numbers of the `{what}`, 0 to {count - 1}; the causal model answers "
            f"{labels[wrong][:3].tolist()}. Let it answer by the number, or write it as a Hypothesis with these as its "
            f"`answers`, in their order."
        )


# -- parts ------------------------------------------------------------------------------------------------------------


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise PlotError(f"`{name}` must be a number above 0; found {value!r}.")


def _measured(
    name: str, neural: Callable[[Tensor], Tensor], abstract: Callable[[Tensor, int], Tensor], tolerance: float
) -> Readout:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return 0.5 * ((outputs - _like(outputs, labels)) / tolerance).square().sum(dim=-1)

    def right(outputs: Tensor, labels: Tensor) -> Tensor:
        return ((outputs - _like(outputs, labels)).abs() <= tolerance).all(dim=-1)

    return Readout(
        name,
        neural,
        abstract,
        lambda y: y,
        loss,
        linear=True,
        right=right,
        accepts=_within(2 * tolerance),
        logits=False,
        numbers=True,
    )


def _within(distance: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Whether two labels are so close in every entry that one output may be right for both."""

    def close(labels: Tensor, others: Tensor) -> Tensor:
        near = (labels.double() - others.double()).abs() <= distance
        return near if near.ndim == 1 else near.flatten(1).all(dim=1)

    return close


def _same_difference(distance: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Whether two labels name the same two answers, in either order, with differences that are so close."""

    def close(labels: Tensor, others: Tensor) -> Tensor:
        labels, others = labels.double(), others.double()
        same = (labels[:, :2] == others[:, :2]).all(dim=1) & ((labels[:, 2] - others[:, 2]).abs() <= distance)
        turned = (labels[:, :2] == others[:, [1, 0]]).all(dim=1) & ((labels[:, 2] + others[:, 2]).abs() <= distance)
        return same | turned

    return close


def _like(outputs: Tensor, labels: Tensor) -> Tensor:
    """Labels [..., pairs] of one number, or [..., pairs, c] of several, in the shape of outputs [..., pairs, c]."""
    target = labels.to(outputs.dtype)
    return target if target.ndim > 1 and target.shape[-2:] == outputs.shape[-2:] else target.unsqueeze(-1)


def _entries(labels: Tensor, width: int) -> Tensor:
    target = labels.unsqueeze(1) if labels.ndim == 1 else labels.flatten(1)
    if target.shape[1] != width:
        raise PlotError(f"Labels have {target.shape[1]} numbers, the network {width} outputs.")
    return target.float()
