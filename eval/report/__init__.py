"""One page that shows how conversions of one model compare."""
