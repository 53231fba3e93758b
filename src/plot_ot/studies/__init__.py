"""Studies: methods on the seeds of a task, resumed where they stopped, as plain records."""
