"""The ground floor: attention in plain PyTorch, from multi-head to latent, each checked against transformers' own.

`sdpa` holds the product itself, `rope` the rotary embedding, `cache` what a layer remembers; `multihead` and `mla` are
modules over them. `latent` attends in latent space without expanding the cache, and `absorb` gives that to a stock
model of transformers.
"""
