"""The parts of the benchmark: each defines a measurement and its targets."""
