"""What a task brings: a causal model, networks with banks by seed, methods with the paper's grids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plot_ot.abstract.banks import Splits
from plot_ot.abstract.causal_model import CausalModel
from plot_ot.engine import Recipe
from plot_ot.errors import PlotError
from plot_ot.methods import Method
from plot_ot.studies.prepared import Prepared, Sweep
from plot_ot.subjects import Subject


class SeedFailed(PlotError):
    """This seed gives no usable network or banks; it is listed as failed, never replaced."""


@dataclass(frozen=True)
class Outline:
    """The shapes of a study without its trained network: enough to count what would be computed."""

    subject: Subject
    splits: Splits
    outputs: int


class Task(ABC):
    """One study, configured."""

    name: str
    summary: str

    @abstractmethod
    def config(self) -> dict[str, object]:
        """The options that make this configuration of the task what it is."""

    @abstractmethod
    def causal_model(self) -> CausalModel:
        """The abstract side."""

    @abstractmethod
    def methods(self) -> dict[str, Method]:
        """The methods by name, in the order of the table."""

    def catalogue(self) -> dict[str, Method]:
        """The same methods for a list of them, without loading anything."""
        return self.methods()

    @abstractmethod
    def random_method(self, draw: int) -> Method:
        """The search of the transport methods with a random ranking in place of a coupling."""

    def sweep(self) -> Sweep | None:
        """The main transport method with its ε or β varied, for the stability figure."""
        return None

    @abstractmethod
    def prepare(self, seed: int, cache: Path) -> Prepared:
        """A network and its banks; raises SeedFailed when this seed cannot be used."""

    def subject_known(self, seed: int, cache: Path) -> Mapping[str, str] | None:
        """What `prepare` would give as the seed's network (`identity.subject_of`), where that is cheap to tell."""
        return None

    def network_recipe(self) -> Recipe | None:
        """How workers elsewhere load its network for themselves; None where networks are small and are sent."""
        return None

    @abstractmethod
    def outline(self, seed: int) -> Outline:
        """Untrained network and unfiltered banks of the right shapes."""
