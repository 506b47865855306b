"""What a model does on text: the statistics that a good merge needs, and the layers that yield them."""
