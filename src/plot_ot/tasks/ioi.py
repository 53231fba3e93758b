"""Indirect object identification: where does a language model keep which of two names is meant, and the name itself?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plot_ot.tasks import ioi_data
from plot_ot.tasks.language import LanguageTask, TextData


@dataclass(frozen=True)
class IndirectObject(LanguageTask):
    """A task that small models solve without further training, so nothing needs planting."""

    model: str = "smollm2"
    name = "ioi"
    summary = "indirect object identification: position and name of who is handed the thing, in an untouched model"
    data: ClassVar[TextData] = ioi_data
