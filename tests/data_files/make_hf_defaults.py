"""Makes hf_defaults.json: what transformers reads of a config.json that lacks keys, for tests/hf/test_defaults.py.

Needs the environment of make_transformers_references.py; it writes beside itself, the same bytes each time. For each
model_type `default` are the keys of a config.json with nothing else. `removed` and `null` begin with the config.json of
a tiny model in this directory: for each key that is taken away, or null, the keys whose values change (null: refused).
`two` has keys that say the same thing twice: those that are taken away, those that are given, what changes.
"""

import json
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging

HERE = Path(__file__).parent
TINY = {"qwen3": "qwen3_local", "qwen3_moe": "qwen3_moe_mixed"}
FAMILIES = "gpt2 llama mistral mixtral qwen2 qwen3 qwen3_moe gemma2 gemma3_text phi3 olmo2 nemotron smollm3"
FAMILIES += " deepseek_v2 deepseek_v3 gpt_oss qwen3_next nemotron_h kimi_linear qwen3_5_text qwen3_5_moe_text"
FAMILIES += " granitemoehybrid bamba falcon_h1 mamba2 modernbert"
COMMON = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
# Of training, of ids, or of layouts that only the program uses
OTHERS = {"use_cache", "initializer_range", "pretraining_tp", "output_router_logits", "reorder_and_upcast_attn"}
OTHERS |= {"classifier_pooling", "deterministic_flash_attn", "initializer_cutoff_factor", "reference_compile"}
OTHERS |= {"sparse_pred_ignore_index", "sparse_prediction"}
LOCAL = ["sliding_attention"] * 3
TWO = {
    "gpt2": [([], {"num_hidden_layers": 5})],
    "mixtral": [([], {"num_experts": 8})],
    "qwen2": [
        ([], {"use_sliding_window": False, "layer_types": LOCAL}),
        (["layer_types"], {"max_window_layers": 1}),
        ([], {"max_window_layers": 1}),
    ],
    "qwen3_moe": [([], {"num_experts": 8})],
    "gemma3_text": [
        (["layer_types"], {"sliding_window_pattern": 2}),
        (["layer_types"], {"sliding_window_pattern": 2, "_sliding_window_pattern": 3}),
        ([], {"sliding_window_pattern": 2}),
    ],
    "phi3": [([], {"partial_rotary_factor": 0.25})],
    "nemotron": [([], {"rms_norm_eps": 0.1})],
    "smollm3": [
        ([], {"no_rope_layer_interval": 2}),
        (["no_rope_layers"], {"no_rope_layer_interval": 2}),
        (["layer_types"], {"use_sliding_window": True, "sliding_window": 8}),
    ],
    "modernbert": [
        (["layer_types"], {"global_attn_every_n_layers": 2}),
        ([], {"global_attn_every_n_layers": 2}),
        (["rope_parameters"], {"global_rope_theta": 100.0, "local_rope_theta": 10.0}),
        ([], {"global_rope_theta": 100.0}),
    ],
    "deepseek_v2": [([], {"num_experts": 4})],
    "deepseek_v3": [([], {"num_local_experts": 8})],
    "gpt_oss": [([], {"num_experts": 8})],
}


def is_read(key: str) -> bool:
    others = ("drop", "summary_", "router_", "token_id", "transformers", "_attn_")
    return key not in COMMON | OTHERS and not any(word in key for word in others)


def resolve(config: dict) -> dict | None:
    """The keys that transformers has of a config.json; None if it refuses them."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            found = AutoConfig.from_pretrained(folder).to_dict()
        except Exception:  # of several kinds
            return None
    return {key: value for key, value in found.items() if is_read(key)}


def changes(config: dict, whole: dict) -> dict | None:
    found = resolve(config)
    return found and {key: found.get(key) for key in found.keys() | whole.keys() if found.get(key) != whole.get(key)}


def aliases(family: str, whole: dict) -> list[tuple[list[str], dict]]:
    """For `TWO`: every other name of a key in place of the key, with neither its value nor the default."""
    default = resolve({"model_type": family}) or {}
    found = AutoConfig.for_model(family).attribute_map.items()
    names = [(alias, key) for alias, key in found if key in whole]  # the others are no keys of a file
    others = {key: (2 * whole[key], 3 * whole[key], 2) for _, key in names}
    values = {key: next(n for n in own if n not in (whole[key], default[key])) for key, own in others.items()}
    return [([key], {alias: values[key]}) for alias, key in names]


def main() -> None:
    logging.set_verbosity_error()
    out = {}
    for family in FAMILIES.split():
        with zipfile.ZipFile(HERE / f"tiny_{TINY.get(family, family)}.zip") as archive:
            config = json.loads(archive.read("config.json"))
        whole = resolve(config)
        assert whole is not None
        keys = sorted(key for key in config if is_read(key))
        without = {key: {k: v for k, v in config.items() if k != key} for key in keys}
        out[family] = {
            "default": resolve({"model_type": family}),
            "removed": {key: changes(without[key], whole) for key in keys},
            "two": [
                [drop, given, changes({k: v for k, v in config.items() if k not in drop} | given, whole)]
                for drop, given in [*TWO.get(family, ()), *aliases(family, whole)]
            ],
            "null": {key: changes(config | {key: None}, whole) for key in keys},
        }
    lines = []
    for family, kinds in out.items():
        parts = (f"  {json.dumps(kind)}: {json.dumps(values, sort_keys=True)}" for kind, values in kinds.items())
        lines.append(f"{json.dumps(family)}: {{\n" + ",\n".join(parts) + "\n}")
    (HERE / "hf_defaults.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
