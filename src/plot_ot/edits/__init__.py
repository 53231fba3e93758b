"""The one edit behind every intervention, and how networks respond to it."""

from plot_ot.edits.frames import EditBatch, Frame
from plot_ot.edits.responses import Distinct, Gathered, respond, resume_edited, stream

__all__ = ["Distinct", "EditBatch", "Frame", "Gathered", "respond", "resume_edited", "stream"]
