"""Makes chat.json: conversations as transformers tokenises them, with the mask of the assistant's tokens.

Needs the environment of make_transformers_references.py; run it as `python tests/data_files/make_chat_references.py`.
The file holds `tokenizer` (the text of a tokenizer.json whose tokens are pieces of words, as in real ones), `template`
(which marks the assistant's text), and `conversations`: messages, ids and mask of each.
"""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = """{{ bos_token }}{%- for message in messages %}
<|start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim }}<|end|>{% endgeneration %}
{% else %}{{ message['content'] }}<|end|>
{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""
WORDS = "the quick brown fox jumps over a lazy dog while naïve café owners say 你好 and 42 + 17 is 59 !".split()


def conversations(rng: random.Random) -> list[list[dict[str, str]]]:
    """Twenty of them: with and without a system turn, one to four answers, tool turns, blanks around texts."""
    out = []
    for i in range(20):
        messages = [{"role": "system", "content": "be brief"}] if i % 3 == 0 else []
        for turn in range(1 + i % 4):
            said = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(3)]
            messages.append({"role": "user", "content": said[0]})
            if i % 5 == 4 and turn == 0:
                messages.append({"role": "tool", "content": said[2]})
            messages.append({"role": "assistant", "content": f" {said[1]} " if i % 2 else said[1]})
        out.append(messages)
    return out


if __name__ == "__main__":
    rng = random.Random(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<|start|>", "<|end|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 10, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>")
    found = []
    for messages in conversations(rng):
        out = fast.apply_chat_template(
            messages, chat_template=TEMPLATE, return_assistant_tokens_mask=True, return_dict=True
        )
        found.append({"messages": messages, "ids": list(out["input_ids"]), "mask": list(out["assistant_masks"])})
    file = Path(__file__).parent / "chat.json"
    content = {"tokenizer": tokenizer.to_str(), "template": TEMPLATE, "conversations": found}
    file.write_text(json.dumps(content) + "\n")
