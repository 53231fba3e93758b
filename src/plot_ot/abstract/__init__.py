"""The abstract side: causal models, hypotheses in plain Python, pairs of inputs and banks of them."""

from plot_ot.abstract.banks import Bank, Power, Splits, draw_pairs
from plot_ot.abstract.causal_model import CausalModel, Mechanism
from plot_ot.abstract.graph import Graph, draw_graph
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.abstract.pairs import PairTable, read_inputs, read_pairs
from plot_ot.abstract.positions import TokenSpan
from plot_ot.abstract.splitting import Pairs

__all__ = [
    "Bank",
    "CausalModel",
    "Graph",
    "Hypothesis",
    "Mechanism",
    "PairTable",
    "Pairs",
    "Power",
    "Splits",
    "TokenSpan",
    "draw_graph",
    "draw_pairs",
    "read_inputs",
    "read_pairs",
]
