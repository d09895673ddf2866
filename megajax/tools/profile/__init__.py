"""Where the time of a train step goes: traces of steps, read against the compiled module and the planner's estimate."""
