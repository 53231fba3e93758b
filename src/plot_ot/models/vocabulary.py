"""The words of copy-colour questions: colours, objects and templates that the embedded nets know."""

from __future__ import annotations

import string
from dataclasses import dataclass, replace

LETTERS = string.ascii_uppercase

COLOURS = ("red", "blue", "yellow", "green", "gray", "black", "white", "brown", "orange", "purple", "pink")

TEMPLATES = (
    "Question: {Noun} {is} {colour}. What color {is} {noun}?\n{options}\nAnswer:",  # the paper's
    "Fact: {Noun} {is} {colour}.\nQuestion: What color {is} {noun}?\n{options}\nAnswer:",
    "Question: What color {is} {noun}, given that {noun} {is} {colour}?\n{options}\nAnswer:",
)

# One, many, usual colour; facts in prompts may say otherwise.
_OBJECTS = """
banana bananas yellow, lemon lemons yellow, canary canaries yellow, taxi taxis yellow, sunflower sunflowers yellow,
pencil pencils yellow, duckling ducklings yellow, lamp lamps yellow,
lime limes green, cucumber cucumbers green, pea peas green, frog frogs green, cactus cactuses green, leaf leaves green,
lizard lizards green, bottle bottles green, tent tents green,
strawberry strawberries red, cherry cherries red, tomato tomatoes red, brick bricks red, rose roses red,
ladybug ladybugs red, lobster lobsters red, wagon wagons red, scarf scarves red, balloon balloons red,
carrot carrots orange, pumpkin pumpkins orange, tiger tigers orange, fox foxes orange, cone cones orange,
plum plums purple, grape grapes purple, eggplant eggplants purple, violet violets purple, robe robes purple,
blueberry blueberries blue, shirt shirts blue, kite kites blue, mailbox mailboxes blue, notebook notebooks blue,
bowl bowls blue, bicycle bicycles blue,
coconut coconuts brown, walnut walnuts brown, potato potatoes brown, bear bears brown, basket baskets brown,
barrel barrels brown, saddle saddles brown, chair chairs brown, table tables brown,
swan swans white, mushroom mushrooms white, snowflake snowflakes white, cloud clouds white, pillow pillows white,
daisy daisies white, egg eggs white, plate plates white, candle candles white,
elephant elephants gray, mouse mice gray, wolf wolves gray, dolphin dolphins gray, pigeon pigeons gray,
pebble pebbles gray, anvil anvils gray, spoon spoons gray,
raven ravens black, crow crows black, panther panthers black, tire tires black, piano pianos black, boot boots black,
umbrella umbrellas black,
flamingo flamingos pink, pig pigs pink, tulip tulips pink,
avocado avocados green, radish radishes red, bus buses yellow, otter otters brown, rhino rhinos gray,
apron aprons white, sofa sofas brown, glove gloves black, curtain curtains purple, ribbon ribbons pink,
eraser erasers pink, kettle kettles gray, vase vases blue, canoe canoes red, sapphire sapphires blue,
emerald emeralds green, amethyst amethysts purple, seashell seashells pink, parrot parrots green,
basketball basketballs orange
"""


@dataclass(frozen=True)
class Noun:
    """An everyday object: how it stands in a sentence as one and as many, and its usual colour."""

    one: str
    many: str
    usual: int = 0

    @classmethod
    def of(cls, one: str, many: str, usual: str) -> Noun:
        """Make a noun from its bare words; an article is put before the singular."""
        return cls(f"{'an' if one[0] in 'aeiou' else 'a'} {one}", many, COLOURS.index(usual))


@dataclass(frozen=True)
class Lexicon:
    """The words that rows index."""

    nouns: tuple[Noun, ...]
    templates: tuple[str, ...] = TEMPLATES

    def with_noun(self, phrase: str, plural: bool) -> tuple[Lexicon, int]:
        """The index of the noun with this phrase, in a lexicon that has it."""
        for k, noun in enumerate(self.nouns):
            if phrase == (noun.many if plural else noun.one):
                return self, k
        return replace(self, nouns=(*self.nouns, Noun(phrase, phrase))), len(self.nouns)


LEXICON = Lexicon(tuple(Noun.of(*entry.split()) for entry in _OBJECTS.replace("\n", " ").split(",")))
FAMILIAR = tuple(range(80))
"""Objects of the fit, calibration and test banks."""
FRESH = tuple(range(80, len(LEXICON.nouns)))
"""Objects of the transfer banks only."""
