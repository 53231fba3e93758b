"""Run directories on disk: safe reading, atomic writing, locks."""
