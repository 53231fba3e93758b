"""A gated recurrent network as a subject: an edit at timestep t runs only the timesteps after t."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from plot_ot.errors import PlotError
from plot_ot.subjects.memory import sent
from plot_ot.subjects.open_edits import OpenEdit, Rewrites, opened
from plot_ot.subjects.places import Place
from plot_ot.subjects.protocol import Rewrite, Store, Subject, frozen
from plot_ot.subjects.shape import Shape


class GRUNet(nn.Module):
    """h_t = GRUCell(x_t, h_{t-1}) from h_{-1} = 0; every state is read by one head, the last one also by another.

    The outputs are y = [last, step_{n-1}, ..., step_0], the newest first (paper, Appendix B.2).
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(features, width)
        self.step_head = nn.Linear(width, 1)
        self.last_head = nn.Linear(width, 1)

    def forward(self, x: Float[Tensor, "rows steps features"]) -> Float[Tensor, "rows steps+1"]:
        h = x.new_zeros(len(x), self.cell.hidden_size)
        read = []
        for now in x.unbind(dim=1):
            h = self.cell(now, h)
            read.append(self.step_head(h))
        return torch.cat([self.last_head(h), *reversed(read)], dim=1)


class GRUSubject(Subject):
    """A `GRUNet` that reads `steps` timesteps; its places are the states `h0`, `h1`, ... after each of them.

    `encode` turns the bank's input rows into sequences [rows, steps, features]; by default a row holds all timesteps of
    the first feature, then all of the next. They are moved to the device of the weights.
    """

    cache = 4 << 20  # the gates are half of a response's bytes: they stay within a core's second-level cache

    def __init__(self, net: GRUNet, steps: int, *, encode: Callable[[Tensor], Tensor] | None = None) -> None:
        if not isinstance(net, GRUNet):
            raise PlotError(f"GRUSubject needs a GRUNet; found {type(net).__name__}. Use ModuleSubject for others.")
        if steps < 1:
            raise PlotError(f"A recurrent subject needs at least one timestep; found {steps}.")
        self.net = net
        self.steps = steps
        self.encode = encode or self._as_sequences
        self.places = tuple(Place(f"h{t}", net.cell.hidden_size, 1 + t, t) for t in range(steps))

    @property
    def device(self) -> torch.device:
        return self.net.cell.weight_hh.device

    @property
    def response_bytes(self) -> int:
        # the edited state, the state before a step and after it, and five vectors between them
        return 4 * 8 * self.net.cell.hidden_size

    def weights(self) -> Mapping[str, Tensor]:
        return self.net.state_dict()

    def structure(self) -> str:
        return repr(self.net)

    def record(self, inputs: Tensor, bases: Tensor | None = None) -> Store:
        return self.record_in_chunks(inputs, self._recorded)

    def shape(self, outputs: int) -> Shape:
        after, gates = tuple(range(self.steps - 1, -1, -1)), 3 * self.net.cell.hidden_size
        name, weights = type(self).__name__, self.parameters
        return Shape.small(name, self.places, after, self.steps, weights, outputs, shared=True, inner=gates)

    def resume(
        self, store: Store, rows: Tensor, start: Place, activation: Tensor, later: Mapping[str, Rewrite]
    ) -> Tensor:
        t = self.places.index(self.place(start.name))
        shape = activation.shape[:2]
        x = self._sequences(store.inputs[rows.to(store.inputs.device)])
        # Directions first, [d, variants, pairs]: gates are whole blocks of memory, and BLAS is much faster on a wide
        # product with few rows than on a tall one with few columns.
        h = activation.permute(2, 0, 1).contiguous()
        read = [_linear(self.net.step_head, h)]
        for place in self.places[t + 1 :]:
            h = _step(self.net.cell, x[:, place.position], h)
            if place.name in later:
                h = later[place.name](h.permute(1, 2, 0)).permute(2, 0, 1).contiguous()
            read.append(_linear(self.net.step_head, h))
        earlier = store.outputs[sent(rows, store.outputs.device), self.steps - t + 1 :].T.unsqueeze(1).expand(t, *shape)
        return torch.cat([_linear(self.net.last_head, h), *reversed(read), earlier]).permute(1, 2, 0)

    @contextlib.contextmanager
    def intervene(self, rewrites: Rewrites) -> Iterator[OpenEdit]:
        at = {self.place(name).position: rewrite for name, rewrite in rewrites.items()}
        step = 0

        def restart(*_: object) -> None:
            nonlocal step
            step = 0 if edit.acts() else step

        def count(_: nn.Module, __: object, h: Tensor) -> Tensor:
            nonlocal step
            if not edit.acts():
                return h
            rewrite, step = at.get(step), step + 1
            return h if rewrite is None else rewrite(h)

        with opened(self.net) as edit, contextlib.ExitStack() as hooks:
            hooks.callback(self.net.register_forward_pre_hook(restart).remove)
            hooks.callback(self.net.cell.register_forward_hook(count).remove)
            yield edit

    # -- parts -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _recorded(self, inputs: Tensor) -> Store:
        kept: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[Tensor], Tensor]:
            return lambda h: kept.setdefault(name, h)

        with frozen(self.net), self.intervene({p.name: keep(p.name) for p in self.places}):
            outputs = self.net(self._sequences(inputs))
        return Store(inputs, kept, outputs)

    def _sequences(self, rows: Tensor) -> Float[Tensor, "rows steps features"]:
        x = sent(self.encode(rows), self.device)
        expected = len(rows), self.steps, self.net.cell.input_size
        if x.shape != expected:
            raise PlotError(f"Inputs must encode to [rows, steps, features] = {expected}; found {tuple(x.shape)}.")
        return x

    def _as_sequences(self, rows: Tensor) -> Float[Tensor, "rows steps features"]:
        features = self.net.cell.input_size
        if rows.ndim != 2 or rows.shape[1] != self.steps * features:
            raise PlotError(
                f"Inputs must be [rows, {self.steps * features}] ({features} features of {self.steps} timesteps, one "
                f"feature after another); found {tuple(rows.shape)}. Pass `encode` for another layout."
            )
        weight = self.net.cell.weight_ih
        encoded: Tensor = sent(rows, weight.device, weight.dtype).unflatten(1, (features, self.steps)).mT
        return encoded


def _linear(head: nn.Linear, h: Float[Tensor, "d variants pairs"]) -> Float[Tensor, "out variants pairs"]:
    product = torch.addmm(head.bias.detach().unsqueeze(1), head.weight.detach(), h.flatten(1))
    logits: Tensor = product.unflatten(1, h.shape[1:])
    return logits


def _step(
    cell: nn.GRUCell, x: Float[Tensor, "pairs features"], h: Float[Tensor, "d variants pairs"]
) -> Float[Tensor, "d variants pairs"]:
    """The cell with its weights held fixed: r, z = σ(W x + U h), n = tanh(W x + r * U h), h <- n + z * (h - n)."""
    d, flat = len(h), h.flatten(1)
    U, bias = cell.weight_hh.detach(), cell.bias_hh.detach()
    both = torch.cat([cell.bias_ih[: 2 * d] + bias[: 2 * d], cell.bias_ih[2 * d :]]).detach()
    seen = torch.addmm(both.unsqueeze(1), cell.weight_ih.detach(), x.T).unsqueeze(1)
    r, z = (seen[: 2 * d] + (U[: 2 * d] @ flat).unflatten(1, h.shape[1:])).sigmoid_().split(d)
    inner = torch.addmm(bias[2 * d :].unsqueeze(1), U[2 * d :], flat).unflatten(1, h.shape[1:])
    return torch.lerp(torch.addcmul(seen[2 * d :], r, inner).tanh_(), h, z)
