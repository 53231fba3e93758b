"""Hypotheses in plain Python: the same labels as batched causal models, prompts, named tokens, answers, refusals."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plot_ot.abstract.banks import Bank
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.abstract.prompts import token_spans, unreachable_answers
from plot_ot.abstract.templates import Template
from plot_ot.models.tiny import build_tokenizer
from plot_ot.models.vocabulary import COLOURS, LETTERS, LEXICON
from plot_ot.subjects import ModuleSubject
from plot_ot.tasks import mcqa_data
from plot_ot.tasks.mcqa_text import COLUMNS, render
from refusals import assert_refused

SMOLLM2 = Path.home() / ".cache/plot-ot/models/smollm2"


# -- tokenizers -----------------------------------------------------------------------------------------------


def fast(words: list[str], pattern: str = r" ?\w+|[^\w\s]|\s") -> Any:
    """One token per listed word, spaces kept in it; anything else is unknown."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({w: k for k, w in enumerate(["<unk>", *words])}, unk_token="<unk>"))  # noqa: S106
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")  # noqa: S106


class Slow:
    """A tokenizer without offsets: pieces of two UTF-8 bytes, so that letters can be cut in the middle."""

    pad_token_id = eos_token_id = unk_token_id = None

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(t) for t in texts]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raw = text.encode()
        return [int.from_bytes(b"\1" + raw[k : k + 2], "big") for k in range(0, len(raw), 2)]

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool = True) -> str:
        pieces = [i.to_bytes(3, "big").lstrip(b"\0")[1:] for i in ids]
        return b"".join(pieces).decode(errors="replace")


# -- a hypothesis that another part of the library has too ------------------------------------------------------


def multiple_choice() -> Hypothesis:
    """The pointer and the token of copy-colour questions, as a user would write them."""
    h = Hypothesis(
        inputs=["fact", "colour", *(f"colour{i}" for i in range(4)), *(f"symbol{i}" for i in range(4))],
        template="{fact} {colour}?\n" + "\n".join(f"{{symbol{i}}}. {{colour{i}}}" for i in range(4)) + "\nAnswer:",
        answers=LETTERS,
        positions={"symbol0": "{symbol0}", "period1": "{symbol1}.", "asked": "{colour}?"},
        name="mcqa",
    )

    @h.variable
    def answer_pointer(colour, colour0, colour1, colour2, colour3):
        return [colour0, colour1, colour2, colour3].index(colour)

    @h.variable
    def answer_token(answer_pointer, symbol0, symbol1, symbol2, symbol3):
        return (symbol0, symbol1, symbol2, symbol3)[answer_pointer]

    @h.output
    def letter(answer_token):
        return answer_token

    return h


def as_dict(row: list[int]) -> dict[str, Any]:
    named = dict(zip(COLUMNS, row, strict=True))
    noun = LEXICON.nouns[named["object"]]
    return {
        "fact": noun.many if named["plural"] else noun.one,
        "colour": COLOURS[named["colour"]],
        **{f"colour{i}": COLOURS[named[f"Col{i + 1}"]] for i in range(4)},
        **{f"symbol{i}": LETTERS[named[f"Sym{i + 1}"]] for i in range(4)},
    }


@pytest.mark.parametrize("family", mcqa_data.FAMILIES)
def test_plain_functions_label_pairs_as_the_batched_model_does(family: str) -> None:
    generator = torch.Generator().manual_seed(1000)
    base = mcqa_data.draw_rows(200, generator)
    source = mcqa_data.sources(base, family, generator)
    expected = Bank.from_pairs(mcqa_data.causal_model(), base, source)
    h = multiple_choice()
    mine = Bank.from_pairs(h.causal, *(h.rows([as_dict(r) for r in side.tolist()]) for side in (base, source)))
    assert mine.variables == expected.variables
    assert torch.equal(mine.base_answer, expected.base_answer)
    assert torch.equal(mine.source_answer, expected.source_answer)
    for v in mine.variables:
        assert torch.equal(mine.labels[v], expected.labels[v])
        assert torch.equal(mine.changed[v], expected.changed[v])
        assert mine.power(v) == expected.power(v)


def test_labels_by_hand() -> None:
    h = multiple_choice()
    colours = {f"colour{i}": c for i, c in enumerate(("red", "blue", "green", "pink"))}
    turned = {f"colour{i}": c for i, c in enumerate(("pink", "red", "blue", "green"))}
    base = {"fact": "x", "colour": "blue", **colours, **{f"symbol{i}": s for i, s in enumerate("ABCD")}}
    source = {"fact": "x", "colour": "blue", **turned, **{f"symbol{i}": s for i, s in enumerate("HTPX")}}
    b, s = h.rows([base]), h.rows([source])
    assert [h.answers[k] for k in (h.causal.answer(b), h.causal.answer(s))] == ["B", "P"]
    assert h.answers[h.causal.swap(b, s, "answer_pointer")] == "C"
    assert h.answers[h.causal.swap(b, s, "answer_token")] == "P"


def test_a_function_runs_once_per_combination_of_its_parents() -> None:
    calls: Counter[tuple[int, int]] = Counter()
    h = Hypothesis(answers=[False, True])

    @h.output
    def larger(a, b):
        calls[a, b] += 1
        return a > b

    inputs = [{"a": k % 3, "b": k % 2, "c": k} for k in range(60)]
    assert h.inputs == ("a", "b")
    rows = h.rows([{n: x[n] for n in "ab"} for x in inputs])
    for _ in range(2):
        assert h.causal.answer(rows).tolist() == [x["a"] > x["b"] for x in inputs]
    assert len(calls) == 6
    assert set(calls.values()) == {1}


def test_values_first_met_under_an_intervention_get_codes_of_their_own() -> None:
    h = Hypothesis(template="{a} and {b}:")

    @h.variable
    def left(a):
        return a

    @h.variable(localize=False)
    def both(left, b):
        return left, b

    @h.output
    def answer(both):
        return "".join(both)

    base, source = h.rows([{"a": "x", "b": "y"}]), h.rows([{"a": "v", "b": "w"}])
    assert h.causal.answer(torch.cat([base, source])).tolist() == [0, 1]
    assert h.values("both") == [("x", "y"), ("v", "w")]
    assert h.causal.variables == ("left",)
    swapped = h.causal.swap(base, source, "left")
    assert h.answers[swapped] == "vy"
    assert h.values("both") == [("x", "y"), ("v", "w"), ("v", "y")]
    assert h.answers == ("xy", "vw", "vy")
    assert h.code("left", "v") == 1
    assert_refused(lambda: h.code("left", "z"), ["'left'", "'z'", "'x', 'v'"])
    assert_refused(lambda: h.values("lefty"), ["Unknown variable", "Did you mean 'left'"])


def test_answers_are_collected_from_inputs_and_swaps_until_the_tokens_are_fixed() -> None:
    h = Hypothesis(template="{a}+{b}=")

    @h.variable
    def unit(a, b):
        return (a + b) % 10

    @h.variable
    def carry(a, b):
        return a + b > 9

    @h.output
    def total(carry, unit):
        return str(10 * carry + unit)

    assert_refused(lambda: h.answer_tokens(fast(["5"])), ["No answer is known", "answers"])
    rows = h.rows([{"a": 2, "b": 3}, {"a": 6, "b": 7}])
    numbers = fast([str(n) for n in range(19)])
    assert len(h.answer_tokens(numbers)) == 4
    assert set(h.answers) == {"5", "13", "3", "15"}
    h.causal.swap(rows, rows.flip(0), "unit")
    assert_refused(lambda: h.causal.answer(h.rows([{"a": 4, "b": 4}])), ["'8'", "not among the answers", "'total'"])
    before = h.answers
    h.answer_tokens(numbers)  # asked again: with what has been seen by now
    assert h.answers[: len(before)] == before
    assert "8" in h.answers


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "a": st.one_of(st.text(), st.integers(), st.booleans(), st.floats(allow_nan=False)),
                "b": st.tuples(st.integers(0, 1), st.sampled_from([0, False, 1.0, "0"])),
            }
        ),
        max_size=8,
    )
)
@settings(max_examples=100, deadline=None)
def test_rows_and_dicts_are_inverse_and_codes_stay(inputs: list[dict[str, Any]]) -> None:
    h = Hypothesis(answers=[0, 1])
    h.output(name="y", parents=["a", "b"])(lambda a, b: len(str(a)) % 2)
    rows = h.rows(inputs)
    back = h.dicts(rows)
    assert back == inputs
    assert [[type(x[n]) for n in "ab"] for x in back] == [[type(x[n]) for n in "ab"] for x in inputs]
    assert [repr(x["b"]) for x in back] == [repr(x["b"]) for x in inputs]
    assert torch.equal(h.rows(back[::-1]), rows.flip(0))
    assert h.causal.answer(rows).tolist() == [len(str(x["a"])) % 2 for x in back]


def test_inputs_may_be_lists_and_numpy_values() -> None:
    numpy = pytest.importorskip("numpy")
    h = Hypothesis(template="{names}: {n}", answers=["x", "y"])

    @h.output
    def first(names, n):
        return names[n]

    rows = h.rows([{"names": ["x", "y"], "n": numpy.int64(1)}, {"names": numpy.array(["x", "y"]), "n": 1}])
    assert rows[0].tolist() == rows[1].tolist()
    assert h.dicts(rows)[0] == {"names": ("x", "y"), "n": 1}
    assert h.causal.answer(rows).tolist() == [1, 1]


def test_networks_that_take_numbers() -> None:
    h = Hypothesis(answers=[False, True], inputs=["a", "b"])

    @h.variable
    def total(a, b):
        return a + b

    @h.output
    def large(total):
        return total > 1

    inputs = [{"a": x / 4, "b": y} for x in range(5) for y in (0, 1, 2)]
    rows = h.rows(inputs)
    assert torch.equal(h.encode_inputs(rows), torch.tensor([[x["a"], x["b"]] for x in inputs]))
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    subject = ModuleSubject(net, ["0"], rows[:1], encode=h.encode_inputs)
    assert torch.allclose(subject.record(rows).outputs, net(h.encode_inputs(rows)))
    words = Hypothesis(answers=[True])
    words.output(name="y")(lambda a: True)
    assert_refused(lambda: words.encode_inputs(words.rows([{"a": "five"}])), ["'a'", "'five'", "no number", "encode"])


# -- prompts and tokens -----------------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(st.sampled_from(["{a}", "{b!r}", "{c:>4}", "{{", "}}", "{a}{b}"]), st.text("xyz\n é", max_size=4))
    ),
    st.tuples(*[st.text(max_size=5)] * 3),
)
@settings(max_examples=200, deadline=None)
def test_templates_format_as_python_does(parts: list[str], values: tuple[str, ...]) -> None:
    text, named = "".join(parts), dict(zip("abc", values, strict=True))
    template = Template.parse(text)
    rendered, starts = template.render(named)
    assert rendered == text.format_map(named)
    assert len(starts) == len(template.pieces) + 1
    assert starts[-1] == len(rendered)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{a.__class__}", ["a.__class__", "plain name"]),
        ("{a[0]}", ["a[0]", "plain name"]),
        ("{}", ["{}", "plain name"]),
        ("{0}", ["{0}", "plain name"]),
        ("{a:{w}}", ["inside its format"]),
        ("{a!x}", ["conversion"]),
        ("{a", ["cannot be read", "{{"]),
    ],
)
def test_templates_with_more_than_plain_names_are_refused(template: str, words: list[str]) -> None:
    assert_refused(lambda: Hypothesis(template=template), words)


def tokens_named(h: Hypothesis, tokenizer: Any, inputs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The text of the named tokens, picked out of what the encoder makes."""
    rows = h.rows(inputs)
    ids, mask = h.encoder(tokenizer, None)(rows)
    where = {n: f(rows) for n, f in h.token_positions(tokenizer).items()}
    return [
        {n: tokenizer.decode([int(ids[k, at[k]])]) for n, at in where.items() if mask[k, at[k]]}
        for k in range(len(rows))
    ]


def questions(count: int) -> list[dict[str, Any]]:
    return [as_dict(r) for r in mcqa_data.draw_rows(count, torch.Generator().manual_seed(1001)).tolist()]


def test_a_piece_of_the_template_is_found_even_if_its_text_stands_elsewhere() -> None:
    h, inputs = multiple_choice(), questions(30)
    for x in inputs:
        x["fact"] += " A. B. C. D?"
    found = tokens_named(h, build_tokenizer(), inputs)
    assert found == [{"symbol0": x["symbol0"], "period1": ".", "asked": "?"} for x in inputs]
    prompt, spans = h.located(h.rows(inputs[:1]))[0]
    assert prompt[: spans["period1"][1]].endswith(f"\n{inputs[0]['symbol1']}.")


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="SmolLM2 is not here")
def test_named_tokens_and_answers_of_a_real_tokenizer() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    h, inputs = multiple_choice(), questions(20)
    found = tokens_named(h, tokenizer, inputs)
    assert found == [{"symbol0": x["symbol0"], "period1": ".", "asked": "?"} for x in inputs]
    groups = h.answer_tokens(tokenizer)
    assert groups == mcqa_data.answer_tokens(tokenizer)
    prompts = h.render(h.rows(inputs))
    assert unreachable_answers(tokenizer, prompts[0], h.answers, groups) == []
    assert unreachable_answers(tokenizer, prompts[0] + " ", h.answers, groups) == list(h.answers)
    spans = token_spans(tokenizer, ["naïve 🙂 text"])[0]
    assert "".join("naïve 🙂 text"[a:b] for a, b in spans).replace(" ", "").startswith("naïve")


def test_positions_count_from_the_end_whatever_stands_before() -> None:
    h, inputs = multiple_choice(), questions(12)
    tokenizer, rows = build_tokenizer(), multiple_choice().rows(inputs)
    h.rows(inputs)
    at = h.token_positions(tokenizer)["symbol0"](rows)
    for bos in (None, 1):
        ids, _ = h.encoder(tokenizer, bos)(rows)
        assert [tokenizer.decode([int(i)]) for i in ids[torch.arange(12), at]] == [x["symbol0"] for x in inputs]


def test_a_decoder_takes_prompts_answers_and_named_tokens() -> None:
    """The subject's activation at a named token is the plain forward's hidden state there."""
    from plot_ot.models.tiny import load_tiny
    from plot_ot.subjects.decoder.subject import DecoderSubject

    model, tokenizer = load_tiny("planted-1000")
    h, inputs = multiple_choice(), questions(6)
    rows, bos = h.rows(inputs), tokenizer.bos_token_id
    positions = h.token_positions(tokenizer)
    subject = DecoderSubject(
        model, h.encoder(tokenizer, bos), h.answer_tokens(tokenizer), layers=[2], positions=positions
    )
    store = subject.record(rows)
    for k, prompt in enumerate(h.render(rows)):
        ids = torch.tensor([[bos, *tokenizer.encode(prompt, add_special_tokens=False)]])
        said = model(input_ids=ids, output_hidden_states=True)
        at = int((ids[0] == tokenizer.convert_tokens_to_ids(inputs[k]["symbol0"])).nonzero()[0])
        assert torch.allclose(store.activations["block_output.2@symbol0"][k], said.hidden_states[3][0, at], atol=1e-4)
        letters = torch.stack([said.logits[0, -1, g].amax() for g in h.answer_tokens(tokenizer)])
        assert torch.allclose(store.outputs[k], letters, atol=1e-4)


def by_function(where: Any, template: Any = "{a} or {b}, {a}:") -> Hypothesis:
    h = Hypothesis(inputs=["a", "b"], template=template, answers=["x", "y"], positions={"it": where})
    h.output(name="y", parents=["a"])(lambda a: "x")
    return h


@pytest.mark.parametrize(
    ("where", "start"),
    [
        (lambda d: d["b"], 7),
        (lambda d: (d["a"], 0), 0),
        (lambda d: (d["a"], -1), 12),
        (lambda d: 4, 4),
        (lambda d: -1, 15),
        ("{b}", 7),
        (", {a}", 10),
    ],
)
@pytest.mark.parametrize("template", ["{a} or {b}, {a}:", lambda d: f"{d['a']} or {d['b']}, {d['a']}:"])
def test_positions_by_functions_and_by_pieces(where: Any, start: int, template: Any) -> None:
    h = by_function(where, template)
    rows = h.rows([{"a": "cat", "b": "dog"}])
    prompt, spans = h.located(rows)[0]
    assert prompt == "cat or dog, cat:"
    assert spans["it"][0] == start


def test_a_tokenizer_without_offsets_is_read_by_decoding() -> None:
    h = by_function("{b}")
    inputs = [{"a": "kätzchen", "b": "hündchen"}, {"a": "a", "b": "ß"}, {"a": "é", "b": "🙂"}]
    rows, tokenizer = h.rows(inputs), Slow()
    found = h.token_positions(tokenizer)["it"](rows)
    for prompt, x, at in zip(h.render(rows), inputs, found.tolist(), strict=True):
        ids, end = tokenizer.encode(prompt), prompt.index(f"or {x['b']},") + 3 + len(x["b"])
        before, through = (tokenizer.decode(ids[: len(ids) + at + k]) for k in (0, 1))
        assert len(before.rstrip("�")) < end <= len(through.rstrip("�"))
    assert_refused(
        lambda: token_spans(type("Lossy", (Slow,), {"decode": lambda *a, **k: "?"})(), ["abc"]), ["give back", "fast"]
    )


@pytest.mark.parametrize(
    ("where", "given", "words"),
    [
        (lambda d: "bird", ("cat", "dog"), ["'it'", "'bird' is missing", "cat or dog"]),
        (lambda d: d["a"], ("cat", "dog"), ["'it'", "'cat' is ambiguous", "2 times", "occurrence"]),
        (lambda d: (d["a"], 2), ("cat", "dog"), ["only 2 times", "occurrence 2"]),
        (lambda d: 99, ("cat", "dog"), ["99", "index of a character", "16 characters"]),
        (lambda d: None, ("cat", "dog"), ["None", "index of a character"]),
        (lambda d: d["nothing"], ("cat", "dog"), ["position 'it'", "KeyError", "cat"]),
        ("{b}", ("cat", ""), ["'it'", "missing", "cat or , cat:", "empty"]),
    ],
)
def test_a_position_that_is_missing_or_ambiguous_names_its_prompt(where: Any, given: Any, words: list[str]) -> None:
    h = by_function(where)
    rows = h.rows([{"a": given[0], "b": given[1]}])
    assert_refused(lambda: h.token_positions(fast(["cat"]))["it"](rows), words)


def test_pieces_that_do_not_stand_once_in_the_template_are_refused() -> None:
    assert_refused(lambda: by_function("{a}"), ["'{a}' stands 2 times", "once", "longer piece"])
    assert_refused(lambda: by_function("{c}"), ["'{c}' stands 0 times"])
    h = by_function("{c}", lambda d: "text")
    assert_refused(lambda: h.located(h.rows([{"a": "x", "b": "y"}])), ["'it'", "Unknown input 'c'"])
    assert_refused(lambda: Hypothesis(positions={"x": "{a}"}, answers=[1]), ["template"])


def test_text_that_has_no_token_is_refused() -> None:
    h = by_function(lambda d: 3)  # a space, which this tokenizer throws away
    rows = h.rows([{"a": "red", "b": "blue"}])
    assert_refused(
        lambda: h.token_positions(build_tokenizer())["it"](rows), ["'it'", "' ' has no token", "red or blue"]
    )


# -- answers ----------------------------------------------------------------------------------------------------


def saying(answers: list[str]) -> Hypothesis:
    h = Hypothesis(template="{a}:", answers=answers)
    h.output(name="y")(lambda a: answers[0])
    return h


def test_all_offending_answers_are_named_at_once() -> None:
    words = [" one", "one", " two", "three four", "five", " six"]
    h = saying(["one", "seven", "eight", "two", "five"])
    assert_refused(
        lambda: h.answer_tokens(fast(words)),
        ["no single token", "seven, eight", "two are single tokens only with a space", "five only without", "alike"],
    )
    assert saying(["one", "two", "six"]).answer_tokens(fast(words)) == [[1, 2], [3], [6]]


def test_answers_that_share_a_token_are_refused() -> None:
    from tokenizers import normalizers

    lowered = fast(["yes", "no"])
    lowered.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert_refused(
        lambda: saying(["Yes", "yes", "NO", "no"]).answer_tokens(lowered), ["Yes and yes", "NO and no", "share"]
    )


def test_case_counts_only_where_it_tells_answers_apart() -> None:
    tokenizer = fast(["us", "US", " Us"])
    labels = torch.tensor([0, 0, 0])
    assert saying(["us", "them"]).says(tokenizer, torch.tensor([1, 2, 3]), labels).tolist() == [True, True, True]
    assert saying(["us", "US"]).says(tokenizer, torch.tensor([1, 2, 3]), labels).tolist() == [True, False, False]


def test_what_cannot_be_said_after_a_prompt() -> None:
    tokenizer = fast(["a", ":", " yes", "yes", " no"])
    groups = [[3, 4], [5]]
    assert unreachable_answers(tokenizer, "a:", ["yes", "no"], groups) == []
    assert unreachable_answers(tokenizer, "a:\n", ["yes", "no"], groups) == ["no"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"answers": []}, ["empty"]),
        ({"answers": ["a", "b", "a"]}, ["differ", "'a'"]),
        ({"answers": [" a", "b", ""]}, ["' a', ''", "spaces", "bare words"]),
        ({"answers": [1, "b"]}, ["texts", "1", "strings"]),
        ({"inputs": "ab"}, ["list of names", "'ab'"]),
        ({"positions": {"a@b": "{a}"}}, ["plain name", "'a@b'"]),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], words: list[str]) -> None:
    assert_refused(lambda: Hypothesis(**({"template": "{a}"} | options)), words)


# -- functions that fail ----------------------------------------------------------------------------------------


def broken(function: Any, template: str | None = "{a}", answers: Any = None) -> Hypothesis:
    h = Hypothesis(template=template, answers=answers)
    h.output(name="y")(function)
    return h


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda a: str(1 // a), ["'y' failed", "{'a': 0}", "ZeroDivisionError"]),
        (lambda a: [a], ["'y' returned [0]", "list", "hashable", "tuple"]),
        (lambda a: float("nan"), ["NaN", "{'a': 0}"]),
        (lambda a: a, ["'y' returned 0 (int)", "text", "str("]),
        (lambda a: " 0", ["' 0'", "spaces"]),
    ],
)
def test_what_a_function_does_wrong_names_it_and_its_arguments(function: Any, words: list[str]) -> None:
    h = broken(function)
    rows = h.rows([{"a": 0}])
    assert_refused(lambda: h.causal.answer(rows), words)


def test_an_output_outside_the_answers_is_refused() -> None:
    h = broken(lambda a: "c", answers=["a", "b"])
    assert_refused(
        lambda: h.causal.answer(h.rows([{"a": 0}])), ["'y' returned 'c'", "not among", "'a', 'b'", "{'a': 0}"]
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, ["Input 1 lacks a"]),
        ({"b": 1}, ["lacks a", "unknown b"]),
        ({"a": 1, "c": 2}, ["unknown c", "Inputs are a"]),
        ([1], ["Input 1 must be a dict", "[1]"]),
        ({"a": None}, ["Input 1, 'a' is missing", "None"]),
        ({"a": float("nan")}, ["'a' is missing", "nan"]),
        ({"a": {"b": 1}}, ["dict", "text, a number"]),
    ],
)
def test_inputs_that_do_not_fit_are_refused(row: Any, words: list[str]) -> None:
    h = broken(lambda a: "x")
    assert_refused(lambda: h.rows([{"a": 0}, row]), words)


def test_declarations_that_cannot_be_meant_are_refused() -> None:
    h = Hypothesis(template="{a}")
    h.variable(name="x")(lambda a: a)
    assert_refused(lambda: h.variable(name="x")(lambda a: a), ["'x' is declared twice"])
    assert_refused(lambda: h.variable(lambda a: a), ["plain name", "<lambda>"])
    assert_refused(lambda: h.variable(name="z")(lambda: 1), ["'z' has no parent"])
    assert_refused(lambda: h.variable(name="z")(lambda a, k=1: 1), ["'z'", "k", "parents="])
    assert_refused(lambda: h.variable(name="z")(lambda *a: 1), ["'z'", "parents="])
    assert_refused(lambda: h.causal, ["no output", "@h.output"])
    h.output(name="y")(lambda x: "1")
    assert_refused(lambda: h.output(name="y2")(lambda x: "1"), ["'y' is the output already"])
    assert h.rows([{"a": 0}]).tolist() == [[0]]
    assert_refused(lambda: h.variable(name="late")(lambda a: a), ["'late' comes too late"])


def test_functions_made_in_a_loop_name_their_parents() -> None:
    h = Hypothesis(answers=[0, 1])
    for i in range(3):
        h.variable(name=f"bit{i}", parents=["n"])(lambda n, i=i: n >> i & 1)
    h.output(name="parity", parents=["bit0", "bit1", "bit2"])(lambda *bits: sum(bits) % 2)
    rows = h.rows([{"n": n} for n in range(8)])
    assert h.causal.answer(rows).tolist() == [0, 1, 1, 0, 1, 0, 0, 1]
    assert h.causal.parents("bit2") == ("n",)


def test_models_that_cannot_be_built_are_refused() -> None:
    assert_refused(lambda: broken(lambda a: 1, template=None).causal, ["Without a template", "answers=", "'y'"])
    assert_refused(lambda: broken(lambda a: "x", template=lambda d: "x").causal, ["function as template", "inputs="])
    h = Hypothesis(template="{a} {y}")
    h.output(name="y")(lambda a: "x")
    assert_refused(lambda: h.causal, ["{y}", "is a variable", "inputs only"])
    h = Hypothesis(template="{colour}", inputs=["color"])
    h.output(name="y")(lambda color: "x")
    assert_refused(lambda: h.causal, ["field of the template 'colour'", "'color'"])
    no_prompts = broken(lambda a: 1, template=None, answers=[1])
    assert_refused(lambda: no_prompts.render(no_prompts.rows([{"a": 1}])), ["no prompts", "template"])
    assert_refused(lambda: no_prompts.answer_tokens(fast(["1"])), ["template"])


def test_prompts_that_cannot_be_made_are_refused() -> None:
    spec = broken(lambda a: "x", template="{a:d}")
    assert_refused(lambda: spec.render(spec.rows([{"a": "one"}])), ["does not fit", "'one'"])
    for template, words in (
        (lambda d: "", ["not empty"]),
        (lambda d: 3, ["3"]),
        (lambda d: d["b"], ["KeyError", "template"]),
    ):
        h = Hypothesis(template=template, inputs=["a"])
        h.output(name="y")(lambda a: "x")
        assert_refused(lambda h=h: h.render(h.rows([{"a": 1}])), words)


def test_codes_that_nothing_stands_for_are_refused() -> None:
    h = broken(lambda a: "x")
    h.rows([{"a": 5}])
    assert_refused(lambda: h.dicts(torch.tensor([[1]])), ["'a'", "code 1", "0..0"])
    assert_refused(lambda: h.dicts(torch.tensor([[0, 0]])), ["[rows, 1]"])


def test_prompts_of_mcqa_read_as_ours() -> None:
    """The library's own template, written as a user would."""
    h = Hypothesis(
        inputs=["noun", "colour", *(f"c{i}" for i in range(4)), *(f"s{i}" for i in range(4))],
        template=lambda d: (
            f"Question: {d['noun'][0].upper()}{d['noun'][1:]} is {d['colour']}. What color is {d['noun']}?\n"
            + "\n".join(f"{d[f's{i}']}. {d[f'c{i}']}" for i in range(4))
            + "\nAnswer:"
        ),
        answers=LETTERS,
    )
    h.output(name="y", parents=["s0"])(lambda s: s)
    rows = mcqa_data.draw_rows(10, torch.Generator().manual_seed(1002))
    rows[:, COLUMNS.index("plural")] = 0
    inputs = [
        {"noun": x["fact"], "colour": x["colour"]}
        | {f"c{i}": x[f"colour{i}"] for i in range(4)}
        | {f"s{i}": x[f"symbol{i}"] for i in range(4)}
        for x in map(as_dict, rows.tolist())
    ]
    assert h.render(h.rows(inputs)) == render(rows)
