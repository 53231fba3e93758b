"""A quick look at a hypothesis: handles in closed form, and the gates that need no search of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from plot_ot.handles import Handle
from plot_ot.judging import gates as g
from plot_ot.judging.controls import controls, full_patch
from plot_ot.judging.intervals import Bootstrap
from plot_ot.judging.status import Status
from plot_ot.judging.verdict import Verdict
from plot_ot.methods import Method
from plot_ot.signatures import Readout
from plot_ot.stages import ClosedForm
from plot_ot.stages.calibrate import correct
from plot_ot.subjects import BankRecording

QUICK = Method("quick", "closed forms at every place", (ClosedForm(),))


def quick_verdict(handle: Handle, tests: Mapping[tuple[str, str], BankRecording], readout: Readout) -> Verdict:
    """A verdict by the gates that need no search of their own, for a handle that a quick look found."""
    variable, sensitivity = handle.variable, tests[handle.variable, "sensitivity"]
    invariance, subject = tests[handle.variable, "invariance"], sensitivity.subject
    power = sensitivity.bank.power(variable)
    gaps = power.missing(g.LEAST_PAIRS)
    if gaps and not power.is_output:
        sentence = f"{variable}: undecided with these pairs; too few {'; '.join(gaps)}."
        return Verdict(variable, Status.UNDECIDED, sentence, {})
    if power.is_output:
        return Verdict(variable, Status.OUTPUT, f"{variable}: an output variable; copying it proves nothing.", {})
    tested = sensitivity.select(sensitivity.bank.discriminating(variable))
    boot, boot_kept = Bootstrap(tested.bank), Bootstrap(invariance.bank)
    right = correct(tested, handle, readout)
    copied = controls(tested, variable, readout)["copy-source"]
    patches = [correct(tested, full_patch(variable, [p], subject), readout).double() for p in subject.places]
    accuracy = boot.accuracy(right, balanced=True)
    kept = boot_kept.accuracy(correct(invariance, handle, readout), balanced=True)
    table = (
        g.beats("copying the source", boot.interval((right.double() - copied.double()).numpy())),
        g.beats("random places", boot.interval((right.double() - torch.stack(patches).mean(dim=0)).numpy())),
        g.works(accuracy, boot.balanced_bases),
        g.leaves_the_rest_alone(kept, boot_kept.balanced_bases),
    )
    numbers = {
        "handle": accuracy.value,
        "handle_low": accuracy.low,
        "handle_high": accuracy.high,
        "invariance": kept.value,
    }
    broken = [gate for gate in table if gate.fails]
    status = Status.ABSENT if broken else Status.UNDECIDED
    said = "not localized by a quick look" if broken else "undecided after a quick look"
    reasons = "; ".join(gate.sentence for gate in broken or table)
    return Verdict(variable, status, f"{variable}: {said} ({', '.join(handle.places)}): {reasons}.", numbers, table)
