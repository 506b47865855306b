"""What takes minutes and is run apart from the other tests: `make lanes`."""
