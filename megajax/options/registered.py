"""The classes that modules of `run.extensions` register, by the name that a key of the config has.

The classes need jax, so that this module does not import them: their `register` functions put them here.
"""

from typing import Any

NEXT_TOKEN = "next_token"  # the objective of `objective.kind` that needs no registration
OBJECTIVES: dict[str, type[Any]] = {}  # for `objective.kind`
ENCODER_KIND, NO_ENCODER = "model.encoder.kind", "none"
ENCODERS: dict[str, type[Any]] = {}  # for ENCODER_KIND
