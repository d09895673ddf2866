"""A config stand-in with the fields that megajax.data reads, and small token files."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megajax.data.indexed import IndexedWriter
from megajax.schema.config import BatchConfig, Config


class StandIn(Config):
    def where(self, key: str) -> str:
        return f"run.yaml, line {len(key)}"


@pytest.fixture
def make_config():
    def make(*, global_size=4, sequence_length=8, seed=7, vocab_size=1000, schedule=None, **data):
        defaults = dict(
            kind="indexed", train=None, valid=None, test=None, split=None, tokenizer=None, synthetic_documents=None
        )
        unpacked = dict(
            valid_sets=(),
            stages=None,
            drop_last_validation_sample=True,
            begin_of_document=False,
            fim_rate=0.0,
            reset_attention=False,
            reset_positions=False,
            mask_end_of_document_loss=False,
        )
        batch = BatchConfig.model_construct(global_size=global_size, sequence_length=sequence_length, schedule=schedule)
        return StandIn.model_construct(
            run=SimpleNamespace(seed=seed, steps=10, eval_steps=2, extensions=()),
            model=SimpleNamespace(vocab_size=vocab_size),
            batch=batch,
            data=SimpleNamespace(**(defaults | dict(order="shuffled", workers=0, prefetch=2) | unpacked | data)),
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
