"""``zenflow demo``: a small language model, fine-tuned four ways from the same weights on the same data."""
