"""How fast models read and decode, beside what the machine can do."""
