"""Hypotheses in plain Python: functions of dicts, prompts and answers, pairs from anywhere, splits without overlap."""
