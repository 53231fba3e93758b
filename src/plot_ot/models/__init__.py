"""Language models by name: loading, adapters, the embedded nets, planting."""

from plot_ot.models.adapters import load_adapter, save_adapter
from plot_ot.models.loading import load_model
from plot_ot.models.named import LanguageModel, ModelEntry, available, fetch, resolve
from plot_ot.models.planting import Plant, PlantBatch, planted_loss, planted_module
from plot_ot.models.tiny import load_tiny

__all__ = [
    "LanguageModel",
    "ModelEntry",
    "Plant",
    "PlantBatch",
    "available",
    "fetch",
    "load_adapter",
    "load_model",
    "load_tiny",
    "planted_loss",
    "planted_module",
    "resolve",
    "save_adapter",
]
