"""Makes classifier.npz and classifier.zip, a sequence classifier of transformers, for tests/hf/test_classifiers.py.

The environment is that of make_transformers_references.py. The folder's embedding is tied to a head that it does not
have. The file holds `tokens` [4, S] and `logits` [4, 3], in FP32, those of the last tokens.
"""

from pathlib import Path

import numpy as np
import torch
from make_transformers_references import randomise, write_folder
from transformers import Qwen2Config, Qwen2ForSequenceClassification

LABELS = {0: "bad", 1: "good", 2: "neither"}
SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}

if __name__ == "__main__":
    config = Qwen2Config(
        **SIZES,
        num_key_value_heads=1,
        pad_token_id=0,
        id2label=LABELS,
        label2id={n: i for i, n in LABELS.items()},
        tie_word_embeddings=True,
    )
    generator = torch.Generator().manual_seed(50)
    network = Qwen2ForSequenceClassification(config).double().eval()
    randomise(network, generator, centre=1)
    tokens = torch.randint(1, SIZES["vocab_size"], (4, 12), generator=generator)
    logits = network(tokens).logits.detach().numpy().astype(np.float32)
    path = Path(__file__).parent / "classifier.npz"
    np.savez_compressed(path, tokens=tokens.numpy().astype(np.int32), logits=logits)
    write_folder(network, path.with_suffix(".zip"))
