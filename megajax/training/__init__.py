"""State, step, loop, evaluation and metrics."""
