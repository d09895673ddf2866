"""Launch lines of many models: what bash and Megatron-LM's own parser make of them, field by field.

`megatron_lines.json` was made by both; the expectations below restate Megatron's rules from its fields.
"""

import json
import math
from pathlib import Path

import pytest
import yaml
from single_device import make_config

from megajax.config import load_config
from megajax.config.megatron_flags import DEFAULTS, FLAGS, KEY, REFUSED
from megajax.tools.export_megatron.arguments import arguments_for
from megajax.tools.from_megatron.__main__ import read, translate
from megajax.tools.from_megatron.arguments import from_mapping
from megajax.tools.from_megatron.shell_values import MARK

HERE = Path(__file__).parent
LINES = HERE / "lines"
STORED = json.loads((HERE.parent / "data_files/megatron_lines.json").read_text())
SCRIPTS = json.loads((HERE.parent / "data_files/megatron_scripts.json").read_text())
THEIR_DEFAULTS = {dest: default for dest, _, default in reversed(STORED["flags"].values())}
SPLIT = {"train": ["0.5", "a", "0.5", "b"], "valid": ["c"]}


class Parsed(dict):
    """Megatron's arguments of a line, with the parser's defaults."""

    def __missing__(self, name):
        return THEIR_DEFAULTS[name]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with the file that one line reads, and an environment without variables of launchers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "split.json").write_text(json.dumps(SPLIT))
    for name in ("WORLD_SIZE", "NNODES", "SLURM_NNODES", "TP", "PP", "DTYPE", "FP8", "NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def has_no_mlp(a: Parsed) -> bool:
    """Whether all layers have experts of a width of their own, so that no layer has that of the MLPs."""
    frequency = a["moe_layer_freq"]
    everywhere = frequency == 1 if isinstance(frequency, int) else all(frequency)
    return bool(a["num_experts"]) and everywhere and a["moe_ffn_hidden_size"] != a["ffn_hidden_size"]


def network(a: Parsed) -> dict:
    """The network, from Megatron's arguments and TransformerConfig."""
    mla, tensor = a["multi_latent_attention"], a["tensor_model_parallel_size"]
    size = a["padded_vocab_size"] or a["vocab_size"] or 50257  # GPT2BPETokenizer
    multiple = a["make_vocab_size_divisible_by"] * tensor
    relu2, gated = a["squared_relu"], a["swiglu"]
    fused = a["add_bias_linear"] and a["bias_gelu_fusion"]
    gelu = "gelu" if a["openai_gelu"] or fused else "gelu_exact"
    learned = a["position_embedding_type"] == "learned_absolute" and not a["use_rotary_position_embeddings"]
    found = {
        "num_layers": a["num_layers"],
        "hidden_size": a["hidden_size"],
        "num_heads": a["num_attention_heads"],
        "vocab_size": -(-size // multiple) * multiple,
        "ffn_hidden_size": 4 * a["hidden_size"] if has_no_mlp(a) else a["ffn_hidden_size"],
        "activation": "clamped_swiglu" if a["quick_geglu"] else "swiglu" if gated else "relu2" if relu2 else gelu,
        "mlp_bias": a["add_bias_linear"],
        "attention_bias": True if a["add_bias_linear"] else "qkv" if a["add_qkv_bias"] else False,
        "norm": a["normalization"].lower(),
        "norm_epsilon": a["layernorm_epsilon"],
        "norm_zero_centred": a["layernorm_zero_centered_gamma"],
        "tie_embeddings": not a["untie_embeddings_and_output_weights"],
        "dropout": a["hidden_dropout"],
        "init_std": a["init_method_std"],
        "position": "learned" if learned else "rope",
        "max_positions": a["max_position_embeddings"] if learned else None,
        "attention_sinks": a["softmax_type"] == "learnable",
        "mtp_layers": a["mtp_num_layers"] or 0,
        "num_experts": a["num_experts"],
        "kv_lora_rank": a["kv_lora_rank"] if mla else None,
        "qk_clip": a["qk_clip_threshold"] if a["qk_clip"] else None,
        "sliding_window": int(str(a["window_size"]).strip("[(").split(",")[0]) + 1 if a["window_size"] else None,
    }
    if mla:
        names = {"qk_nope_head_dim": "qk_head_dim", "qk_rope_head_dim": "qk_pos_emb_head_dim"}
        found |= {ours: a[name] for ours, name in names.items()}
        found |= {name: a[name] for name in ("q_lora_rank", "v_head_dim")}
    else:
        norms = {"LayerNorm": "layernorm", "RMSNorm": True}
        found |= {
            "head_dim": a["kv_channels"],
            "num_kv_heads": a["num_query_groups"] if a["group_query_attention"] else a["num_attention_heads"],
            "qk_norm": norms[a["normalization"]] if a["qk_layernorm"] else False,
        }
    if not learned:
        found |= {"rope_theta": float(a["rotary_base"]), "rope_scaling": rope_scaling(a)}
        found |= {} if mla else {"rope_fraction": a["rotary_percent"]}
    return found


def rope_scaling(a: Parsed) -> dict | None:
    """What is set of the scaling of rotary frequencies."""
    factor = a["rotary_scaling_factor"]
    if a["multi_latent_attention"] and a["rope_type"] != "rope" and factor > 1:
        found = {"kind": "yarn", "factor": factor, "original_max_positions": 4096, "beta_fast": 32, "beta_slow": 1}
        return found | {"mscale": a["mscale"], "mscale_all_dim": a["mscale_all_dim"]}
    if a["position_embedding_type"] == "yarn":
        rounds = a["yarn_correction_range_round_to_int"] is not False
        found = {"kind": "yarn", "factor": factor, "original_max_positions": a["yarn_original_max_position_embeddings"]}
        concentration = 0.1 * a["mscale"] * math.log(factor) + 1  # mscale_all_dim is 0
        return found | {"truncate": rounds, "attention_factor": pytest.approx(concentration)}
    if a["use_rope_scaling"]:
        found = {"kind": "llama3", "factor": a["rope_scaling_factor"], "low_freq_factor": 1, "high_freq_factor": 4}
        return found | {"original_max_positions": 8192}
    linear = a["rotary_seq_len_interpolation_factor"]
    return {"kind": "linear", "factor": linear} if linear else None


def router(a: Parsed) -> dict:
    """The router, for models with experts."""
    kind, weight = a["moe_router_load_balancing_type"], a["moe_aux_loss_coeff"]
    sinkhorn = kind == "sinkhorn"
    function = "sigmoid" if sinkhorn and a["moe_router_topk"] == 1 else a["moe_router_score_function"]
    adjusted = a["moe_router_enable_expert_bias"] or a["moe_router_num_groups"]
    before = a["moe_router_pre_softmax"] and function == "softmax"  # sigmoid scores are never a softmax
    return {
        "score_function": function,
        "pre_softmax": before,
        "normalise": not before and not (function == "sigmoid" and a["moe_router_topk"] == 1),
        "scaling_factor": a["moe_router_topk_scaling_factor"] or 1.0,
        "num_groups": a["moe_router_num_groups"] or 1,
        "groups_per_token": a["moe_router_group_topk"] or 1,
        "expert_bias": a["moe_router_enable_expert_bias"],
        "sinkhorn": sinkhorn,
        "global_loss": weight if kind in ("aux_loss", "global_aux_loss") else 0.0,
        "sequence_loss": weight if kind == "seq_aux_loss" else 0.0,
        "loss_counts": "top_scores" if adjusted and weight else "chosen",
        "z_loss": a["moe_z_loss_coeff"] or 0.0,
        "capacity_factor": a["moe_expert_capacity_factor"],
        "logit_bias": a["add_bias_linear"],
    }


def experts(a: Parsed, config) -> dict:
    frequency, layers = a["moe_layer_freq"], a["num_layers"]
    pattern = [i % int(frequency) == 0 for i in range(layers)] if isinstance(frequency, int) else map(bool, frequency)
    from megajax.layout.kinds import layer_kinds

    assert [kind.block == "moe" for kind in layer_kinds(config.model)] == list(pattern)
    return {
        "experts_per_token": a["moe_router_topk"],
        "expert_ffn_hidden_size": a["moe_ffn_hidden_size"],
        "shared_expert_ffn_hidden_size": a["moe_shared_expert_intermediate_size"] or 0,
    }


def training(a: Parsed, world: int) -> dict:
    """The keys of other sections."""
    size, replicas = a["global_batch_size"], a["data_parallel_size"]
    if a["step_batch_size_schedule"]:
        size = int(a["step_batch_size_schedule"].split(":")[-1])
    moments = {"torch.float32": "float32", "torch.bfloat16": "bfloat16"}[a["exp_avg_dtype"]]
    kinds = {"inverse-square-root": "inverse_sqrt", "WSD": "wsd"}
    optimizers = {"adam": "adamw"}
    rounds = a["virtual_pipeline_model_parallel_size"] or 1
    found = {
        "mesh.tensor": a["tensor_model_parallel_size"],
        "mesh.pipeline": a["pipeline_model_parallel_size"],
        "mesh.context": a["context_parallel_size"],
        "pipeline.virtual_stages": rounds,
        "batch.global_size": size,
        "batch.num_microbatches": size // (a["micro_batch_size"] * replicas),
        "batch.sequence_length": a["seq_length"],
        "precision.compute": a["params_dtype"].removeprefix("torch.").replace("float", "float", 1)
        if a["params_dtype"] != "torch.float16" and a["params_dtype"] != "torch.half"
        else "float16",
        "precision.gradients": "bfloat16" if a["grad_reduce_in_bf16"] else "float32",
        "precision.fp8.recipe": {None: "none"}.get(
            a["fp8"], {"tensorwise": "current"}.get(a["fp8_recipe"], a["fp8_recipe"])
        ),
        "optimizer.kind": optimizers.get(a["optimizer"], a["optimizer"]),
        "optimizer.state": moments if a["use_precision_aware_optimizer"] else "float32",
        "optimizer.master": "split" if a["use_precision_aware_optimizer"] else "float32",
        "optimizer.offload": a["optimizer_offload_fraction"] if a["optimizer_cpu_offload"] else 0.0,
        "optimizer.weight_decay": a["weight_decay"],
        "optimizer.clip_norm": a["clip_grad"],
        "objective.average": "tokens" if a["calculate_per_token_loss"] else "microbatches",
        "schedule.kind": kinds.get(a["lr_decay_style"], a["lr_decay_style"]),
        "schedule.learning_rate": a["lr"],
        "schedule.delay_steps": 1,
        "run.seed": a["seed"],
        "run.log_interval": a["log_interval"],
        "run.deterministic": a["deterministic_mode"],
        "data.reset_attention": a["reset_attention_mask"] and not a["mock_data"],
        "data.reset_positions": a["reset_position_ids"],
        "data.mask_end_of_document_loss": a["eod_mask_loss"],
    }
    if "distributed_timeout_minutes" in a:
        found["run.hang_min_seconds"] = 60 * a["distributed_timeout_minutes"]
    if a["lr_decay_style"] != "constant":
        found["schedule.min_learning_rate"] = a["min_lr"]
    if a["optimizer"] in ("adam", "muon"):
        found |= {"optimizer.beta1": a["adam_beta1"], "optimizer.beta2": a["adam_beta2"]}
        found["optimizer.epsilon"] = a["adam_eps"]
    if not a["rampup_batch_size"] and not a["step_batch_size_schedule"]:
        found |= lengths(a, size)
    return found


def lengths(a: Parsed, size: int) -> dict:
    """Steps, with samples as multiples of the batch."""
    steps = a["train_iters"] if a["train_iters"] else a["train_samples"] // size
    decay = a["lr_decay_iters"] or (a["lr_decay_samples"] or a["train_samples"] or 0) / size or steps
    warmup = (
        a["lr_warmup_fraction"] * decay
        if a["lr_warmup_fraction"]
        else a["lr_warmup_iters"] or a["lr_warmup_samples"] / size
    )
    found = {"run.steps": min(steps, a["exit_interval"] or steps), "schedule.warmup_steps": math.ceil(warmup)}
    if a["lr_decay_style"] in ("linear", "cosine", "WSD"):
        found["schedule.decay_steps"] = math.ceil(decay)
    if a["lr_decay_style"] == "WSD":
        found |= {
            "schedule.wsd_decay_steps": a["lr_wsd_decay_iters"],
            "schedule.wsd_decay_style": a["lr_wsd_decay_style"],
        }
    return found


def values(config, key: str):
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_line_is_translated_as_megatron_reads_it(name, place):
    arguments, world = SCRIPTS[name]
    stored = STORED["lines"][name]
    given, found_world = read([str(LINES / name), *arguments])
    assert found_world == world
    text, _ = translate(given, world)
    (place / "run.yaml").write_text(text)
    config = load_config(place / "run.yaml")
    a = Parsed(stored["parsed"])
    expected = {f"model.{key}": value for key, value in network(a).items()} | training(a, world)
    if a["num_experts"]:
        expected |= {f"model.{key}": value for key, value in experts(a, config).items()}
        expected |= {f"model.router.{key}": value for key, value in router(a).items()}
    scaling = expected.pop("model.rope_scaling", None)
    differing = {key: (values(config, key), value) for key, value in expected.items() if values(config, key) != value}
    assert not differing
    assert (config.model.rope_scaling is None) == (scaling is None)
    assert {key: getattr(config.model.rope_scaling, key) for key in scaling or {}} == (scaling or {})
    mesh = config.mesh
    assert math.prod((mesh.pipeline, mesh.data, mesh.fsdp, mesh.expert, mesh.context, mesh.tensor)) == world
    assert mesh.data * mesh.fsdp * mesh.expert == a["data_parallel_size"]
    if a["num_experts"]:
        assert math.prod(getattr(mesh, axis) for axis in mesh.experts_over) == a["expert_model_parallel_size"]
        width = a["expert_tensor_parallel_size"]
        assert ("tensor" in mesh.experts_over) == (width < a["tensor_model_parallel_size"])
    assert (mesh.fsdp > 1) == a["use_megatron_fsdp"]
    check_comments(text)
    check_arguments(config, a)


def check_arguments(config, a: Parsed) -> None:
    """The arguments that a run is exported with are those of its line."""
    back = Parsed(arguments_for(config, 0, 0, (a["tensor_model_parallel_size"], 1, 1)))
    pairs = [(network(back), network(a))]
    if a["num_experts"]:
        pairs += [(router(back), router(a)), (experts(back, config), experts(a, config))]
    assert not {key: (mine[key], own[key]) for mine, own in pairs for key in own if mine[key] != own[key]}


# Those of the parser that any run has values of its own for, and the parser's values that are not a default's
OF_A_RUN = {
    *("num_layers", "encoder_num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("vocab_size", "padded_vocab_size", "normalization", "add_bias_linear", "bias_gelu_fusion", "swiglu"),
    *("untie_embeddings_and_output_weights", "position_embedding_type", "max_position_embeddings", "rope_type"),
    *("attention_dropout", "hidden_dropout", "yarn_correction_range_round_to_int", "seq_length", "encoder_seq_length"),
    *("mock_data", "lr", "train_iters", "global_batch_size", "micro_batch_size", "no_save_optim", "no_save_rng"),
    *("no_load_optim", "no_load_rng", "use_cpu_initialization", "overlap_p2p_comm", "deprecated_use_mcore_models"),
    *("attention_backend", "help"),
}
MIXTURE = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 8}
LAYERS = [  # several ways to say the kinds of layers, and Megatron's argument
    (MIXTURE | {"block_pattern": ["dense", "moe"]}, 2, "moe_layer_freq", [0, 1]),
    (MIXTURE | {"first_dense_layers": 1}, 2, "moe_layer_freq", [0, 1]),
    (MIXTURE | {"moe_layer_interval": 2}, 4, "moe_layer_freq", [0, 1, 0, 1]),
    ({"sliding_window": 8, "layer_pattern": [*["local", "global"] * 2]}, 4, "window_attn_skip_freq", [1, 0, 1, 0]),
    ({"rope_pattern": [*["rope", "none"] * 2]}, 4, "no_rope_freq", [0, 1, 0, 1]),
    ({"rope_pattern": ["rope"]}, 2, "no_rope_freq", None),
]
YARN = {"kind": "yarn", "factor": 4.0, "original_max_positions": 16}


def exported(model: dict, layers: int = 1) -> dict:
    small = {"num_layers": layers, "hidden_size": 16, "num_heads": 2, "vocab_size": 50}
    return arguments_for(make_config(small | model), 0, 0, (1, 1, 1))


def test_the_arguments_that_a_run_does_not_decide_are_the_parsers_defaults():
    """Values of Megatron's types, which are not always those of the words of a line."""
    found = exported({})
    assert {name for name, value in THEIR_DEFAULTS.items() if found.get(name) != value} == OF_A_RUN


@pytest.mark.parametrize(("model", "layers", "name", "expected"), LAYERS, ids=str)
def test_kinds_of_layers_are_exported_however_they_are_said(model, layers, name, expected):
    assert exported(model, layers)[name] == expected


def test_a_factor_that_does_not_count_is_no_obstacle_to_an_export():
    assert exported({"rope_scaling": YARN | {"mscale": 0.7}})["mscale"] == 1  # as in transformers


@pytest.mark.parametrize("is_latent", [True, False])
def test_yarns_own_numbers_are_exported_by_megatrons_names(is_latent):
    latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8} if is_latent else {}
    found = exported(latent | {"rope_scaling": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}})
    own = {"original_max_position_embeddings": 16, "beta_fast": 16.0, "beta_slow": 2.0}
    assert {name: found.get(name if is_latent else f"yarn_{name}") for name in own} == own


def check_comments(text: str) -> None:
    """Each value has a comment with its flag, or Megatron's default."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#") and not line.endswith(":")]
    assert len(lines) > 30 and all("  # " in line for line in lines)
    for line in lines:
        source = line.split("  # ", 1)[1]
        named = [word[2:] for word in source.split() if word.startswith("--") and word[2:] in FLAGS]
        assert named or "default" in source or "device" in source or "order" in source or "no validation" in source, (
            line
        )


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_reader_gives_the_words_that_bash_gives(name, place):
    from megajax.tools.from_megatron.launch_line import from_script

    found = from_script(LINES / name, SCRIPTS[name][0]).words
    stored = STORED["lines"][name]["words"]
    assert len(found) == len(stored) and len(found) > 20
    assert [word for word in found if not MARK.search(word)] == [
        theirs for ours, theirs in zip(found, stored, strict=True) if not MARK.search(ours)
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_saved_arguments_give_the_settings_of_the_line(name, place):
    """The arguments in a checkpoint are those that Megatron's parser has made."""
    arguments, world = SCRIPTS[name]
    saved = dict(STORED["lines"][name]["parsed"])
    line, _ = translate(read([str(LINES / name), *arguments])[0], world)
    if "tensorboard_dir" in saved:  # of a command substitution
        line = line.replace("$(date +%s)", "0")
    again, _ = translate(from_mapping(saved, "a checkpoint"), world)
    ours, theirs = yaml.safe_load(line), yaml.safe_load(again)
    for section in ("kernels", "communication"):  # written where they are in the line
        assert theirs.pop(section, {}).items() <= ours.pop(section, {}).items()
    assert theirs == ours and len(ours) > 8


def test_the_table_of_flags_is_that_of_megatrons_parser():
    flags = STORED["flags"]
    missing = {option for option in flags if option.startswith("--") and option[2:] not in FLAGS}
    assert missing == {"--help", "--yaml-cfg"}
    for option, (dest, kind, default) in flags.items():
        flag = FLAGS.get(option[2:])
        if flag is None or option == "-h" or option == "--yarn-correction-range-round-to-int":
            continue  # the last has the default of the flag that turns it off, which None means too
        assert flag.kind == kind or (kind == "value" and flag.kind in ("int", "float", "str")), option
        if flag.outcome not in (KEY, REFUSED):
            continue  # a default of the others only decides whether a comment names the flag
        assert flag.dest == dest, option
        single = kind == "many" and default is not None and not isinstance(default, list)
        expected = [str(default)] if single else default
        expected = "auto" if option == "--attention-backend" else expected
        ours = int(DEFAULTS[dest]) if option == "--moe-layer-freq" else DEFAULTS[dest]
        assert ours == expected or (not ours and not expected), option


def test_a_flag_of_another_version_sets_an_argument_of_this_one():
    """But for three, which have no other name here."""
    others = [flag for name, flag in FLAGS.items() if f"--{name}" not in STORED["flags"] and flag.outcome == KEY]
    unknown = {flag.name for flag in others if flag.dest not in THEIR_DEFAULTS}
    assert unknown == {"use-custom-fsdp", "cpu-offloading", "most-recent-k"} and len(others) > len(unknown)
