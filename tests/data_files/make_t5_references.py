"""Makes t5.npz (T5 1.1), t5_tied.npz (T5) and their folders: outputs by transformers, for tests/hf/test_t5.py.

The environment is that of make_transformers_references.py. Run it as `python tests/data_files/make_t5_references.py`.
Each file holds `model`, JSON, the section of the config that describes the network; `encoder_tokens` [2, 16], `tokens`
[2, 12] and `targets`, the numbers of the sequences of the encoder without padding (`lengths`), `logits` [2, 12, V] and
`loss`, the mean cross-entropy, in FP32; the network's own `tensors:NAME` and their gradients `gradient:NAME`; and
`generated` [2, 9], what the network generates greedily, from the start token on.
"""

import json
from pathlib import Path

import numpy as np
import torch
from make_transformers_references import randomise, write_folder
from transformers import T5Config, T5ForConditionalGeneration

SIZES = {"vocab_size": 99, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3}
BUCKETS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
MODEL = {
    "num_layers": 3,
    "hidden_size": 24,
    "num_heads": 4,
    "head_dim": 6,
    "ffn_hidden_size": 40,
    "vocab_size": 99,
    "norm_epsilon": 1e-6,
    "position": "relative",
    "relative_buckets": 8,
    "relative_max_distance": 10,
    "attention_scale": 1.0,
    "encoder": {"kind": "layers", "num_layers": 2, "sequence_length": 16},
}


def make(name: str, tied: bool, lengths: list[int]) -> None:
    """One network, its file and its folder; `lengths` are those of the encoder's sequences before the padding."""
    generator = torch.Generator().manual_seed(7 + tied)
    options = {
        "feed_forward_proj": "relu" if tied else "gated-gelu",
        "tie_word_embeddings": tied,
        "decoder_start_token_id": 0,
    }
    config = T5Config(**SIZES, **BUCKETS, num_heads=4, **options)
    network = T5ForConditionalGeneration(config).double().eval()
    if not tied:  # as in the published folders
        network.lm_head.weight = torch.nn.Parameter(torch.empty_like(network.lm_head.weight))
    randomise(network, generator, centre=1)
    source, target = (torch.randint(2, 99, (2, length), generator=generator) for length in (16, 12))
    mask = torch.arange(16) < torch.tensor(lengths)[:, None]
    tokens = torch.nn.functional.pad(target[:, :-1], (1, 0))
    logits = network(input_ids=source, attention_mask=mask, decoder_input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    loss.backward()
    generated = torch.zeros(2, 1, dtype=torch.long)  # not by `generate`: its cache has as many layers as the encoder
    with torch.no_grad():
        for _ in range(8):
            own = network(input_ids=source, attention_mask=mask, decoder_input_ids=generated).logits
            generated = torch.cat([generated, own[:, -1:].argmax(-1)], dim=1)
    parameters = dict(network.named_parameters())
    floats = {"logits": logits, "loss": loss}
    floats |= {f"tensors:{n}": p for n, p in parameters.items()} | {
        f"gradient:{n}": p.grad for n, p in parameters.items()
    }
    model = MODEL | {"tie_embeddings": tied, "scale_head": tied, "activation": "relu" if tied else "geglu"}
    integers = {"encoder_tokens": source, "tokens": tokens, "targets": target, "generated": generated}
    integers["lengths"] = torch.tensor(lengths)
    path = Path(__file__).parent / f"{name}.npz"
    np.savez_compressed(
        path,
        model=np.array(json.dumps(model)),
        **{n: a.numpy().astype(np.int32) for n, a in integers.items()},
        **{n: a.detach().numpy().astype(np.float32) for n, a in floats.items()},
    )
    print(path.name, path.stat().st_size)
    write_folder(network, path.with_suffix(".zip"))


if __name__ == "__main__":
    make("t5", tied=False, lengths=[16, 16])
    make("t5_tied", tied=True, lengths=[16, 11])
