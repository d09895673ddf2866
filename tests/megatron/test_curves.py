"""Losses and gradient norms of tiny models are those of Megatron-Core 0.19.2, step by step from the same weights.

`dev/compare_megatron.py --record` stores Megatron's curves; here only megajax trains.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from megatron_parity.cases import STORED
from megatron_parity.megajax_side import train

CURVES = Path(__file__).parents[1] / "data_files/megatron_curves.json"
TOLERANCES = {"loss": 2e-6, "grad_norm": 2e-5}  # relative: rounding of FP32 sums, which grows from step to step


@pytest.mark.long
@pytest.mark.parametrize("name", STORED)
def test_steps_are_those_of_megatron_core(name):
    stored = json.loads(CURVES.read_text(encoding="utf-8"))
    *_, curve = train(STORED[name])
    assert curve[0]["loss"] - curve[-1]["loss"] > 0.2  # so that each step depends on those before
    for key, tolerance in TOLERANCES.items():
        found = [row[key] for row in curve]
        np.testing.assert_allclose(found, stored[f"{name}/megatron/{key}"], rtol=tolerance, err_msg=key)
