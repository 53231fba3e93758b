"""Edits on live networks prove themselves: none is lost to another thread, task or compiled pass without a word."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from decoders import ANSWERS, BASE, SOURCE, encode, network
from nets import hooked_subject, mlp, rand
from plot_ot import CausalModel, CausalSubject, DecoderSubject, MLPSubject, ModuleSubject, record_pairs
from plot_ot.edits import Frame
from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle
from plot_ot.subjects import GRUNet, GRUSubject, Subject
from plot_ot.subjects.open_edits import apart, held, opened
from refusals import assert_refused

X, SOURCES = rand(1, 4, 5), rand(2, 4, 5)


def whole(subject: Subject, *names: str) -> Handle:
    """Swaps whole vectors."""
    places = [subject.place(n) for n in names]
    return Handle("z", tuple(Edit(p, Frame.identity(p.width), torch.ones(p.width)) for p in places), subject.identity())


def made(seed: int = 0) -> tuple[nn.Sequential, ModuleSubject, Handle]:
    """A network whose second layer a handle swaps: its output under the handle is the source's."""
    net = mlp(5, 6, 6, 3, seed=seed)
    subject = hooked_subject(net)
    return net, subject, whole(subject, "layer2")


def hooks_of(net: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


def in_thread(work: Callable[[], object]) -> object:
    """What the work gives or raises, in another thread."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as e:
            found.append(e)

    thread = threading.Thread(target=run, name="the other")
    thread.start()
    thread.join(60)
    assert found, "the thread hangs"
    return found[0]


# -- an edit that never happened ----------------------------------------------------------------------------------


def test_f4_an_edit_that_never_happened_is_refused_when_it_closes():
    net, subject, handle = made()
    copied = copy.deepcopy(net)
    unrun = r"never happened at layer2\. The model was not run while the handle was open"
    with pytest.raises(PlotError, match=unrun), handle.on(subject, SOURCES):
        pass
    with pytest.raises(PlotError, match="not by its own forward pass"), handle.on(subject, SOURCES):
        copied(X)
    both = whole(subject, "layer1", "layer2")
    with pytest.raises(PlotError, match="reaches layer1 only"), both.on(subject, SOURCES):
        net[:2](X)
    with pytest.raises(ValueError, match="of the user"), handle.on(subject, SOURCES):
        raise ValueError("of the user")  # an error of the user's own is not replaced
    assert hooks_of(net) == 0
    with handle.on(subject, SOURCES):
        torch.testing.assert_close(net(X), net_of(net, SOURCES))


def net_of(net: nn.Module, inputs: Tensor) -> Tensor:
    with apart():
        return net(inputs)


@pytest.mark.parametrize("how", ["compiled before", "compiled inside", "in place"])
def test_f4_compiled_models_are_edited_like_others(how):
    net, subject, handle = made()
    clean, expected = net(X), net(SOURCES)
    compiled = net
    if how == "in place":
        net.compile(backend="eager")
    elif how == "compiled before":
        compiled = torch.compile(net, backend="eager")
    compiled(X)
    with handle.on(subject, SOURCES):
        if how == "compiled inside":
            compiled = torch.compile(net, backend="eager")
        torch.testing.assert_close(compiled(X), expected)
        with handle.on(subject, SOURCES.flip(0)):
            torch.testing.assert_close(compiled(X), expected.flip(0))
        torch.testing.assert_close(compiled(X), expected)
    torch.testing.assert_close(compiled(X), clean)
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_f4_a_compiled_language_model_is_edited_like_others():
    model = network("llama")
    subject = DecoderSubject(model, encode, ANSWERS)
    ids, mask = encode(BASE)
    handle = whole(subject, "block_output.1")
    with torch.no_grad(), handle.on(subject, SOURCE):
        expected = model(input_ids=ids, attention_mask=mask).logits[:, -1]
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        clean = compiled(input_ids=ids, attention_mask=mask).logits[:, -1]
        with handle.on(compiled, dict(zip(("input_ids", "attention_mask"), encode(SOURCE), strict=True))):
            found = compiled(input_ids=ids, attention_mask=mask).logits[:, -1]
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, clean)


# -- threads ------------------------------------------------------------------------------------------------------


def lost(net: nn.Module, subject: Subject, handle: Handle, times: int) -> int:
    """How many of so many edits had no effect, or the wrong one."""
    with handle.on(subject, SOURCES):
        expected = net(X)
    torch.testing.assert_close(expected, net(SOURCES))
    wrong = 0
    for _ in range(times):
        with handle.on(subject, SOURCES):
            wrong += not torch.equal(net(X), expected)
    return wrong


def two_threads(times: int) -> None:
    """One thread edits its network; the other applies handles to another network all the while."""
    net, subject, handle = made(0)
    _, others, theirs = made(1)
    stop = threading.Event()

    def busy() -> int:
        count = 0
        while not stop.is_set():
            theirs.apply(others, X, SOURCES)
            count += 1
        return count

    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(busy()))
    thread.start()
    try:
        assert lost(net, subject, handle, times) == 0
    finally:
        stop.set()
        thread.join(60)
    assert found
    assert found[0] > 0


def test_f3_a_handle_applied_in_another_thread_does_not_undo_an_open_edit():
    net, subject, handle = made()
    _, others, theirs = made(1)
    inside, go_on = threading.Event(), threading.Event()

    def slow(rows: Tensor) -> Tensor:
        inside.set()
        assert go_on.wait(60)
        return rows

    others.encode = slow
    thread = threading.Thread(target=lambda: theirs.apply(others, X, SOURCES))
    with handle.on(subject, SOURCES):
        thread.start()
        assert inside.wait(60)  # the other thread is in the middle of `apply`
        try:
            edited = net(X)
        finally:
            go_on.set()
            thread.join(60)
    torch.testing.assert_close(edited, net(SOURCES))


def test_f3_no_edit_is_lost_beside_another_thread():
    two_threads(30)


def test_f3_two_threads_that_edit_side_by_side_lose_nothing():
    assert side_by_side(40) == [0, 0]


def side_by_side(times: int) -> list[object]:
    """What is lost in each of two threads that edit a network of their own."""
    nets = [made(k) for k in range(2)]
    found: list[object] = []
    threads = [threading.Thread(target=lambda n=n: found.append(lost(*n, times))) for n in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.long
def test_f3_no_edit_of_a_thousand_is_lost_beside_another_thread():
    two_threads(1000)
    assert side_by_side(1000) == [0, 0]


def test_an_edit_acts_in_the_thread_that_opened_it_and_says_so():
    net, subject, handle = made()
    with handle.on(subject, SOURCES):
        elsewhere, here = in_thread(lambda: net(X)), net(X)
    torch.testing.assert_close(elsewhere, net(X))
    torch.testing.assert_close(here, net(SOURCES))
    with pytest.raises(PlotError, match="another thread or task"), handle.on(subject, SOURCES):
        in_thread(lambda: net(X))


def test_f13_a_network_that_another_thread_edits_or_records_is_refused():
    net, subject, handle = made()
    other = hooked_subject(net)
    with handle.on(subject, SOURCES):
        for work in (
            lambda: handle.apply(subject, X, SOURCES),
            lambda: handle.on(other, SOURCES),
            lambda: hooked_subject(net),
            lambda: record_pairs(MLPSubject(net), (X, SOURCES)),
        ):
            refused = in_thread(work)
            assert isinstance(refused, PlotError), refused
            assert "by thread 'MainThread': one thread at a time" in str(refused)
        net(X)
    assert isinstance(in_thread(lambda: handle.apply(subject, X, SOURCES)), Tensor)  # taking turns is fine


def test_f13_a_language_model_that_another_thread_edits_is_refused():
    model = network("llama")
    subject = DecoderSubject(model, encode, ANSWERS)
    handle = whole(subject, "block_output.1")
    ids, mask = encode(BASE)
    with handle.on(subject, SOURCE):
        assert "one thread at a time" in str(in_thread(lambda: handle.apply(subject, BASE, SOURCE)))
        model(input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"use_cache": False}], ids=["cache", "beams", "no cache"])
def test_f3_tasks_that_generate_side_by_side_each_see_their_own_edit(options):
    """Threads of `asyncio.to_thread` take turns on one language model, each under an edit of its own."""
    model = network("llama")
    model.generation_config.eos_token_id = None
    subject = DecoderSubject(model, encode, ANSWERS)
    handle = whole(subject, "block_output.1")
    ids, mask = encode(BASE[:1])

    def generated() -> list[int]:
        made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False, **options)
        return made[0].tolist()

    def under(k: int) -> list[int]:
        with handle.on(subject, SOURCE[k : k + 1]):
            return generated()

    expected, clean = [under(k) for k in range(3)], generated()

    async def one(k: int, turn: asyncio.Lock) -> list[int]:
        await asyncio.sleep(0)
        async with turn:
            return await asyncio.to_thread(under, k)

    async def everything() -> list[list[int]]:
        turn = asyncio.Lock()
        return await asyncio.gather(*(one(k, turn) for k in range(3)))

    assert asyncio.run(everything()) == expected
    assert generated() == clean
    assert any(e != clean for e in expected)
    assert hooks_of(model) == 0


def test_f4_an_error_in_generation_under_a_compiled_model_leaves_nothing():
    model = network("llama")
    subject = DecoderSubject(model, encode, ANSWERS)
    ids, mask = encode(BASE)
    compiled = torch.compile(model, backend="eager")
    clean = compiled(input_ids=ids, attention_mask=mask).logits

    def stop(*_: object) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), whole(subject, "block_output.1").on(subject, SOURCE):
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3, stopping_criteria=[stop])
    assert hooks_of(model) == 0
    assert torch._dynamo.eval_frame._stance.stance == "default"
    torch.testing.assert_close(compiled(input_ids=ids, attention_mask=mask).logits, clean)


# -- tasks, nesting, errors ---------------------------------------------------------------------------------------


def test_tasks_that_take_turns_each_see_their_own_edit():
    net, subject, handle = made()
    expected = {k: net(SOURCES[k].expand(4, 5)) for k in range(3)}

    async def one(k: int) -> None:
        with handle.on(subject, SOURCES[k : k + 1]):
            for _ in range(5):
                await asyncio.sleep(0)
                torch.testing.assert_close(net(X), expected[k])

    async def everything() -> None:
        await asyncio.gather(*map(one, range(3)))
        with handle.on(subject, SOURCES):  # a task that is started under an edit runs under it
            child = asyncio.create_task(asyncio.to_thread(net, X))
            torch.testing.assert_close(await child, net(SOURCES.clone()))

    clean = net(X)
    asyncio.run(everything())
    torch.testing.assert_close(net(X), clean)


def test_rows_of_a_moving_place_are_those_of_the_task_that_opened_the_edit():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.states = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.states(x).flatten(1)

    net = Tokens()
    inputs = rand(5, 2, 3, 4)
    rows = torch.tensor([[0], [1]])
    subject = ModuleSubject(
        net, ["states"], rows, position=lambda r: r[:, 0], encode=lambda r: inputs[r[:, 0] % 2], output=lambda y: y
    )
    place = subject.place("states")
    handle = Handle("z", (Edit(place, Frame.identity(4), torch.ones(4)),), subject.identity())

    async def one(at: int) -> None:
        base = torch.tensor([[at], [at]])
        with handle.on(subject, rows[1:], base=base):
            await asyncio.sleep(0)
            found = net(inputs).unflatten(1, (3, 4))
            await asyncio.sleep(0)
        changed = (found != inputs).any(dim=2)
        assert changed[0].tolist() == [k == at for k in range(3)]

    async def both() -> None:
        await asyncio.gather(one(0), one(1))

    asyncio.run(both())


def test_nested_edits_close_in_any_order_and_leave_nothing():
    net, subject, handle = made()
    outer, inner = handle.on(subject, SOURCES), whole(subject, "layer1").on(subject, SOURCES)
    outer.__enter__()
    inner.__enter__()
    torch.testing.assert_close(net(X), net(SOURCES))
    outer.__exit__(None, None, None)
    with apart():
        expected = net(SOURCES)
    torch.testing.assert_close(net(X), expected)  # layer1 alone carries everything as well
    inner.__exit__(None, None, None)
    assert hooks_of(net) == 0
    assert not torch.allclose(net(X), expected)


def test_an_error_inside_leaves_the_network_as_it_was_and_free():
    net, subject, handle = made()
    clean = net(X)
    with pytest.raises(RuntimeError, match="mat1"), handle.on(subject, SOURCES):
        net(torch.ones(4, 9))
    assert hooks_of(net) == 0
    torch.testing.assert_close(net(X), clean)
    assert isinstance(in_thread(lambda: handle.apply(subject, X, SOURCES)), Tensor)


@pytest.mark.parametrize("kind", ["module", "gru", "causal", "decoder"])
def test_f25_an_unknown_place_leaves_no_hook(kind):
    net: nn.Module = nn.Identity()
    if kind == "module":
        net, subject, _ = made()
    elif kind == "gru":
        net = GRUNet(2, 4)
        subject = GRUSubject(net, 3)
    elif kind == "decoder":
        net = network("llama")
        subject = DecoderSubject(net, encode, ANSWERS)
    else:
        subject = CausalSubject(CausalModel(["a"], {"b": lambda a: a, "y": lambda b: b}, "y"), torch.arange(2)[:, None])
    assert_refused(lambda: subject.intervene({"bogus": lambda a: a}).__enter__(), ["Unknown place 'bogus'"])
    assert hooks_of(net) == 0
    assert isinstance(in_thread(lambda: held(net).__enter__()), type(None))  # not held by the main thread


def test_an_open_edit_acts_only_where_it_was_opened():
    net = object()
    with opened(net) as edit:
        assert edit.acts()
        with apart():
            assert not edit.acts()
            assert not edit.ran_elsewhere
            with opened(net) as inner:
                assert inner.acts()
                assert not edit.acts()
        assert not in_thread(edit.acts)
        assert edit.ran_elsewhere
    assert not edit.acts()
