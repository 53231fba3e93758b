"""Hugging Face causal language models: recorded once, resumed at one token."""
