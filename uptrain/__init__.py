"""Heal a converted model by training. So far: the plain loop that trains the embedded demo model."""
