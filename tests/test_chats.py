"""Chat messages as prompts: written by the tokenizer's own template, tokens and positions as the model reads them."""

from typing import Any

import pytest
import torch

import plot_ot
from chat_models import CITIES, chat_model, chat_tokenizer
from plot_ot import Hypothesis, TokenSpan
from plot_ot.abstract.chats import Message, laid_out, read_messages, transcript, written
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.subjects import DecoderSubject, record_pairs
from refusals import assert_refused

SYSTEM = {"role": "system", "content": "You are brief."}
USER = {"role": "user", "content": "Is {city} in Europe?"}
EUROPE = ("Paris", "Lyon", "Rome", "Milan")


def asked(messages: Any = (SYSTEM, USER), **options: Any) -> Hypothesis:
    """Whether a city is in Europe, asked in a chat."""
    h = Hypothesis(template=messages, answers=["Yes", "No"], **options)

    @h.variable
    def european(city):
        return city in EUROPE

    @h.output
    def answer(european):
        return "Yes" if european else "No"

    return h


def inputs(cities=CITIES) -> list[dict[str, str]]:
    return [{"city": c} for c in cities]


def filled(messages: Any, city: str) -> list[dict[str, str]]:
    return [{"role": m["role"], "content": m["content"].replace("{city}", city)} for m in messages]


# -- what the model reads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["marks", "trims", "folds"])
@pytest.mark.parametrize("bos", [None, 2])
def test_tokens_are_those_of_the_tokenizers_own_chat(template: str, bos: int | None) -> None:
    """Also where the model wants a beginning-of-sequence token: the template writes it, or wants none."""
    tokenizer, h = chat_tokenizer(template), asked()
    ids, mask = h.encoder(tokenizer, bos)(h.rows(inputs()))
    for city, row, real in zip(CITIES, ids, mask.bool(), strict=True):
        theirs = tokenizer.apply_chat_template(filled((SYSTEM, USER), city), add_generation_prompt=True)
        theirs = theirs if isinstance(theirs, list) else theirs["input_ids"]
        assert row[real].tolist() == theirs
        assert row[real].tolist().count(2) == (template != "marks")


def test_an_assistant_message_at_the_end_is_continued() -> None:
    begun = (USER, {"role": "assistant", "content": "The answer is"})
    tokenizer, h = chat_tokenizer("marks"), asked(begun)
    [text] = h.render(h.rows(inputs(["Rome"])), tokenizer)
    assert text.endswith("<|start|>assistant\nThe answer is")
    ids, _ = h.encoder(tokenizer, None)(h.rows(inputs(["Rome"])))
    assert tokenizer.convert_ids_to_tokens(ids[0].tolist())[-3:] == ["The", "answer", "is"]


def test_a_function_may_give_messages() -> None:
    tokenizer = chat_tokenizer("trims")
    h = asked(lambda given: filled((SYSTEM, USER), given["city"]), inputs=["city"], positions={"it": "{city}"})
    rows, plain = h.rows(inputs()), asked()
    assert torch.equal(plain.rows(inputs()), rows)
    assert h.render(rows, tokenizer) == plain.render(rows, tokenizer)
    assert torch.equal(h.encoder(tokenizer, 2)(rows)[0], plain.encoder(tokenizer, 2)(rows)[0])
    [(text, spans), *_] = h.located(rows, tokenizer)
    assert text[slice(*spans["it"])] == "Paris"


# -- named positions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["marks", "trims", "folds"])
def test_positions_are_found_in_the_message_that_holds_them(template: str) -> None:
    """Even where the system message has the same word, and the template trims or reorders what it is given."""
    messages = ({"role": "system", "content": " You are brief in Paris. "}, {"role": "user", "content": "  Is {city}?"})
    tokenizer = chat_tokenizer(template)
    h = asked(messages, positions={"city": "{city}", "brief": "brief", "sign": "?"})
    rows = h.rows(inputs())
    for (text, spans), given in zip(h.located(rows, tokenizer), inputs(), strict=True):
        start, end = spans["city"]
        assert text[start:end] == given["city"]
        assert text[start - 3 : start] == "Is "
        assert text[slice(*spans["brief"])] == "brief"
    ids, _ = h.encoder(tokenizer, 2)(rows)
    at = h.token_positions(tokenizer)
    said = [tokenizer.decode([int(i[k])]) for i, k in zip(ids, at["city"](rows), strict=True)]
    assert said == [c.split()[-1] for c in CITIES]
    assert {tokenizer.decode([int(i[k])]) for i, k in zip(ids, at["sign"](rows), strict=True)} == {"?"}


def test_a_template_that_rewrites_messages_cannot_say_where_they_are() -> None:
    h = asked((USER,), positions={"city": "{city}"})
    rows = h.rows(inputs())
    assert_refused(lambda: h.located(rows, chat_tokenizer("shouts")), ["'city'", "rewrites the message", "function"])
    free = asked((USER,), positions={"city": lambda given: given["city"]})
    text, spans = free.located(free.rows(inputs()), chat_tokenizer("shouts"))[0]
    assert text[slice(*spans["city"])] == "Paris"


def test_a_message_that_is_written_twice_is_not_guessed() -> None:
    tokenizer = chat_tokenizer("marks")
    tokenizer.chat_template = "{{ messages[0]['content'] }} {{ messages[0]['content'] }}"
    assert laid_out([Message("user", "x y")], tokenizer) == ("x y x y", [None])


# -- without a tokenizer ---------------------------------------------------------------------------------------


def test_without_a_tokenizer_a_chat_is_shown_as_a_transcript() -> None:
    h = asked(positions={"city": "{city}"})
    text, spans = h.located(h.rows(inputs(["Rio"])))[0]
    assert text == "system: You are brief.\nuser: Is Rio in Europe?\nassistant:"
    assert text[slice(*spans["city"])] == "Rio"
    assert transcript(read_messages([USER, {"role": "assistant", "content": "The"}]))[0].endswith("\nassistant: The")


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ([], ["list of messages", "not empty"]),
        (["Is {city}?"], ["Message 0", "role"]),
        ([{"role": "user"}], ["Message 0", "content"]),
        ([SYSTEM, {"role": "user", "content": 3}], ["Message 1", "texts"]),
        ([{"role": "user", "content": "Is {city.name}?"}], ["{city.name}", "plain name"]),
        (7, ["list of messages"]),
    ],
)
def test_what_is_no_chat_is_refused(template: Any, words: list[str]) -> None:
    assert_refused(lambda: Hypothesis(template=template), words)


def test_a_position_must_stand_in_one_message() -> None:
    twice = ({"role": "system", "content": "About {city}."}, USER)
    assert_refused(lambda: asked(twice, positions={"it": "{city}"}), ["'it'", "2 times"])
    assert asked(twice, positions={"it": "Is {city}"}).inputs == ("city",)


def test_tokenizers_without_a_chat_template_and_refused_roles() -> None:
    h = asked()
    rows = h.rows(inputs())
    assert_refused(lambda: h.render(rows, chat_tokenizer(None)), ["no chat template", "instruction-tuned", "one text"])
    assert_refused(
        lambda: h.render(rows, chat_tokenizer("strict")), ["system, user", "System role not supported", "one text"]
    )
    assert "Rome" in written([Message("user", "Is Rome?")], chat_tokenizer("strict"))


def test_messages_for_some_inputs_and_texts_for_others_are_refused() -> None:
    h = asked(lambda given: "Is it?" if given["city"] == "Rome" else filled((USER,), given["city"]), inputs=["city"])
    assert_refused(lambda: h.encoder(chat_tokenizer(), None)(h.rows(inputs())), ["some inputs", "others"])


def test_a_check_of_a_chat() -> None:
    given = [{"city": c, "word": w} for c in CITIES for w in "the a The is in of city answer Yes No".split()]
    h = Hypothesis(
        template=[SYSTEM, {"role": "user", "content": "{word} {city}?"}],
        positions={"city": TokenSpan("{city}", align="last")},
    )

    @h.variable
    def european(city):
        return city in EUROPE

    @h.output
    def answer(european, word):
        return "Yes" if european == (len(word) < 3) else "No"

    plain = plot_ot.check(h, given)
    assert any("transcript" in note for note in plain.notes)
    found = plot_ot.check(h, given, tokenizer=chat_tokenizer("trims"))
    assert found.ready, found.verdict
    assert found.example is not None
    assert found.example.prompt.startswith("<bos><|start|>system")
    assert any("last 1 of its text's 1 to 2 tokens" in note for note in found.notes)
    missing = plot_ot.check(h, given, tokenizer=chat_tokenizer(None))
    assert not missing.ready
    assert "no chat template" in missing.verdict


# -- spans of tokens -------------------------------------------------------------------------------------------

TWO = ("New York", "Los Angeles", "San Jose")


def bound(h: Hypothesis, tokenizer: Any, **options: Any) -> DecoderSubject:
    named = h.named_tokens(tokenizer)
    answers = h.answer_tokens(tokenizer)
    return DecoderSubject(
        chat_model(tokenizer), h.encoder(tokenizer, 2), answers, positions=named.functions(), spans=named.sizes, **options
    )


@pytest.mark.parametrize("kind", ["block_output", "attention_output", "mlp_output"])
def test_a_span_is_edited_at_all_its_tokens_as_plain_hooks_do(kind: str) -> None:
    tokenizer, h = chat_tokenizer("trims"), asked(positions={"city": TokenSpan("{city}")})
    rows = h.rows(inputs(TWO))
    subject = bound(h, tokenizer, kinds=(kind, "block_output"))
    place = subject.place(f"{kind}.1@city")
    assert place.width == 2 * 16
    base, source = rows[[0, 1, 2]], rows[[1, 2, 0]]
    [recording] = record_pairs(subject, (base, source))
    found = respond(recording, [EditBatch(place, Frame.identity(32), torch.ones(1, 32))])[0]

    model, answers = chat_model(tokenizer), h.answer_tokens(tokenizer)
    block = model.model.layers[1]
    module = {"block_output": block, "attention_output": block.self_attn, "mlp_output": block.mlp}[kind]
    ids = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in h.render(rows, tokenizer)]
    names = [[k for k, t in enumerate(i[0].tolist()) if tokenizer.decode([t]) in " ".join(TWO).split()] for i in ids]
    for b, s in ((0, 1), (1, 2), (2, 0)):
        kept: dict[str, torch.Tensor] = {}

        def keep(_m, _a, out, kept=kept):
            kept["h"] = (out[0] if isinstance(out, tuple) else out).clone()

        def put(_m, _a, out, b=b, s=s, kept=kept):
            whole = (out[0] if isinstance(out, tuple) else out).clone()
            whole[0, names[b]] = kept["h"][0, names[s]]
            return (whole, *out[1:]) if isinstance(out, tuple) else whole

        with torch.no_grad():
            hook = module.register_forward_hook(keep)
            model(ids[s])
            hook.remove()
            hook = module.register_forward_hook(put)
            logits = model(ids[b]).logits[0, -1]
            hook.remove()
        expected = torch.stack([logits[group].amax() for group in answers])
        assert torch.allclose(found[b], expected, atol=1e-4), (b, s)
        assert not torch.allclose(found[b], recording.base_outputs[b], atol=1e-4)


@pytest.mark.parametrize(("align", "wanted"), [("first", 0), ("last", -1)])
def test_spans_of_different_lengths_are_aligned_by_the_rule_that_is_given(align: Any, wanted: int) -> None:
    tokenizer = chat_tokenizer("marks")
    h = asked(positions={"city": TokenSpan("{city}", align=align), "sign": "?"})
    rows = h.rows(inputs())
    named = h.named_tokens(tokenizer)
    assert named.sizes == {"city": 1}
    assert named.notes == [f"position 'city' is the {align} 1 of its text's 1 to 2 tokens"]
    ids, _ = h.encoder(tokenizer, None)(rows)
    found = [tokenizer.decode([int(i[k])]) for i, k in zip(ids, named.functions()["city"](rows), strict=True)]
    assert found == [c.split()[wanted] for c in CITIES]


def test_spans_whose_lengths_no_rule_fits_are_refused_with_counts() -> None:
    tokenizer = chat_tokenizer("marks")
    plain = asked(positions={"city": TokenSpan("{city}")})
    assert_refused(lambda: plain.named_tokens(tokenizer), ["No input is known", "tokens=n"])
    plain.rows(inputs())
    assert_refused(lambda: plain.named_tokens(tokenizer), ["'city'", "1 in 5", "2 in 3", "align='last'"])
    two = asked(positions={"city": TokenSpan("{city}", align="last", tokens=2)})
    rows = two.rows(inputs())
    assert_refused(lambda: two.token_positions(tokenizer)["city"](rows), ["2 tokens", "1 in 5", "one length"])
    assert_refused(lambda: TokenSpan("{city}", align="middle"), ["alignment", "first"])  # type: ignore[arg-type]
    assert_refused(lambda: TokenSpan("{city}", tokens=0), ["at least one"])
    later = asked(positions={"city": TokenSpan("{city}")})
    later.rows(inputs(TWO))
    at = later.token_positions(tokenizer)["city"]
    assert_refused(lambda: at(later.rows(inputs(["Rome"]))), ["2 tokens", "1 in 1"])


def test_spans_that_are_not_there_are_refused_by_the_subject() -> None:
    tokenizer, h = chat_tokenizer("marks"), asked()
    rows = h.rows(inputs())
    answers = h.answer_tokens(tokenizer)
    model, encode = chat_model(tokenizer), h.encoder(tokenizer, None)
    assert_refused(lambda: DecoderSubject(model, encode, answers, spans={"x": 2}), ["position with several tokens", "x"])
    late = DecoderSubject(model, encode, answers, positions={"x": lambda rows: -1}, spans={"x": 2})
    assert_refused(lambda: late.record(rows), ["'x'", "no room for its 2 tokens"])


def test_a_live_handle_acts_on_a_span() -> None:
    tokenizer, h = chat_tokenizer("trims"), asked(positions={"city": TokenSpan("{city}")})
    rows = h.rows(inputs(TWO))
    subject = bound(h, tokenizer)
    place = subject.place("block_output.0@city")
    handle = plot_ot.Handle("european", (plot_ot.Edit(place, Frame.identity(32), torch.ones(32)),), subject.identity())
    expected = handle.apply(subject, rows[:1], rows[1:2])
    ids, mask = subject.encode(rows[:1])
    with handle.on(subject, rows[1:2], base=rows[:1]), torch.no_grad():
        logits = subject.decoder.model(input_ids=ids, attention_mask=mask).logits[0, -1]
    live = torch.stack([logits[group].amax() for group in h.answer_tokens(tokenizer)])
    assert torch.allclose(live, expected[0], atol=1e-4)
