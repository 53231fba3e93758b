"""Stages: each takes a problem and what was found so far, and returns what is known after it."""

from plot_ot.stages.boundless import BoundlessSpec, TrainBoundless
from plot_ot.stages.calibrate import Search, correct, pair_weights, scored
from plot_ot.stages.choose import Calibrate, Hint, PatchPlaces, SelectPlaces, SelectTokens, TrainDas
from plot_ot.stages.closed_form import ClosedForm
from plot_ot.stages.coupling import Localize, LocalizeTokens, ScoreSites
from plot_ot.stages.descent import Adam, DasSpec, descend
from plot_ot.stages.masks import MaskSpec, TrainMask
from plot_ot.stages.newton import NewtonHandles
from plot_ot.stages.prefilter import Prefilter, rank_correlation
from plot_ot.stages.problem import Calibration, Candidate, Clock, Problem, Stage, State
from plot_ot.stages.together import Together
from plot_ot.stages.ways import Best

__all__ = [
    "Adam",
    "Best",
    "BoundlessSpec",
    "Calibrate",
    "Calibration",
    "Candidate",
    "Clock",
    "ClosedForm",
    "DasSpec",
    "Hint",
    "Localize",
    "LocalizeTokens",
    "MaskSpec",
    "NewtonHandles",
    "PatchPlaces",
    "Prefilter",
    "Problem",
    "ScoreSites",
    "Search",
    "SelectPlaces",
    "SelectTokens",
    "Stage",
    "State",
    "Together",
    "TrainBoundless",
    "TrainDas",
    "TrainMask",
    "correct",
    "descend",
    "pair_weights",
    "rank_correlation",
    "scored",
]
