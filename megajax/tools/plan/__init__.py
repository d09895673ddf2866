"""A config's parameters, FLOPs, memory and time, without compilation; `plan.compile` compiles its step for H200s."""

DEVICE_NAMES = ("h200", "h100", "a100", "b200")  # of `plan.rates`, here because its import takes longer; first: default
