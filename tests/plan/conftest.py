"""A config for the planner."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def eight_layers(tmp_path_factory) -> Callable[[int], Path]:
    """(sequences of a batch) → the file of a config with eight layers of Llama 3 8B."""

    def write(sequences: int) -> Path:
        path = tmp_path_factory.mktemp("configs") / "model.yaml"
        path.write_text(
            f"""
run: {{name: model, steps: 10}}
model: {{num_layers: 8, hidden_size: 4096, num_heads: 32, num_kv_heads: 8, ffn_hidden_size: 14336, vocab_size: 32000}}
mesh: {{data: -1}}
batch: {{global_size: {sequences}, sequence_length: 4096}}
data: {{kind: synthetic}}
"""
        )
        return path

    return write
