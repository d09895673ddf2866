"""Makes rope_frequencies.json: rotary frequencies by transformers' functions, for tests/ops/test_rope.py.

Needs the environment of make_transformers_references.py; it writes beside itself, the same bytes each time. Each case
has the arguments of `megajax.ops.rope_frequencies`, the `frequencies` as transformers computes them in float32, and
`attention_factor`, its factor of cosines and sines.
"""

import json
from pathlib import Path

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None, "truncate": True}
LONGROPE = {"short_factors": [1.0, 1.1, 1.5, 2.0], "long_factors": [1.2, 2.0, 5.0, 9.0], "attention_factor": None}
THEIRS = {"short_factors": "short_factor", "long_factors": "long_factor"}
CASES = (
    (128, 5e5, 1.0, {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 131072),
    (64, 1e4, 1.0, {"kind": "linear", "factor": 4.0}, 8192),
    (64, 1e4, 0.5, {"kind": "dynamic", "factor": 2.0}, 4096),  # not longer than in the original training
    (64, 1e4, 0.5, {"kind": "dynamic", "factor": 2.0}, 20000),
    (128, 1e6, 1.0, {"kind": "yarn", "factor": 4.0, **YARN}, 8192),
    # GPT-OSS
    (64, 150000.0, 1.0, {"kind": "yarn", "factor": 32.0, **YARN, "truncate": False}, 8192),
    (16, 100.0, 0.5, {"kind": "yarn", "factor": 1.5, **YARN, "beta_fast": 200.0, "beta_slow": 30.0}, 8192),
    (64, 1e4, 1.0, {"kind": "yarn", "factor": 40.0, **YARN, "attention_factor": 0.9}, 8192),
    (8, 1e4, 1.0, {"kind": "yarn", "factor": 2.0, **YARN, "beta_fast": 800.0, "beta_slow": 700.0}, 8192),
    # Kimi-K2
    (64, 5e4, 1.0, {"kind": "yarn", "factor": 32.0, **YARN, "beta_fast": 1.0}, 8192),
    (8, 1e4, 1.0, {"kind": "longrope", "factor": 4.0, **LONGROPE}, 4096),
    (8, 1e4, 1.0, {"kind": "longrope", "factor": 4.0, **LONGROPE}, 4097),
    (8, 1e4, 1.0, {"kind": "longrope", "factor": 4.0, **LONGROPE, "attention_factor": 1.1}, 8192),
)
ORIGINAL = 4096


def main() -> None:
    cases = []
    for head_dim, theta, fraction, scaling, length in CASES:
        given = {THEIRS.get(n, n): value for n, value in scaling.items() if n != "kind" and value is not None}
        rope = {"rope_type": scaling["kind"], "rope_theta": theta, "partial_rotary_factor": fraction, **given}
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=ORIGINAL,
            rope_parameters=rope,
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["kind"]](config, "cpu", seq_len=length)
        arguments = [head_dim, theta, fraction, {**scaling, "original_max_positions": ORIGINAL}, length]
        cases.append({"arguments": arguments, "frequencies": frequencies.tolist(), "attention_factor": factor})
    text = "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n"
    (Path(__file__).parent / "rope_frequencies.json").write_text(text)


if __name__ == "__main__":
    main()
