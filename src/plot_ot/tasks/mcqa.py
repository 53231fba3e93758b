"""Multiple-choice questions (paper, Section 4.3 and Appendix B.3): where does a language model keep which option is
right (the pointer), and which letter that is (the token)?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plot_ot.tasks import mcqa_data
from plot_ot.tasks.language import LanguageTask, TextData


@dataclass(frozen=True)
class MultipleChoice(LanguageTask):
    """The paper's third study, configured."""

    name = "mcqa"
    summary = "multiple-choice questions: pointer and letter in a language model (paper, Section 4.3)"
    data: ClassVar[TextData] = mcqa_data
