"""A config's parameters, FLOPs, memory and time, without compilation; `plan.compile` compiles its step for H200s."""

DEVICE_NAMES = ("h200", "h100", "a100", "l40s", "b200")  # of `plan.rates`, whose import takes longer; first: default
