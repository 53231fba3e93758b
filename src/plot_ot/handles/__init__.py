"""Handles: executable interventions for one variable, applied to inputs or a live model, saved and shared."""

from plot_ot.handles.edit import Edit
from plot_ot.handles.handle import Handle, Setting, handle_from_edits

__all__ = ["Edit", "Handle", "Setting", "handle_from_edits"]
