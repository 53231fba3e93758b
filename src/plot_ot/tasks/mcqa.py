"""Multiple-choice questions (paper, Section 4.3 and Appendix B.3): where does a language model keep which option is
right (the pointer), and which letter that is (the token)?"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Bool
from torch import Tensor

from plot_ot.causal import CausalModel
from plot_ot.study import Prepared, Spoken
from plot_ot.subjects.decoder import DecoderSubject
from plot_ot.tasks import mcqa_data as data
from plot_ot.tasks.base import Outline
from plot_ot.tasks.language import CALIBRATIONS, LanguageTask


@dataclass(frozen=True)
class MultipleChoice(LanguageTask):
    """The paper's third study, configured."""

    sizes: data.Sizes = field(default_factory=data.Sizes)
    families: tuple[str, ...] = tuple(data.FAMILIES)
    name = "mcqa"
    summary = "multiple-choice questions: pointer and letter in a language model (paper, Section 4.3)"

    def config(self) -> dict[str, object]:
        return {**super().config(), "sizes": vars(self.sizes), "families": list(self.families)}

    def causal_model(self) -> CausalModel:
        return data.causal_model()

    @cached_property
    def subject(self) -> DecoderSubject:
        lm = self.language_model
        encode = data.encoder(lm.tokenizer, bos=lm.bos)
        return DecoderSubject(lm.model, encode, data.answer_tokens(lm.tokenizer), memory=self.memory)

    def right(self, rows: Tensor, said: Tensor) -> Bool[Tensor, " rows"]:
        return data.says(self.language_model.tokenizer, said, self.causal_model().answer(rows))

    def prepare(self, seed: int, cache: Path) -> Prepared:
        banks = data.draw_splits(seed, self.answers_correctly, self.sizes, families=self.families)
        return Prepared(
            self.name,
            self.language_model.name,
            seed,
            self.subject,
            banks.splits,
            self.look,
            CALIBRATIONS[self.calibration],
            {"pass_rates": banks.pass_rates},
            banks.transfer,
            Spoken(data.render, data.LETTERS, self.subject.watching(rest=True)),
        )

    def outline(self, seed: int) -> Outline:
        banks = data.draw_splits(seed, lambda rows: torch.ones(len(rows), dtype=torch.bool), self.sizes)
        return Outline(self.subject, banks.splits, outputs=len(data.LETTERS))
