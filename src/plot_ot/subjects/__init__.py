"""Networks that can be recorded once and resumed at an edit."""

from plot_ot.subjects.causal_subject import CausalSubject
from plot_ot.subjects.decoder.roles import Role, roles_of, with_roles
from plot_ot.subjects.decoder.sequences import SequenceSubject
from plot_ot.subjects.decoder.store import DecoderStore
from plot_ot.subjects.decoder.subject import DecoderSubject
from plot_ot.subjects.gru import GRUNet, GRUSubject
from plot_ot.subjects.mlp import MLPSubject
from plot_ot.subjects.module import ModuleSubject
from plot_ot.subjects.paths import Path, PathSubject, along
from plot_ot.subjects.places import Place
from plot_ot.subjects.protocol import BankRecording, Recording, Store, Subject, record, record_pairs
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
    "Path",
    "PathSubject",
    "Place",
    "Recording",
    "Role",
    "SequenceSubject",
    "SequentialSubject",
    "Store",
    "Subject",
    "along",
    "record",
    "record_pairs",
    "roles_of",
    "with_roles",
]
