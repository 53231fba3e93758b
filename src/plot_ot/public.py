"""All public names in one place; `plot_ot` offers them as its own.

What is imported here, and the `__all__` of the rooms that `docs/api.md` names, is public; everything else is private.
"""

from plot_ot.abstract import (
    Bank,
    CausalModel,
    Hypothesis,
    Mechanism,
    Splits,
    TokenSpan,
    draw_pairs,
    read_inputs,
    read_pairs,
)
from plot_ot.api import load_subject, localize, run_study
from plot_ot.checking import Checkup, check
from plot_ot.comparing import Comparison, compare, plan_comparison
from plot_ot.edits import EditBatch, Frame, respond
from plot_ot.errors import CouplingWarning, PlotError, PlotWarning
from plot_ot.estimating import plan_localization
from plot_ot.handles import Edit, Handle, handle_from_edits
from plot_ot.judging import Status, Verdict, full_patch, judge
from plot_ot.methods import Method, MethodKind, layered, progressive
from plot_ot.models import LanguageModel
from plot_ot.result import Evaluation, Result, evaluate
from plot_ot.signatures import (
    Readout,
    Signatures,
    SignatureSpec,
    answer_sets,
    as_readout,
    distributions,
    jacobian_signatures,
    logit_difference,
    measure_signatures,
    nearest_value,
    real_values,
)
from plot_ot.sites import (
    Site,
    SiteFamily,
    blocks,
    heads,
    load_sae,
    neurons,
    pca_bands,
    pca_components,
    pca_prefixes,
    sae_features,
    subspaces,
    whole_places,
)
from plot_ot.stages import (
    Best,
    BoundlessSpec,
    Calibrate,
    Candidate,
    ClosedForm,
    DasSpec,
    Hint,
    Localize,
    MaskSpec,
    NewtonHandles,
    Prefilter,
    Problem,
    Search,
    SelectPlaces,
    SelectTokens,
    State,
    TrainBoundless,
    TrainDas,
    TrainMask,
)
from plot_ot.stages.calibrate import calibrate
from plot_ot.subjects import (
    CausalSubject,
    DecoderSubject,
    MLPSubject,
    ModuleSubject,
    PathSubject,
    Place,
    Role,
    SequenceSubject,
    SequentialSubject,
    Subject,
    along,
    record,
    record_pairs,
    roles_of,
    with_roles,
)
from plot_ot.transport import Coupling, Degeneracy, Flag, Transport, couple, solve
from plot_ot.version import __version__

__all__ = [  # noqa: RUF022 (sorted by what a name is for)
    # entry
    "localize",
    "load_subject",
    "evaluate",
    "run_study",
    "check",
    "compare",
    "plan_comparison",
    "plan_localization",
    "Result",
    "Evaluation",
    "Checkup",
    "Comparison",
    "PlotError",
    "PlotWarning",
    "__version__",
    # data
    "Hypothesis",
    "TokenSpan",
    "CausalModel",
    "Mechanism",
    "Bank",
    "Splits",
    "draw_pairs",
    "read_inputs",
    "read_pairs",
    # networks
    "Subject",
    "MLPSubject",
    "SequentialSubject",
    "ModuleSubject",
    "DecoderSubject",
    "SequenceSubject",
    "CausalSubject",
    "LanguageModel",
    "PathSubject",
    "along",
    "with_roles",
    "roles_of",
    "Role",
    "Place",
    "record",
    "record_pairs",
    # edits
    "Handle",
    "Edit",
    "Frame",
    "EditBatch",
    "respond",
    "handle_from_edits",
    # sites
    "Site",
    "SiteFamily",
    "neurons",
    "blocks",
    "whole_places",
    "heads",
    "pca_components",
    "pca_prefixes",
    "pca_bands",
    "subspaces",
    "load_sae",
    "sae_features",
    # signatures
    "Readout",
    "as_readout",
    "answer_sets",
    "distributions",
    "logit_difference",
    "nearest_value",
    "real_values",
    "SignatureSpec",
    "Signatures",
    "measure_signatures",
    "jacobian_signatures",
    # transport
    "Transport",
    "Coupling",
    "Degeneracy",
    "Flag",
    "CouplingWarning",
    "couple",
    "solve",
    # stages
    "Problem",
    "State",
    "Localize",
    "Prefilter",
    "SelectTokens",
    "SelectPlaces",
    "Calibrate",
    "Best",
    "ClosedForm",
    "NewtonHandles",
    "TrainDas",
    "TrainBoundless",
    "TrainMask",
    "Hint",
    "DasSpec",
    "BoundlessSpec",
    "MaskSpec",
    "Search",
    "Candidate",
    "calibrate",
    # methods
    "Method",
    "MethodKind",
    "progressive",
    "layered",
    # verdicts
    "Verdict",
    "Status",
    "judge",
    "full_patch",
]
