"""Multi-head or grouped-query attention -> multi-head latent attention (MLA)."""
