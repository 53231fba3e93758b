"""The statuses that a verdict can have."""

from __future__ import annotations

from enum import Enum


class Status(str, Enum):
    """What the test banks say about a variable, as a value; its text is what files and tables hold."""

    PLACED = "placed"
    COMPACT = "placed and compact"
    IN_PART = "in part"
    OUTPUT = "output variable"
    DECODABLE = "decodable here, not used here"
    ABSENT = "not localized"
    UNDECIDED = "undecided"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def _missing_(cls, value: object) -> Status | None:
        return cls.UNDECIDED if value == "undecidable" else None  # what older runs call it

    @property
    def found(self) -> bool:
        """Whether the variable was placed."""
        return self in (Status.PLACED, Status.COMPACT)

    @property
    def meaning(self) -> str:
        """The status in one sentence."""
        return MEANINGS[self]


MEANINGS = {
    Status.PLACED: "The handle gives the counterfactual answers, clearly more often than every control does.",
    Status.COMPACT: "Placed, and in fewer dimensions than its place has, at no loss against swapping the whole place.",
    Status.IN_PART: "The handle clearly beats every control, but is right too seldom to carry the whole variable.",
    Status.OUTPUT: "The variable's label always equals the source's answer, so copying the source sets it as well.",
    Status.DECODABLE: "The handle reads the variable from directions that nothing later in the network uses.",
    Status.ABSENT: "The handle does no better than a control, or disturbs pairs that it should leave alone.",
    Status.UNDECIDED: "These pairs are too few, or of the wrong kind, to say.",
}
