"""Threads: small networks compute with one, large ones with all, and the process keeps its number."""

import pytest
import torch

import plot_ot
from nets import mlp, planted_plane
from plot_ot.subjects import MLPSubject
from plot_ot.subjects.threads import LARGE, enough_threads, threads_that_help


@pytest.fixture
def two():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(("width", "threads"), [(8, 1), (2048, 2)])
def test_only_large_networks_take_more_than_one_thread(width, threads):
    subject = MLPSubject(mlp(4, width, width, 2))
    assert (subject.shape(1).products >= LARGE) == (threads > 1)
    assert threads_that_help(subject) == threads
    with enough_threads(subject):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2


def test_one_thread_stays_one_for_a_large_network():
    assert torch.get_num_threads() == 1  # the tests' own choice
    with enough_threads(MLPSubject(mlp(4, 2048, 2048, 2))):
        assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("two")
def test_the_number_comes_back_after_an_error():
    with pytest.raises(RuntimeError), enough_threads(MLPSubject(mlp(4, 8, 2))):
        raise RuntimeError
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two")
def test_localize_runs_a_small_network_with_one_thread_and_gives_the_others_back(monkeypatch):
    planted = planted_plane()
    seen, plain = [], MLPSubject.resume
    monkeypatch.setattr(MLPSubject, "resume", lambda *args: seen.append(torch.get_num_threads()) or plain(*args))
    rows = torch.cartesian_prod(*[torch.arange(3)] * 4)
    plot_ot.localize(planted.subject, planted.causal, rows, size=40, progress=False)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2
