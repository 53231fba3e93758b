"""Effects of swaps in φ-space: read out, pooled over pairs, exact or linearised."""

from plot_ot.signatures.effects import (
    AGGREGATES,
    NORMALISATIONS,
    Agreement,
    Collection,
    Signatures,
    SignatureSpec,
    View,
    batches,
    measure,
    measure_signatures,
)
from plot_ot.signatures.jacobian import jacobian_signatures
from plot_ot.signatures.readouts import READOUTS, Readout, as_readout

__all__ = [
    "AGGREGATES",
    "NORMALISATIONS",
    "READOUTS",
    "Agreement",
    "Collection",
    "Readout",
    "SignatureSpec",
    "Signatures",
    "View",
    "as_readout",
    "batches",
    "jacobian_signatures",
    "measure",
    "measure_signatures",
]
