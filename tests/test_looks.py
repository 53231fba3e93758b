"""Early answers: the error spent over the looks, what is recorded once, and what ends the looking."""

import numpy as np
import pytest
import torch

import plot_ot
from plot_ot import early
from plot_ot.abstract.admission import Admission
from plot_ot.abstract.growing import GrowingBanks
from plot_ot.engine import InProcess, record_shared
from plot_ot.engine.growing import GrowingRecording
from plot_ot.judging import intervals
from plot_ot.judging.gates import KEEPS, Answer, Gate
from plot_ot.judging.intervals import Bootstrap, Interval, at_least, at_most, missing_at_most
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import Verdict
from plot_ot.localizing import judged
from plot_ot.stages.ways import LookFurther
from plot_ot.studies.looks import FIRST, SPENT, looks, settled, waits_for_pairs
from plot_ot.subjects.protocol import record
from test_localize import HYPOTHESIS, ROWS, parity_net
from test_own_model import LAST, WORDS, last_word, saved, what_it_says
from truth.campaigns import KINDS
from truth.looking import CASES, Pairs, studies

# -- spending ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(20, [20]), (50, [50]), (80, [40, 80]), (200, [40, 80, 200]), (1000, [40, 80, 160, 320, 640, 1000])],
)
def test_looks_double_and_spend_the_error_once(most, sizes):
    planned = looks(most)
    assert [look.size for look in planned] == sizes
    assert [look.last for look in planned] == [False] * (len(sizes) - 1) + [True]
    assert sum(look.searches * look.error for look in planned) == pytest.approx(SPENT)
    assert [look.searches for look in planned] == [1] + [2] * (len(sizes) - 1)
    answers = ["yes"] + ["yes or no"] * (len(sizes) - 2) if len(sizes) > 1 else []
    assert [look.answers for look in planned] == [*answers, "any"]
    assert SPENT <= 0.05
    assert all(look.searches * look.error <= SPENT / 2 for look in planned) or len(planned) == 1
    assert sizes[0] == min(FIRST, most) or len(sizes) == 1


def test_intervals_widen_as_less_may_miss_and_are_the_usual_ones_otherwise():
    drawn = np.linspace(0, 1, 10_001)
    usual = Interval.of(0.5, drawn, 50)
    assert (usual.low, usual.high) == pytest.approx((0.025, 0.975))
    assert at_most(0.0, 30) == 0.1
    with missing_at_most(0.01):
        wide = Interval.of(0.5, drawn, 50)
        assert (wide.low, wide.high) == pytest.approx((0.005, 0.995))
        assert (1 - at_most(0.0, 1000)) ** 1000 == pytest.approx(0.01, rel=0.05)  # what it promises
    assert Interval.of(0.5, drawn, 50) == usual
    bank = Pairs(np.arange(40), np.zeros(40, dtype=np.int64), 1)
    with missing_at_most(0.01):
        assert len(Bootstrap(bank).weights) == 5000  # the ends of such intervals need more draws
    assert len(Bootstrap(bank).weights) == 1000


@pytest.mark.parametrize("name", CASES)
def test_simulated_studies_seldom_claim_by_mistake_and_their_intervals_hold(name):
    """Few here; `benchmarks/early_answers.py simulate` runs thousands."""
    count = 20
    ended = list(studies(CASES[name], count, seed=1001))
    if not CASES[name].placed:
        assert sum(o.status.found for o in ended) <= 2  # 1 % expected at most: three of 20 happen in 1 of 1,000 tests
    assert sum(o.covered for o in ended) >= 17  # 98 % expected: fewer happen in 6 of 10,000 tests


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_over_thousands_of_studies_claims_and_intervals_keep_their_promise(name):
    count = 2000
    ended = list(studies(CASES[name], count, seed=1002))
    if not CASES[name].placed:
        assert sum(o.status.found for o in ended) <= 0.01 * count
    assert sum(o.covered for o in ended) >= 0.95 * count


# -- when to stop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "before", "ends"),
    [
        (Status.PLACED, None, True),
        (Status.COMPACT, Status.ABSENT, True),
        (Status.OUTPUT, None, True),
        (Status.UNDECIDED, None, False),
        (Status.UNDECIDED, Status.UNDECIDED, False),
        (Status.ABSENT, None, False),
        (Status.ABSENT, Status.ABSENT, True),
        (Status.IN_PART, Status.ABSENT, False),
        (Status.DECODABLE, Status.DECODABLE, True),
    ],
)
def test_a_yes_ends_the_looking_and_a_no_must_be_said_twice(now, before, ends):
    assert settled(now, before) is ends


def gate(name, answer, value=0.9):
    return Gate(name, Answer(answer), value, value - 0.1, value + 0.1, 0.8, "")


@pytest.mark.parametrize(
    ("status", "accuracy", "gates", "waits"),
    [
        ("undecided", 0.9, [gate("works", "cannot say"), gate("compact", "fails")], True),
        ("undecided", 0.9, [gate("works", "holds"), gate("leaves the rest alone", "cannot say")], True),
        ("undecided", 0.79, [gate("works", "cannot say")], False),  # another place may do better
        ("undecided", 0.9, [gate("works", "fails"), gate("beats copying the source", "cannot say")], False),
        ("undecided", None, [], False),  # too few pairs for any gate
        ("not localized", 0.9, [gate("leaves the rest alone", "fails")], False),
        ("placed", 0.9, [gate("works", "holds")], False),
    ],
)
def test_a_handle_that_nothing_speaks_against_only_waits_for_pairs(status, accuracy, gates, waits):
    evidence = {} if accuracy is None else {"handle": accuracy}
    assert waits_for_pairs(Verdict("x", Status(status), "", evidence, tuple(gates))) is waits


# -- banks and recordings that grow -----------------------------------------------------------------------------------


def test_an_input_keeps_its_split_and_is_asked_once():
    asked = []

    def right(rows):
        asked.extend(map(tuple, rows.tolist()))
        return rows[:, 0] == 0  # half of all rows

    banks = GrowingBanks(HYPOTHESIS, ROWS, Admission(right), torch.Generator().manual_seed(1000))
    banks.grow(60)
    assert 60 <= len(banks.rows) < 120
    assert not banks.exhausted
    assert "more were not needed" in banks.notes[0]
    first = banks.draw((20, 20, 40))
    before = len(asked)
    banks.grow(60)
    assert len(asked) == before  # enough were there
    banks.grow(10_000)
    assert banks.exhausted
    assert len(asked) == len(set(asked)) == len(ROWS)
    second = banks.draw((20, 20, 40))
    held = {"fit": lambda s: [s.fit], "calibration": lambda s: [s.calibration], "test": lambda s: s.test.values()}

    def inputs(splits, split):
        return {tuple(r) for b in held[split](splits) for x in (b.base, b.source) for r in x.tolist()}

    for split in held:
        for other in held:
            assert split == other or not inputs(first, split) & inputs(second, other)
    assert sum(len(b) for (v, _), b in first.test.items() if v == HYPOTHESIS.variables[0]) == 40


def test_a_network_that_is_right_too_seldom_is_refused_after_all_inputs():
    nothing = Admission(lambda rows: torch.zeros(len(rows), dtype=torch.bool))
    banks = GrowingBanks(HYPOTHESIS, ROWS, nothing, torch.Generator())
    with pytest.raises(plot_ot.PlotError, match=f"answers 0 of {len(ROWS)} distinct inputs"):
        banks.grow(60)


def test_what_was_recorded_in_portions_is_what_one_recording_has():
    subject = plot_ot.MLPSubject(parity_net("ab", "cd"))
    growing = GrowingRecording(subject, InProcess().crew(subject), len(ROWS))
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(1000))
    for some in ROWS[order].split(50):
        growing.add(some)
    bank = plot_ot.draw_pairs(HYPOTHESIS, ROWS, "balanced", 80, torch.Generator().manual_seed(1001))
    [found], [whole] = growing.recordings([bank]), record(subject, bank)
    for place in subject.places:
        torch.testing.assert_close(found.base_at(place), whole.base_at(place))
        torch.testing.assert_close(found.source_at(place), whole.source_at(place))
    torch.testing.assert_close(found.base_outputs, whole.base_outputs)
    handle = plot_ot.full_patch(HYPOTHESIS.variables[0], [subject.places[0]], subject)
    [shared] = record_shared(InProcess().crew(subject), subject, [bank])
    readout = plot_ot.as_readout("softmax")
    for other in (found, shared):
        assert torch.equal(
            plot_ot.stages.correct(other, handle, readout), plot_ot.stages.correct(whole, handle, readout)
        )
    few = GrowingRecording(subject, InProcess().crew(subject), len(ROWS))
    few.add(ROWS[:10])
    with pytest.raises(plot_ot.PlotError, match="not recorded"):
        few.recordings([bank])


# -- localize ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def few_random_handles(monkeypatch):
    monkeypatch.setattr("plot_ot.judging.bench.RANDOM_HANDLES", 5)


def counted(subject, monkeypatch, name="record_part"):
    """The inputs that a subject runs, in their order."""
    ran, run = [], getattr(subject, name)

    def counting(inputs, *more):
        ran.extend(map(tuple, inputs.tolist()))
        return run(inputs, *more)

    monkeypatch.setattr(subject, name, counting)
    return ran


def test_a_clear_variable_is_placed_at_the_first_look_and_every_input_runs_once(monkeypatch):
    subject = plot_ot.MLPSubject(parity_net("ab", "cd"))
    ran = counted(subject, monkeypatch)
    told = []
    result = plot_ot.localize(subject, HYPOTHESIS, ROWS, size=200, budget="auto", progress=told.append)
    assert all(v.status.found for v in result.verdicts.values())
    assert [look["pairs"] for look in result.looks] == [FIRST]
    assert result.looks[0]["error"] == looks(200)[0].error
    assert len(ran) == len(set(ran)) < len(ROWS)
    assert not told  # there was nothing provisional
    assert "one look with 40 pairs per bank" in str(result)
    fixed = plot_ot.localize(subject, HYPOTHESIS, ROWS, budget=60)
    assert fixed.looks == []
    assert fixed.config["size"] == 60


def test_a_no_is_told_as_provisional_and_said_again_with_more_pairs(monkeypatch, tmp_path):
    subject = plot_ot.MLPSubject(parity_net("ac", "bd"))
    ran = counted(subject, monkeypatch)
    told = []
    result = plot_ot.localize(subject, HYPOTHESIS, ROWS, size=200, budget="auto", progress=told.append)
    assert {str(v.status) for v in result.verdicts.values()} == {"not localized"}
    assert [look["pairs"] for look in result.looks] == [40, 80]
    assert [t.config["size"] for t in told] == [40]
    assert len(ran) == len(set(ran))
    parts = [look["seconds"] for look in result.looks]
    assert result.seconds == pytest.approx(sum(parts)) == pytest.approx(sum(result.waited.values()))
    result.save(tmp_path / "run")
    again = plot_ot.Result.load(tmp_path / "run")
    assert again.looks == result.looks
    assert again.seconds == pytest.approx(result.seconds, abs=5)


def test_a_look_never_tests_on_less_than_a_verdict_can_come_from():
    for look in looks(1000):
        inputs, (*_, tests) = round(0.4 * look.rows), look.sizes
        with missing_at_most(look.error):
            assert at_least(KEEPS) <= inputs < tests / 2  # more pairs of each kind than inputs


def test_without_further_inputs_all_pairs_are_drawn_at_once(monkeypatch):
    subject = plot_ot.MLPSubject(parity_net("ac", "bd"))
    monkeypatch.setattr("plot_ot.early.settled", lambda now, before: False)
    result = plot_ot.localize(subject, HYPOTHESIS, ROWS[:90], size=200, budget="auto", progress=False)
    assert [look["pairs"] for look in result.looks] == [40, 200]


def test_a_decoder_is_recorded_once_per_prompt(monkeypatch):
    known = KINDS["decoder layer"](1000)
    ran = counted(known.subject, monkeypatch, "_record")
    result = plot_ot.localize(known.subject, known.causal, known.rows, seed=1000, size=200, budget="auto")
    assert len(ran) == len(set(ran)) <= len(known.rows)
    assert all(v.status.found for v in result.verdicts.values())


def test_words_of_a_language_model_can_be_looked_at_early_and_again(tmp_path, monkeypatch):
    folder = saved("llama", tmp_path / "model")
    says = what_it_says(folder)
    inputs = [{"first": a, "last": b} for a, b in says if says[a, b] in WORDS]
    monkeypatch.setattr(early, "settled", lambda now, before: False)
    monkeypatch.setattr("plot_ot.studies.looks.FIRST", 20)
    monkeypatch.setattr("plot_ot.studies.looks.MORE_ROWS", 0)
    result = plot_ot.localize(plot_ot.load_subject(folder), last_word(says), inputs, size=60, budget="auto")
    assert len(result.looks) >= 2  # the first one also asked for a read-out of the whole vocabulary
    assert set(result.handles["asked"].values) <= set(LAST)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (lambda: (ROWS[:200], ROWS[:200].flip(0)), {"budget": "auto"}, "needs inputs, and found pairs"),
        (lambda: splits(), {"budget": "auto"}, "needs inputs, and found banks"),
        (lambda: ROWS, {"budget": "auto", "engine": object()}, "works in this process"),
        (lambda: ROWS, {"budget": 0}, "found 0"),
        (lambda: ROWS, {"budget": True}, "found True"),
        (lambda: ROWS, {"budget": "much"}, "found 'much'"),
        (lambda: ROWS, {"budget": 50, "size": 60}, "not both: found 50 and 60"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(given, options, said):
    with pytest.raises(plot_ot.PlotError, match=said):
        plot_ot.localize(plot_ot.MLPSubject(parity_net("ab", "cd")), HYPOTHESIS, given(), **options)


def splits() -> plot_ot.Splits:
    generator = torch.Generator().manual_seed(1000)
    pools = ROWS[torch.randperm(len(ROWS), generator=generator)].split([120, 68, 68])
    fit, calibration, test = (plot_ot.draw_pairs(HYPOTHESIS, pool, "balanced", 40, generator) for pool in pools)
    return plot_ot.Splits.checked(fit, calibration, test.by_variable())


# -- what a look asks -------------------------------------------------------------------------------------------------


@pytest.fixture
def searched(monkeypatch):
    """The searches that are made, in their order: what they look for and where, and how often they may miss."""
    made = []

    def spied(question, banks, size, waited, begun, recorder, looked):
        made.append((looked, size, intervals._error.get()))
        return judged(question, banks, size, waited, begun, recorder, looked)

    monkeypatch.setattr(early, "judged", spied)
    return made


def answered(monkeypatch, answers, waits):
    """Whether variables have their answer, one after the other, and whether undecided ones only wait for pairs."""
    said = iter(answers)
    monkeypatch.setattr(early, "settled", lambda now, before: next(said))
    monkeypatch.setattr(early, "waits_for_pairs", lambda verdict: waits)


def test_what_waits_for_pairs_is_looked_for_where_it_was_found(monkeypatch, searched, tmp_path):
    answered(monkeypatch, [True, False, True], waits=True)
    told = []
    subject = plot_ot.MLPSubject(parity_net("ab", "cd"))
    result = plot_ot.localize(subject, HYPOTHESIS, ROWS, size=200, budget="auto", progress=told.append)
    first, second = HYPOTHESIS.variables
    (everywhere, *_), (closer, size, error) = searched
    assert everywhere.variables == (first, second)
    assert everywhere.places is None
    assert closer.variables == (second,)
    [provisional] = told
    assert closer.places == {second: tuple(e.place for e in provisional.handles[second].edits)}
    assert (size, error) == (80, looks(200)[1].error)
    assert (everywhere.sparing.answers, closer.sparing.answers) == ("yes", "yes")
    assert everywhere.sparing.sampled
    assert closer.sparing.sampled
    # random handles are those of the look that found the handle, and more of them come from the same banks
    assert closer.sparing.random.found[second] is everywhere.sparing.random.found[second]
    assert closer.sparing.random.banks is everywhere.sparing.random.banks
    assert len(closer.sparing.random.banks[0]) == len(closer.sparing.random.banks[1]) == 40
    assert closer.method.steps <= everywhere.method.steps
    assert [(look["pairs"], look["places"]) for look in result.looks] == [(40, "all"), (80, "the last")]
    assert [list(look["verdicts"]) for look in result.looks] == [[first, second], [second]]
    # the first variable stays as it was, the second is as it was seen last; the map of all places stays
    assert result.handles[first] is provisional.handles[first]
    assert result.handles[second] is not provisional.handles[second]
    assert result.verdicts[second].evidence["discriminating"] > result.verdicts[first].evidence["discriminating"]
    assert result.unit["couplings"] == provisional.unit["couplings"]
    for part in ("records", "selection", "verdicts", "examples"):
        assert [r["variable"] for r in result.unit[part]] == [r["variable"] for r in provisional.unit[part]]
    assert {(r["handle"], r["labels"]) for r in result.unit["cross"]} == {
        (a, b) for a in HYPOTHESIS.variables for b in HYPOTHESIS.variables
    }
    assert len(result.controls["records"]) == len(provisional.controls["records"])
    assert len(result.controls["notes"]) == len(provisional.controls["notes"])
    assert result.seconds == pytest.approx(sum(look["seconds"] for look in result.looks))
    result.save(tmp_path / "run")
    assert str(plot_ot.Result.load(tmp_path / "run").verdicts[second]) == str(result.verdicts[second])


def test_a_last_look_that_finds_no_answer_at_the_old_place_searches_all(monkeypatch, searched):
    answered(monkeypatch, [False, False, False, False, False, False], waits=True)
    subject = plot_ot.MLPSubject(parity_net("ab", "cd"))
    result = plot_ot.localize(subject, HYPOTHESIS, ROWS, size=80, budget="auto")
    at = [(looked.variables, looked.places is None, size) for looked, size, _ in searched]
    both, (first, second) = HYPOTHESIS.variables, HYPOTHESIS.variables
    assert at == [(both, True, 40), ((first,), False, 80), ((second,), False, 80), (both, True, 80)]
    assert [looked.sparing.answers for looked, *_ in searched] == ["yes", "yes", "yes", "any"]
    assert searched[0][0].sparing.random is not searched[-1][0].sparing.random
    assert [look["places"] for look in result.looks] == ["all", "the last", "the last", "all"]
    assert str(result).count("2 looks with 40, 80 pairs per bank") == 1


def test_where_something_speaks_against_a_handle_all_places_are_searched_again(monkeypatch, searched):
    answered(monkeypatch, [False, True, True], waits=False)
    subject = plot_ot.MLPSubject(parity_net("ab", "cd"))
    plot_ot.localize(subject, HYPOTHESIS, ROWS, size=200, budget="auto")
    (_, again) = searched
    assert again[0].variables == HYPOTHESIS.variables[:1]
    assert again[0].places is None


def test_the_first_look_goes_the_cheap_ways_and_the_others_all(monkeypatch, searched):
    answered(monkeypatch, [False] * 9, waits=False)
    known = KINDS["decoder layer"](1000)
    monkeypatch.setattr("plot_ot.methods.FEW", 1)
    monkeypatch.setattr("plot_ot.methods.NARROW", 1)
    plot_ot.localize(known.subject, known.causal, known.rows, seed=1000, size=80, budget="auto")
    (first, *_), (last, *_) = searched

    def ways(looked):
        [further] = [s for s in looked.method.stages if isinstance(s, LookFurther)]
        return further

    assert [way for way in ways(last).best.ways if way in ways(first).best.ways] == list(ways(first).best.ways)
    assert len(ways(first).best.ways) == len(ways(first).outputs) == 2 < len(ways(last).best.ways)
    assert ways(first).outputs == (0, 1)
