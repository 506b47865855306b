"""Checkpoints in, checkpoints out: what a model is, and how its key/value heads are merged."""
