"""Judge a model: perplexity and cache size, each with the protocol that makes the figure comparable."""
