"""Training steps of Hugging Face transformers in PyTorch on one GPU: the peer of encoders' rows in docs/performance.md.

    python dev/transformers_speed.py t5 --batch 64 --compile

Random weights, random tokens, FP32 weights with BF16 autocast, fused AdamW, gradient clipping: what transformers'
Trainer does with `bf16=True`. Prints milliseconds a step (median of the timed ones) and GiB. Needs torch and
transformers, not megajax.
"""

import argparse
import statistics
import time
from typing import Any


def t5_large(transformers: Any) -> Any:
    widths = {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_heads": 16, "num_layers": 24, "num_decoder_layers": 24}
    how = {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "dropout_rate": 0.0,
        "use_cache": False,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=32128, **widths, **how))


def modernbert_large(transformers: Any) -> Any:
    widths = {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16}
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**widths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["t5", "modernbert"])
    parser.add_argument("--batch", type=int, required=True, help="sequences a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (T5: of the encoder)")
    parser.add_argument("--targets", type=int, default=114, help="tokens of the decoder")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    model = (t5_large if options.model == "t5" else modernbert_large)(transformers).cuda().train()
    vocabulary = model.config.vocab_size
    tokens = torch.randint(10, vocabulary, (options.batch, options.length), device="cuda")
    labels = tokens
    if options.model == "t5":
        labels = torch.randint(10, vocabulary, (options.batch, options.targets), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if options.compile else model
    times = []
    for _ in range(options.steps):
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    step = statistics.median(times[options.steps // 3 :])
    rate = options.batch * (options.length + (options.targets if options.model == "t5" else 0)) / step * 1e3
    print(
        f"{options.model} batch {options.batch} compile {options.compile}: {step:.1f} ms, {rate:,.0f} tokens/s,",
        end=" ",
    )
    print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, loss {loss.item():.3f}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
