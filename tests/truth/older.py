"""The plants of `nets` and `plants` with their truth: subspaces and neurons of MLPs, sums in language models."""

from __future__ import annotations

import torch

from nets import PARITIES, PARITY_ROWS, planted_plane, random_parities
from plants import DIGIT_ROWS, DIGITS, SUMS, Plan, as_subject, random_plan, wired
from plot_ot.subjects import MLPSubject
from truth.known import ABSENT, HERE, Known, Truth

DEPTH = 5


def in_language_model(kind: str, seed: int, aligned: bool = True) -> Known:
    """Two sums at random tokens (`token`), both at the last token (`layer`), or seen by their heads (`head`)."""
    plan = random_plan(seed, DEPTH, aligned=aligned, at_last=kind == "layer")
    model, _ = wired(plan, DEPTH, torch.Generator().manual_seed(seed))
    options = {"kinds": ("head_output",)} if kind == "head" else {}
    subject = as_subject(model, range(DIGITS) if kind == "token" else (), **options)
    truths = {v: Truth(HERE, dict.fromkeys(right_places(kind, plan, k))) for k, v in enumerate("pq")}
    if not aligned:
        truths = dict.fromkeys("pq", Truth(ABSENT))
    return Known(f"decoder {kind}" if aligned else f"absent decoder {kind}", seed, subject, SUMS, DIGIT_ROWS, truths)


def right_places(kind: str, plan: Plan, k: int) -> set[str]:
    """Every place that holds the k-th sum, all of it and nothing that it is made of."""
    if kind == "head":
        return {f"head_output.{plan.moves}.{plan.heads[k]}"}
    if kind == "layer":
        return {f"block_output.{b}" for b in range(plan.blocks[k], plan.adds)}
    at_token = {f"block_output.{b}@x{plan.tokens[k]}" for b in range(plan.blocks[k], plan.moves)}
    return at_token | {f"block_output.{b}" for b in range(plan.moves, plan.adds)}


def in_neurons(seed: int, aligned: bool = True) -> Known:
    """Parities in shuffled neurons of an MLP."""
    net, neurons = random_parities(seed, aligned)
    truths = dict.fromkeys(("left", "right"), Truth(HERE, {"layer1": None}) if aligned else Truth(ABSENT))
    if aligned:
        plane = torch.eye(net[0].out_features)[:, sorted(neurons)]
        truths["left"] = Truth(HERE, {"layer1": plane})
    return Known("neurons" if aligned else "absent neurons", seed, MLPSubject(net), PARITIES, PARITY_ROWS, truths)


def in_plane(seed: int) -> Known:
    """p and q in rotated planes of an MLP's first layer, among four others."""
    plant = planted_plane(seed, distractors=4)
    rows = torch.cartesian_prod(*[torch.arange(plant.levels)] * len(plant.causal.inputs))
    truths = {v: Truth(HERE, {"layer1": plane}) for v, plane in plant.truth.items()}
    return Known("subspace", seed, plant.subject, plant.causal, rows, truths)
