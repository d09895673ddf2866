"""A config stand-in with the fields that megajax.data reads, and small token files."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megajax.data.indexed import IndexedWriter
from megajax.schema.config import BatchConfig, Config
from megajax.schema.data import DataConfig
from megajax.schema.model import ModelConfig


class OpenData(DataConfig, frozen=False):
    """Settings that a test may change."""


class StandIn(Config):
    def where(self, key: str) -> str:
        return f"run.yaml, line {len(key)}"


@pytest.fixture
def make_config():
    def make(*, global_size=4, sequence_length=8, seed=7, vocab_size=1000, schedule=None, **data):
        batch = BatchConfig.model_construct(global_size=global_size, sequence_length=sequence_length, schedule=schedule)
        return StandIn.model_construct(
            run=SimpleNamespace(seed=seed, steps=10, eval_steps=2, extensions=()),
            model=ModelConfig(num_layers=1, hidden_size=8, num_heads=1, vocab_size=vocab_size),
            batch=batch,
            data=OpenData.model_construct(**data),
        )

    return make


@pytest.fixture
def write_documents(tmp_path):
    """Writes documents (lists of tokens) under a name, returns the prefix."""

    def write(documents, name="tokens", dtype=np.uint16) -> str:
        prefix = str(Path(tmp_path, name))
        with IndexedWriter(prefix, dtype) as writer:
            for document in documents:
                writer.add_document(document)
        return prefix

    return write
