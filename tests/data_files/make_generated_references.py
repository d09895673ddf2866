"""Makes generated.json: texts that transformers generates and scores with the tiny models of NAME.zip in this folder.

Needs the environment of make_transformers_references.py; run it as
`python tests/data_files/make_generated_references.py`. For each model: `prompts`, three lists of tokens of different
lengths; `tokens`, the 50 likeliest ones after each, without other prompts beside it; and `scores`, for pieces of these
sequences the sum of log-probabilities and whether each token is the likeliest. Computed in float32.
"""

import json
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

FOLDER = Path(__file__).parent
MODELS = (
    "tiny_llama",
    "tiny_mistral",
    "tiny_qwen3_local",
    "tiny_mixtral",
    "tiny_gpt_oss",
    "tiny_qwen3_next",
    "tiny_nemotron_h",
    "tiny_kimi_linear",
    "tiny_falcon_h1",
)
LENGTHS, COUNT = (3, 9, 17), 50


def score(model, tokens: list[int], start: int) -> list:
    """[tokens, start, the sum of log-probabilities of tokens[start:], whether each of them is the likeliest]."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, start - 1 : -1]
    targets = torch.tensor(tokens[start:])
    likelihood = torch.log_softmax(logits, -1).gather(1, targets[:, None]).sum().item()
    return [tokens, start, likelihood, bool((logits.argmax(-1) == targets).all())]


def references(folder: Path) -> dict:
    """The entry of one model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in LENGTHS]
    settings = {"do_sample": False, "max_new_tokens": COUNT, "pad_token_id": 0, "use_cache": False}
    inputs = [torch.tensor([prompt]) for prompt in prompts]
    outputs = [model.generate(i, attention_mask=torch.ones_like(i), **settings)[0].tolist() for i in inputs]
    tokens = [out[len(prompt) :] for out, prompt in zip(outputs, prompts, strict=True)]
    random = rng.integers(0, model.config.vocab_size, 40).tolist()
    scores = [score(model, outputs[0][:20], 3), score(model, outputs[1][:12], 7), score(model, random, 1)]
    return {"prompts": prompts, "tokens": tokens, "scores": scores}


if __name__ == "__main__":
    found = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as directory:
            with zipfile.ZipFile(FOLDER / f"{name}.zip") as archive:
                archive.extractall(directory)
            found[name] = references(Path(directory))
    (FOLDER / "generated.json").write_text(json.dumps(found) + "\n")
