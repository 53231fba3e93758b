"""Multiple-choice questions (paper, Section 4.3 and Appendix B.3): where does a language model keep which option is
right (the pointer), and which letter that is (the token)?"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from plot_ot.files.privacy import shared_path
from plot_ot.files.seals import digest
from plot_ot.models.vocabulary import LEXICON, Lexicon
from plot_ot.studies.identity import tensor_bytes
from plot_ot.subjects.decoder.subject import Encode
from plot_ot.tasks import mcqa_data, mcqa_text
from plot_ot.tasks.filling import Filter
from plot_ot.tasks.language import LanguageTask, TextData
from plot_ot.tasks.mcqa_file import PublicQuestions, read_questions
from plot_ot.tasks.text_data import TextBanks


@dataclass(frozen=True)
class MultipleChoice(LanguageTask):
    """The paper's third study, configured."""

    questions: str | None = None
    """A file or hub data set of questions in the public `copycolors_mcqa` format, in place of generated ones."""
    name = "mcqa"
    summary = "multiple-choice questions: pointer and letter in a language model (paper, Section 4.3)"
    data: ClassVar[TextData] = mcqa_data

    def config(self) -> dict[str, object]:
        return {**super().config(), "questions": self.questions and shared_path(self.questions)}

    def sources(self) -> dict[str, str]:
        if self.public is None:
            return super().sources()
        rows = hashlib.sha256(tensor_bytes(self.public.rows)).hexdigest()
        return {**super().sources(), "questions": digest([rows, repr(self.lexicon)])}

    @cached_property
    def public(self) -> PublicQuestions | None:
        """The questions of the file, if there is one."""
        return read_questions(self.questions) if self.questions else None

    @property
    def lexicon(self) -> Lexicon:
        """The words that prompts may have."""
        return self.public.lexicon if self.public else LEXICON

    def encoder(self) -> Encode:
        lm = self.language_model
        return mcqa_text.encoder(lm.tokenizer, bos=lm.bos, lexicon=self.lexicon)

    def render(self, rows: Tensor) -> list[str]:
        return mcqa_text.render(rows, self.lexicon)

    def draw(self, seed: int, right: Filter) -> TextBanks:
        bases = self.public.rows if self.public else None
        return mcqa_data.draw_splits(seed, right, self.sizes, bases=bases, lexicon=self.lexicon)
