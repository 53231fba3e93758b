"""The abstract side: causal models, hypotheses in plain Python, pairs of inputs and banks of them."""
