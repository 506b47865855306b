"""Judge a model: quality, cache and speed, each with the protocol that makes the figure comparable."""
