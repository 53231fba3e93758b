"""Networks that can be recorded once and resumed at an edit."""

from plot_ot.subjects.base import BankRecording, Place, Recording, Store, Subject, record, record_pairs
from plot_ot.subjects.causal import CausalSubject
from plot_ot.subjects.decoder import DecoderSubject
from plot_ot.subjects.decoder_store import DecoderStore
from plot_ot.subjects.gru import GRUNet, GRUSubject
from plot_ot.subjects.loading import load_model
from plot_ot.subjects.mlp import MLPSubject
from plot_ot.subjects.module import ModuleSubject
from plot_ot.subjects.sequential import SequentialSubject

__all__ = [
    "BankRecording",
    "CausalSubject",
    "DecoderStore",
    "DecoderSubject",
    "GRUNet",
    "GRUSubject",
    "MLPSubject",
    "ModuleSubject",
    "Place",
    "Recording",
    "SequentialSubject",
    "Store",
    "Subject",
    "load_model",
    "record",
    "record_pairs",
]
