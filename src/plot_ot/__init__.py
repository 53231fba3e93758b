"""PLOT: where in this network does this variable live, and how do I control it?"""

from plot_ot.abstract.banks import Bank, Splits, draw_pairs
from plot_ot.abstract.causal_model import CausalModel, Mechanism
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.abstract.pairs import read_inputs, read_pairs
from plot_ot.api import load_subject, localize
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.errors import PlotError
from plot_ot.handles import Edit, Handle
from plot_ot.methods import Method
from plot_ot.models.named import LanguageModel
from plot_ot.result import Evaluation, Result, evaluate
from plot_ot.signatures import Readout, Signatures, SignatureSpec, signatures
from plot_ot.sites import Site, SiteFamily, blocks, neurons, whole_places
from plot_ot.sites.heads import heads
from plot_ot.sites.sae import load_sae, sae_features
from plot_ot.stages.boundless import TrainBoundless
from plot_ot.stages.calibrate import Search, calibrate
from plot_ot.stages.masks import TrainMask
from plot_ot.stages.prefilter import Prefilter
from plot_ot.stages.problem import Candidate
from plot_ot.subjects import (
    CausalSubject,
    DecoderSubject,
    MLPSubject,
    ModuleSubject,
    Place,
    SequentialSubject,
    Subject,
    record,
)
from plot_ot.transport import Coupling, Transport, couple
from plot_ot.version import __version__

__all__ = [
    "Bank",
    "Candidate",
    "CausalModel",
    "CausalSubject",
    "Coupling",
    "DecoderSubject",
    "Edit",
    "EditBatch",
    "Evaluation",
    "Frame",
    "Handle",
    "Hypothesis",
    "LanguageModel",
    "MLPSubject",
    "Mechanism",
    "Method",
    "ModuleSubject",
    "Place",
    "PlotError",
    "Prefilter",
    "Readout",
    "Result",
    "Search",
    "SequentialSubject",
    "SignatureSpec",
    "Signatures",
    "Site",
    "SiteFamily",
    "Splits",
    "Subject",
    "TrainBoundless",
    "TrainMask",
    "Transport",
    "__version__",
    "blocks",
    "calibrate",
    "couple",
    "draw_pairs",
    "evaluate",
    "heads",
    "load_sae",
    "load_subject",
    "localize",
    "neurons",
    "read_inputs",
    "read_pairs",
    "record",
    "respond",
    "sae_features",
    "signatures",
    "whole_places",
]
