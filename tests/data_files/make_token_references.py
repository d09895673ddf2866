"""Makes tokens.json: what transformers makes of the tokenizers of token_families.py.

Needs the environment of make_transformers_references.py; run it as `python tests/data_files/make_token_references.py`.
The file holds `model` (a SentencePiece model in base64) and for each family the ids of its begin and end of a text,
the tokens of TEXT with and without the tokenizer's own, of TEXT + COMPLETION, of CHAT, and the ids that stop
generation.
"""

import base64
import io
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece
from token_families import CHAT, COMPLETION, FAMILIES, PIECES, TEXT, write_family
from transformers import AutoTokenizer, GenerationConfig


def sentencepiece_model() -> bytes:
    """A byte-pair model with bytes, as Llama 2's is made."""
    lines = [f"The quick fox {i} jumps over it. Who are you? A fox. <b>Still one</b> [INST] now?" for i in range(40)]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(lines),
        model_writer=written,
        model_type="bpe",
        vocab_size=PIECES,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return written.getvalue()


def values(folder: Path) -> dict:
    """What transformers says of a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {
        "begin": tokenizer.bos_token_id,
        "end": tokenizer.eos_token_id,
        "plain": tokenizer(TEXT, add_special_tokens=False).input_ids,
        "prompt": tokenizer(TEXT).input_ids,
        "completed": tokenizer(TEXT + COMPLETION).input_ids,
    }
    if tokenizer.chat_template:
        found["chat"] = tokenizer.apply_chat_template(CHAT, return_dict=False)
    if (folder / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
        found["stops"] = ends if isinstance(ends, list) else [ends]
    return found


if __name__ == "__main__":
    model = sentencepiece_model()
    with TemporaryDirectory() as folder:
        found = {}
        for name in FAMILIES:
            write_family(name, Path(folder, name), model)
            found[name] = values(Path(folder, name))
    content = {"model": base64.b64encode(model).decode(), "families": found}
    (Path(__file__).parent / "tokens.json").write_text(json.dumps(content) + "\n")
