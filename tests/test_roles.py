"""Roles of tokens: rules read off prompts, and variables found at tokens that move."""

import itertools
import random

import pytest
import torch

from plot_ot import (
    ClosedForm,
    Handle,
    MLPSubject,
    Problem,
    Role,
    SelectTokens,
    State,
    Transport,
    along,
    as_readout,
    draw_pairs,
    handle_from_edits,
    record,
    roles_of,
    with_roles,
)
from plot_ot.edits import EditBatch, Frame
from plot_ot.signatures import SignatureSpec
from plot_ot.stages.calibrate import correct
from plot_ot.stages.coupling import LocalizeTokens
from refusals import assert_refused

pytest.importorskip("transformers")
from plot_ot.subjects.decoder.roles import derive_roles, token_classes
from truth.moving import causal, moving

# -- rules -----------------------------------------------------------------------------------------------------------

PROMPT = [9, 5, 7, 5, 8, 3]


@pytest.mark.parametrize(
    ("role", "index"),
    [
        (Role("end", 1), 5),
        (Role("end", 6), 0),
        (Role("end", 7), None),
        (Role("start", 2), 1),
        (Role("start", 7), None),
        (Role("near", 0, (7,)), 2),
        (Role("near", 2, (7,)), 4),
        (Role("near", -3, (7,)), None),
        (Role("near", 1, (5,)), None),  # it stands there twice
        (Role("near", 1, (4,)), None),
        (Role("class", 1, (5, 8)), 1),
        (Role("class", 3, (5, 8)), 4),
        (Role("class", -2, (5, 8)), 3),
        (Role("class", 4, (5, 8)), None),
        (Role("class", -4, (5, 8)), None),
        (Role("again", 1, (5, 8)), 1),
        (Role("again", 2, (5, 8)), 3),
        (Role("again", 1, (7, 8)), None),
        (Role("single", 1, (5, 8)), 4),
        (Role("single", 1, (5,)), None),
    ],
)
def test_a_role_picks_one_token(role, index):
    assert role.index(PROMPT) == index
    assert Role.read(role.described()) == role


def test_names_of_roles():
    words = {5: " ann", 6: "a@b", 7: "x->y", 8: "{"}
    assert Role("end", 2).name() == "end-2"
    assert Role("start", 2).name() == "start+2"
    assert Role("near", -1, (5,)).name(words.get) == "ann-1"
    assert Role("near", 0, (5,)).name(words.get) == "ann"
    assert Role("class", -1, (5, 6, 7, 8)).name(words.get) == "{ann|ab|xy|..} -1"
    assert Role("single", 1, (8,)).name(words.get) == "single {·}"


def sentences(count: int, seed: int = 0) -> list[list[int]]:
    """A mark (1) with a name (10-13) after it, two objects (20-25) and fillers (30-34), in any order."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        parts = [[1, draw.randint(10, 13)], *([draw.randint(20, 25)] for _ in range(2))]
        parts += [[draw.randint(30, 34)] for _ in range(draw.randint(1, 3))]
        draw.shuffle(parts)
        made.append([*itertools.chain(*parts), 2])
    return made


def test_tokens_that_take_turns_are_a_class():
    assert token_classes(sentences(200)) == [tuple(range(10, 14)), tuple(range(20, 26)), tuple(range(30, 35))]
    assert (20, 21, 22, 23, 24, 25) in token_classes([[*p, k % 7 + 40] for k, p in enumerate(sentences(200))])


def test_tokens_between_the_same_neighbours_are_a_class():
    """Too few prompts to count turns by; the places in the sentence tell."""
    prompts = [[1, 10 + a, 2, 20 + b, 3] for a, b in [(0, 0), (1, 1), (2, 2), (3, 3)]]
    assert token_classes(prompts) == [(10, 11, 12, 13), (20, 21, 22, 23)]


def test_every_role_holds_in_every_prompt_and_none_twice():
    prompts = sentences(150)
    roles = derive_roles(prompts)
    where = [tuple(r.index(p) - len(p) for p in prompts) for r in roles]
    assert len(set(where)) == len(roles)
    truth = tuple(p.index(1) + 1 - len(p) for p in prompts)
    assert roles[where.index(truth)] == Role("near", 1, (1,))
    second = tuple([t for t, x in enumerate(p) if 20 <= x < 26][1] - len(p) for p in prompts)
    assert roles[where.index(second)].kind == "class"
    assert Role("end", 1) in roles
    shorter = derive_roles(prompts, reach=1)
    assert not any(r.kind == "near" and abs(r.number) > 1 for r in shorter)


def test_a_name_that_stands_there_twice():
    """Two names, one of them again: which is which does not depend on the order."""
    draw, prompts = random.Random(1), []
    for _ in range(120):
        a, b = draw.sample(range(10, 16), 2)
        names = [a, b, a]
        draw.shuffle(names)
        prompts.append([1, *itertools.chain(*([n, draw.randint(30, 39)] for n in names)), 2])
    roles = derive_roles(prompts)
    kinds = {r.kind for r in roles}
    assert {"again", "single"} <= kinds


# -- where variables are ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    return moving("mark", 1000, arrangements=40)


@pytest.fixture(scope="module")
def subject(made):
    return made.subject()


@pytest.fixture(scope="module")
def looking(made, subject):
    return with_roles(subject, made.rows)


@pytest.fixture(scope="module")
def handle(made, looking):
    generator = torch.Generator().manual_seed(1000)
    banks = [draw_pairs(causal(), pool, "balanced", 50, generator) for pool in made.rows.chunk(3)]
    fit, calibration, test = record(looking, *banks)
    problem = Problem(looking, fit, calibration, ("who",), as_readout("logits"))
    transport = Transport("uot-one-sided", (0.05,), (0.3,), scale="median")
    state = LocalizeTokens(transport, SignatureSpec(normalise="unit", centre=True))(problem, State.start(problem))
    [coupled] = state.candidates["who"]
    assert coupled.family.sites[coupled.coupling.ranking("who")[0]].name == "3+1"  # the one after the mark
    state = ClosedForm()(problem, SelectTokens(1)(problem, state))
    assert correct(test, state.handles["who"], problem.readout).double().mean() > 0.95
    return state.handles["who"]


def test_the_role_of_a_name_that_moves_is_found(handle, made, looking):
    assert handle.places == ["block_output.0@3+1"]
    assert torch.equal(looking.positions["3+1"](made.rows), made.true_position("who")(made.rows))


def test_a_saved_handle_finds_its_token_in_new_prompts(handle, made, subject, tmp_path):
    handle.save(tmp_path / "who.safetensors")
    found = Handle.load(tmp_path / "who.safetensors")
    other = moving("mark", 1000, arrangements=40)
    other.prompts.append([1, 11, 3, -1, -2, 12, -3, 13, 2])  # an arrangement that no role was read off
    other.where.append({"who": -6, "hue": -3})
    new = torch.tensor([[0, 1, 2, 40], [3, 0, 1, 40]])
    seen = with_roles(other.subject(), roles=roles_of(found))
    assert [p.name for p in seen.places] == ["block_output.0@3+1", "block_output.0"]
    outputs = found.apply(seen, new, made.rows[:2])
    assert torch.equal(outputs.argmax(dim=1), causal().swap(new, made.rows[:2], "who"))
    ids, mask = other.encode(new)
    with found.on(seen, made.rows[:2], base=new), torch.no_grad():
        live = seen.decoder.model(input_ids=ids, attention_mask=mask).logits[:, -1, 17:29]
    assert torch.allclose(live, outputs, atol=1e-3)


def test_paths_keep_the_rules_of_their_ends(looking):
    inside = along(looking, ["block_output.0@3+1->output"])
    [place] = inside.places
    edits = [EditBatch(place, Frame.identity(place.width), torch.ones(1, place.width))]
    found = roles_of(handle_from_edits("who", edits, 0, inside, {}))
    assert found == {"3+1": Role("near", 1, (3,))}


def test_named_positions_stay_beside_roles(made, subject):
    known = subject.looking_at({"mine": made.true_position("hue")})
    both = with_roles(known, made.rows)
    assert "block_output.0@mine" in [p.name for p in both.places]
    assert "mine" not in both.rules


# -- refusals --------------------------------------------------------------------------------------------------------


def test_what_has_no_roles_is_refused(handle, made, subject, looking):
    assert_refused(lambda: with_roles(subject), ["Give the `inputs`", "or the `roles`"])
    assert_refused(lambda: with_roles(subject, made.rows, roles={}), ["Give the `inputs`"])
    assert_refused(lambda: with_roles(subject, roles={}), ["nothing but the last token"])
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    assert_refused(
        lambda: with_roles(MLPSubject(net), made.rows), ["tokens in prompts", "MLPSubject", "load_subject(model, hyp"]
    )
    assert_refused(lambda: with_roles(subject, made.rows[:0]), ["no inputs"])
    assert_refused(lambda: with_roles(subject, made.rows, reach=-1), ["`reach`", "-1"])
    assert_refused(lambda: with_roles(subject, roles=looking.rules), ["roles_of(handle)", "found dict"])
    assert_refused(lambda: derive_roles([]), ["found none"])
    assert_refused(lambda: derive_roles([[1], []]), ["empty"])
    assert_refused(lambda: Role("middle"), ["Unknown kind of role 'middle'"])
    assert_refused(lambda: Role.read({"kind": "near", "number": "1"}), ["no role of a token"])
    assert_refused(lambda: Role.read({"kind": "near", "number": 1, "tokens": ["a"]}), ["no role of a token"])
    plain = handle_from_edits(
        "who", [EditBatch(subject.places[0], Frame.identity(64), torch.ones(1, 64))], 0, subject, {}
    )
    assert_refused(lambda: roles_of(plain), ["does not find its tokens by roles"])
    assert_refused(lambda: handle.apply(subject, made.rows[:2], made.rows[:2]), ["Unknown place 'block_output.0@3+1'"])


def test_a_token_without_a_word_still_has_a_name(made, subject):
    found = with_roles(subject, made.rows[:40], word=lambda token: None)
    assert len(found.rules) == len(with_roles(subject, made.rows[:40]).rules)


def test_a_prompt_without_the_role_is_refused(made, looking):
    other = moving("mark", 1000, arrangements=40)
    other.prompts[0] = [1, -1, -2, -3, 12, 13, 2]  # no mark
    seen = with_roles(other.subject(), roles={"after": Role("near", 1, (3,))})
    first = made.rows[made.rows[:, 3] == 0][:1]
    assert_refused(lambda: seen.record(first), ["Prompt 0 has no token 'after' (near)", "Derive the roles"])
