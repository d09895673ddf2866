"""How head and loss are cut into chunks of tokens."""

import pytest

from megajax.config import Config
from megajax.kernel_choice import Hardware
from megajax.mesh import AXES
from megajax.step_plan import StepPlan


def chunks(tokens, tensor=1, vocab_size=1024, limit=None):
    config = Config.model_validate(
        {
            "model": {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": vocab_size},
            "batch": {"global_size": 1, "sequence_length": 8},
            "kernels": {"loss_chunk_tokens": limit},
        }
    )
    return StepPlan.make(config, dict.fromkeys(AXES, 1) | {"tensor": tensor}, Hardware("cpu")).chunks_of(tokens)


@pytest.mark.smoke
def test_chunks_have_at_most_4096_tokens_and_2_gib_of_logits():
    assert chunks(32768) == 8
    assert chunks(32768, vocab_size=128256) == 8  # 4096 · 128256 · 4 bytes is just below
    assert chunks(32768, vocab_size=256000) == 16  # 2097 tokens fit: 15.6 of them
    assert chunks(32768, tensor=4, vocab_size=256000) == 8
    assert chunks(8192) == 4
    assert chunks(4096) == 2  # not shorter than 2048
    assert chunks(64) == 1


@pytest.mark.smoke
def test_an_odd_number_of_tokens_is_filled_up_instead_of_cut_small():
    assert chunks(4099) == 3  # of 2048 and fewer
    assert chunks(8198, limit=4096) == 3
