"""Sites, and the families of them that stages choose from."""

from plot_ot.sites.attention_heads import heads
from plot_ot.sites.families import (
    Menu,
    Site,
    SiteFamily,
    blocks,
    neurons,
    pca_bands,
    pca_components,
    pca_prefixes,
    principal_frame,
    subspaces,
    tokens,
    whole_places,
)
from plot_ot.sites.sae import load_sae, sae_features

__all__ = [
    "Menu",
    "Site",
    "SiteFamily",
    "blocks",
    "heads",
    "load_sae",
    "neurons",
    "pca_bands",
    "pca_components",
    "pca_prefixes",
    "principal_frame",
    "sae_features",
    "subspaces",
    "tokens",
    "whole_places",
]
