"""The healing lane: what uptraining makes of every way to convert the embedded model."""
