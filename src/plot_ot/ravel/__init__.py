"""RAVEL's question: can one attribute of an entity be changed while its others stay? Its files, pairs and scores.

An entity such as a city has attributes (country, continent, language), and every prompt asks for one of them. With the
feature of attribute A taken from a source that names another entity,

    Cause(A)       = of prompts that ask for A, the share that answers with the source entity's value
    Iso(A)         = of prompts that ask for another attribute, the share that answers as before; its mean over these
    Disentangle(A) = (Cause(A) + Iso(A)) / 2

counted over pairs of entities that differ in the attribute that is asked for. (Huang et al. 2024, arXiv 2402.17700.)
"""

from plot_ot.ravel.data import Ravel, read_ravel
from plot_ot.ravel.scores import Disentangled, Scores, disentangle

__all__ = ["Disentangled", "Ravel", "Scores", "disentangle", "read_ravel"]
