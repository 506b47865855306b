"""What to run with what: the embedded demo, the real-checkpoint lane and the benchmarks."""
