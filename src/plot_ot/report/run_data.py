"""A run's numbers as figures read them, and the small statistics they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from plot_ot.errors import PlotError
from plot_ot.files.run_directory import LISTS, Json, RunDirectory, read_json
from plot_ot.report.published import Published, published


@dataclass(frozen=True)
class RunData:
    """A run's numbers (lists that are not there are empty), and what they are about, in their own order."""

    run: RunDirectory
    results: Json
    couplings: list[Json]
    methods: list[str]
    variables: list[str]
    seeds: list[int]

    @classmethod
    def read(cls, run: RunDirectory) -> RunData:
        """The compiled results and couplings of a run."""
        results = read_json(run.path / "results.json")
        if not isinstance(results, dict):
            raise PlotError(f"{run.path / 'results.json'} is damaged: run the same command again to compile it anew.")
        results |= {name: results.get(name) or [] for name in LISTS}
        couplings = run.couplings() if (run.path / "couplings.json").exists() else []
        methods, variables, seeds = (
            list(dict.fromkeys(s[field] for s in results["selection"])) for field in ("method", "variable", "seed")
        )
        return cls(run, results, couplings, methods, variables, sorted(seeds))

    @property
    def published(self) -> Published | None:
        """The paper's numbers for this task and size, if it has any."""
        return published({**self.run.manifest["config"], "task": self.results.get("task")})

    def rows(self, name: str, **fields: object) -> list[Json]:
        """The entries of a list with the given values."""
        return [r for r in self.results[name] if all(r.get(k) == v for k, v in fields.items())]

    def handle_paths(self, seed: int, method: str) -> dict[str, Path]:
        """A method's handle files, by variable: for every variable, or none."""
        paths = {v: self.run.handle_path(seed, method, v) for v in self.variables}
        return paths if all(path.exists() for path in paths.values()) else {}

    def about(self, spread: str = " ± standard deviation") -> str:
        """How many seeds a figure is about, and what is shown of them."""
        failed = len({f["seed"] for f in self.results["failures"]})
        said = f"Mean{spread} over {len(self.seeds)} seeds" if len(self.seeds) > 1 else "One seed"
        return f"{said}{f' ({failed} failed and left out)' if failed else ''}."


def numbers(rows: Sequence[Mapping[str, Any]], field: str) -> list[float]:
    """A field's values; missing ones (null stands for NaN) are left out."""
    return [float(r[field]) for r in rows if r.get(field) is not None]


def mean_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; without values the mean is NaN, which is not drawn."""
    return (fmean(values), pstdev(values)) if values else (float("nan"), 0.0)
