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
from plot_ot.signatures.readouts import (
    READOUTS,
    Readout,
    answer_sets,
    as_readout,
    distributions,
    logit_difference,
    nearest_value,
    real_values,
)

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
    "answer_sets",
    "as_readout",
    "batches",
    "distributions",
    "jacobian_signatures",
    "logit_difference",
    "measure",
    "measure_signatures",
    "nearest_value",
    "real_values",
]
