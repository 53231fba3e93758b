"""Take handles elsewhere, bring rotations from there: pyvene, MIB, causalab, TransformerLens, nnsight, a judge."""

from plot_ot.exchange.causalab import from_causalab, to_causalab
from plot_ot.exchange.components import pyvene_model
from plot_ot.exchange.lens import lens_hooks
from plot_ot.exchange.mib import from_mib, to_mib
from plot_ot.exchange.nnsight import NnsightSubject
from plot_ot.exchange.outside_judge import outside_errors
from plot_ot.exchange.pyvene_reading import from_pyvene
from plot_ot.exchange.pyvene_writing import pyvene_inputs, to_pyvene

__all__ = [
    "NnsightSubject",
    "from_causalab",
    "from_mib",
    "from_pyvene",
    "lens_hooks",
    "outside_errors",
    "pyvene_inputs",
    "pyvene_model",
    "to_causalab",
    "to_mib",
    "to_pyvene",
]
