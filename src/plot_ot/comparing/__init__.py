"""Rival hypotheses about one network: which of them it implements, or none."""

from plot_ot.comparing.costs import ComparisonPlan, plan_comparison
from plot_ot.comparing.entry import compare
from plot_ot.comparing.regions import Region, Rule
from plot_ot.comparing.standings import Comparison, Stand, Standing
from plot_ot.comparing.telling import Telling

__all__ = [
    "Comparison",
    "ComparisonPlan",
    "Region",
    "Rule",
    "Stand",
    "Standing",
    "Telling",
    "compare",
    "plan_comparison",
]
