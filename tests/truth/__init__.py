"""Networks whose truth is known: where each variable lives, how much of it, or that it does not."""
