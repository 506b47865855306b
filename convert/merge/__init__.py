"""How the KV heads of a group become one: whole heads, or mixtures that commute with RoPE."""
