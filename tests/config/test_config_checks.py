"""Combinations that cannot run are errors, settings without effect are warnings."""

import re
import shlex
import tempfile
import warnings
from pathlib import Path
from typing import get_args

import pytest
from config_errors import first_place

from megajax.config import load_config
from megajax.config.rule_checks import check_rules
from megajax.errors import ConfigError
from megajax.schema import rules
from megajax.schema.layer_sections import RouterConfig
from megajax.schema.model import ModelConfig
from megajax.schema.tree import read_override

pytestmark = pytest.mark.usefixtures("base_config")

BASE = """\
model:
  num_layers: 12
  hidden_size: 64
  num_heads: 8
  vocab_size: 1000
batch: {global_size: 8, sequence_length: 32}
data: {kind: synthetic}
schedule: {decay_steps: 100}
"""


EXPERTS = "model.num_experts=8 model.experts_per_token=4"
UPCYCLE = "checkpoint.upcycle=true checkpoint.init_from=r model.num_experts=4"
MASKED = "objective.kind=masked_tokens model.causal=false"
REFUSED = {
    "logging.norms_interval=25": (
        "logging.norms_interval=25 is not a multiple of run.log_interval=10 (@): choose one, since norms are part of"
        " a logged line, or 0 for no norms."
    ),
    "run.max_rollbacks=1": (
        "run.max_rollbacks=1 needs checkpoints, but run.checkpoint_interval=0 (@):"
        " set run.checkpoint_interval, or set run.max_rollbacks=0."
    ),
    "run.max_rollbacks=1 run.checkpoint_interval=9 checkpoint.save_optimizer=false": (
        "run.max_rollbacks=1 needs checkpoints with optimizer state, but checkpoint.save_optimizer=false"
        " (the command line: run.max_rollbacks=1): remove checkpoint.save_optimizer, or set run.max_rollbacks=0."
    ),
    "run.max_rollbacks=1 run.checkpoint_interval=9 data.kind=indexed data.train=t data.order=megatron": (
        "run.max_rollbacks=1 cannot be combined with data.order=megatron, because that order is made for a fixed "
        "number of samples, and a rollback leaves out batches (@): use shuffled or sequential, or set "
        "run.max_rollbacks=0."
    ),
    "run.max_rollbacks=1 run.checkpoint_interval=9 data.kind=indexed data.train=t data.stages=[{from_step: 9, train: u}]": (  # noqa: E501
        "run.max_rollbacks=1 cannot be combined with data.stages=[{from_step: 9, train: u}], because stages begin "
        "at fixed samples, and a rollback leaves out batches (@): remove data.stages, or set run.max_rollbacks=0."
    ),
    "mesh.data=-1 mesh.fsdp=-1": (
        "mesh.data=-1 and mesh.fsdp=-1 cannot share the remaining devices (@): keep -1 on one axis only."
    ),
    "mesh.expert=2": (
        "mesh.expert=2 needs a model with experts (@):"
        " set model.num_experts, or use mesh.data or mesh.fsdp for the batch."
    ),
    "lora.rank=8": (
        "lora.rank=8 needs the weights of a trained model, but checkpoint.init_from=null (@): set "
        "checkpoint.init_from to a run or to a Hugging Face folder."
    ),
    "lora.rank=8 checkpoint.init_from=r precision.fp8.recipe=current": (
        "lora.rank=8 cannot be combined with precision.fp8.recipe=current (the command line: lora.rank=8):"
        " set precision.fp8.recipe=none."
    ),
    "lora.rank=8 checkpoint.init_from=r model.num_experts=4 model.router.expert_bias=true": (
        "lora.rank=8 freezes the routers, but model.router.bias_update_rate=0.001 changes their bias"
        " (the command line: lora.rank=8): set model.router.bias_update_rate=0."
    ),
    "checkpoint.upcycle=true": (
        "checkpoint.upcycle=true needs the weights of a dense model, but checkpoint.init_from=null (@):"
        " set checkpoint.init_from, or remove checkpoint.upcycle."
    ),
    "checkpoint.upcycle=true checkpoint.init_from=r": (
        "checkpoint.upcycle=true needs experts, but model.num_experts=null (@): set model.num_experts, or"
        " remove checkpoint.upcycle."
    ),
    f"{UPCYCLE} lora.rank=8": (
        "checkpoint.upcycle=true cannot be combined with lora.rank=8, because LoRA would freeze the routers, which are"
        " new (@): remove lora.rank."
    ),
    f"{UPCYCLE} checkpoint.init_state=all": (
        "checkpoint.upcycle=true cannot be combined with checkpoint.init_state=all, because the optimizer's state is"
        " that of the dense model (@): set checkpoint.init_state=position."
    ),
    f"{UPCYCLE} model.shared_expert_ffn_hidden_size=8": (
        "checkpoint.upcycle=true cannot be combined with model.shared_expert_ffn_hidden_size=8, because a dense model"
        " has no weights of a shared expert (@): set model.shared_expert_ffn_hidden_size=0."
    ),
    f"{UPCYCLE} model.expert_ffn_hidden_size=128": (
        "checkpoint.upcycle=true copies MLPs as they are, but model.expert_ffn_hidden_size=128 and"
        " model.ffn_hidden_size=256 differ (the command line: model.expert_ffn_hidden_size=128):"
        " set both to the width of the dense model's MLP."
    ),
    "model.experts_per_token=4": (
        "model.experts_per_token=4 needs experts, but model.num_experts=null (@): set model.num_experts, or remove"
        " model.experts_per_token."
    ),
    "model.num_experts=4 model.experts_per_token=8": (
        "model.experts_per_token=8 is more than model.num_experts=4 (the command line: model.experts_per_token=8):"
        " use 4 or less, or raise model.num_experts."
    ),
    "model.num_experts=8 model.router.num_groups=3": (
        "model.router.num_groups=3 does not divide model.num_experts=8 (the command line: model.router.num_groups=3):"
        " use 1, 2 or 4."
    ),
    "model.num_experts=8 model.router={num_groups: 2, groups_per_token: 3}": (
        "model.router.groups_per_token=3 is more than model.router.num_groups=2"
        " (the command line: model.router={num_groups: 2, groups_per_token: 3}): use 1 or 2."
    ),
    "model.num_experts=8 model.experts_per_token=3 model.router.num_groups=4": (
        "model.experts_per_token=3 is more than the 2 experts in model.router.groups_per_token=1 of"
        " model.router.num_groups=4 (the command line: model.experts_per_token=3): raise"
        " model.router.groups_per_token."
    ),
    "model.num_experts=8 mesh.expert=3": (
        "mesh.expert=3 does not divide model.num_experts=8 (the command line: mesh.expert=3): use 1, 2, 4 or 8."
    ),
    "model.num_experts=8 mesh.context=2 mesh.tensor=8 mesh.experts_over=[tensor,context]": (
        "mesh.context=2 x mesh.tensor=8 does not divide model.num_experts=8 (the command line:"
        " mesh.context=2): use sizes whose product is 1, 2, 4 or 8."
    ),
    "model.num_experts=8 mesh.expert=2 mesh.experts_over=[tensor]": (
        "mesh.expert=2 divides no experts, because mesh.experts_over=[tensor] does not contain expert (the command"
        " line: mesh.expert=2): add expert to mesh.experts_over, or use mesh.data."
    ),
    "mesh.experts_over=[tensor]": (
        "mesh.experts_over=[tensor] needs experts, but model.num_experts=null (@): set model.num_experts, or remove"
        " mesh.experts_over."
    ),
    "model.num_experts=8 mesh.tensor=2 model.expert_ffn_hidden_size=33": (
        "mesh.tensor=2 does not divide model.expert_ffn_hidden_size=33 (the command line: mesh.tensor=2):"
        " set mesh.tensor to 1, or change model.expert_ffn_hidden_size."
    ),
    "model.num_experts=8 model.mlp_bias=true model.shared_expert_ffn_hidden_size=64": (
        "model.mlp_bias=true cannot be combined with model.shared_expert_ffn_hidden_size=64 (the command line:"
        " model.mlp_bias=true): set model.mlp_bias=false."
    ),
    "model.activation=clamped_swiglu precision.fp8.recipe=current precision.fp8.backend=transformer_engine": (
        "precision.fp8.backend=transformer_engine cannot be combined with model.activation=clamped_swiglu (the "
        "command line: precision.fp8.backend=transformer_engine): set precision.fp8.backend=xla."
    ),
    "model.num_experts=8 precision.fp8.recipe=current precision.fp8.backend=transformer_engine": (
        "precision.fp8.backend=transformer_engine cannot be combined with model.num_experts=8 (the"
        " command line: precision.fp8.backend=transformer_engine): set precision.fp8.backend=xla."
    ),
    "model.num_experts=8 model.router={score_function: sigmoid, pre_softmax: true}": (
        "model.router.pre_softmax=true cannot be combined with model.router.score_function=sigmoid (the"
        " command line: model.router={score_function: sigmoid, pre_softmax: true}): set"
        " model.router.pre_softmax=false."
    ),
    "model.num_experts=8 model.router.drop_policy=position": (
        "model.router.drop_policy=position needs an expert capacity, but model.router.capacity_factor=null (the "
        "command line: model.router.drop_policy=position): set model.router.capacity_factor, or remove "
        "model.router.drop_policy."
    ),
    "model.num_experts=8 model.router={sinkhorn: true, expert_bias: true}": (
        "model.router.sinkhorn=true cannot be combined with model.router.expert_bias=true (the command"
        " line: model.router={sinkhorn: true, expert_bias: true}): remove one of them."
    ),
    "model.num_experts=8 model.shared_expert_gate=true": (
        "model.shared_expert_gate=true needs a shared expert, but model.shared_expert_ffn_hidden_size=0 (the "
        "command line: model.shared_expert_gate=true): set model.shared_expert_ffn_hidden_size, or remove "
        "model.shared_expert_gate."
    ),
    "mesh.tensor=3": (
        "mesh.tensor=3 does not divide model.num_heads=8 (@): set mesh.tensor to 1, 2, 4 or 8, or change"
        " model.num_heads."
    ),
    "model.hidden_size=65": (
        "model.num_heads=8 does not divide model.hidden_size=65 (x.yaml, line 4):"
        " change one of them, or set model.head_dim."
    ),
    "model.num_kv_heads=3": (
        "model.num_kv_heads=3 does not divide model.num_heads=8 (@): use 1, 2, 4 or 8, or change model.num_heads."
    ),
    "model.rope_fraction=0.3": (
        "model.rope_fraction=0.3 and model.head_dim=8 rotate 2.4 dimensions of each head (@): make this"
        " an even number, 2 or more."
    ),
    "model.head_dim=7": (
        "model.rope_fraction=1.0 and model.head_dim=7 rotate 7 dimensions of each head (@): make this an"
        " even number, 2 or more."
    ),
    "model.rope_fraction=1.0e-09": (
        "model.rope_fraction=1.0e-09 and model.head_dim=8 rotate 8e-09 dimensions of each head (@): make"
        " this an even number, 2 or more."
    ),
    "model.rope_scaling={factor: 8, low_freq_factor: 4}": (
        "model.rope_scaling.low_freq_factor=4.0 is not below model.rope_scaling.high_freq_factor=4.0 (@):"
        " use 1.0 and 4.0 as Llama 3.1 does."
    ),
    "model.rope_scaling={kind: yarn, factor: 4, beta_slow: 40}": (
        "model.rope_scaling.beta_slow=40.0 is more than model.rope_scaling.beta_fast=32.0 (@): use 32.0 or "
        "less, or raise model.rope_scaling.beta_fast."
    ),
    "model.rope_scaling={kind: longrope, factor: 4, short_factors: [1, 1, 1, 1], long_factors: [2]}": (
        "model.rope_scaling.kind=longrope needs 4 numbers in model.rope_scaling.long_factors, not 1 (@): give one for"
        " each rotated pair."
    ),
    "model.rope_scaling={kind: yarn, factor: 4} model.rope_theta=1": (
        "model.rope_scaling.kind=yarn cannot be combined with model.rope_theta=1.0 (@): use more than 1."
    ),
    "model.rope_scaling={kind: dynamic, factor: 2} model.rope_fraction=0.25": (
        "model.rope_scaling.kind=dynamic cannot be combined with model.rope_fraction=0.25 (@): rotate 4 or more"
        " dimensions of each head."
    ),
    "model.layer_pattern=[global,local]": (
        "model.layer_pattern=[global, local] needs a window for its local layers, but model.sliding_window=null "
        "(@): set model.sliding_window."
    ),
    f"model.layer_pattern=[{','.join(['global'] * 13)}]": (
        "model.layer_pattern=[global, global, global, global, global, global, global, ... has 13 entries,"
        " more than model.num_layers=12 (@): shorten the pattern."
    ),
    f"model.rope_pattern=[{','.join(['none'] * 13)}]": (
        "model.rope_pattern=[none, none, none, none, none, none, none, none, none, no... has 13 entries,"
        " more than model.num_layers=12 (@): shorten the pattern."
    ),
    "kernels.scan_unroll=5": (
        "kernels.scan_unroll=5 does not divide model.num_layers=12 (@): use 1, 2, 3, 4, 6 or 12."
    ),
    "batch.num_microbatches=3": ("batch.num_microbatches=3 does not divide batch.global_size=8 (@): use 1, 2, 4 or 8."),
    "model.max_positions=16 model.position=learned": (
        "batch.sequence_length=32 is more than model.max_positions=16 (@): use 16 or less, or raise "
        "model.max_positions."
    ),
    "remat.layers=13 remat.policy=full": (
        "remat.layers=13 is more than model.num_layers=12 (@): use 12 or less, or null for all."
    ),
    "remat.group=2": (
        "remat.group=2 needs remat.policy=full, but remat.policy=none (@): set remat.group=1, or remat.policy=full."
    ),
    "remat.group=5 remat.policy=full": (
        "remat.group=5 does not divide the 12 recomputed layers (@): use 1, 2, 3, 4, 6 or 12."
    ),
    "remat.group=3 remat.policy=full remat.layers=4": (
        "remat.group=3 does not divide the 4 recomputed layers (@): use 1, 2 or 4."
    ),
    "remat.group=3 remat.policy=full"
    " model.encoder.kind=layers model.encoder.num_layers=4 model.encoder.sequence_length=16": (
        "remat.group=3 does not divide the 4 recomputed layers of model.encoder.num_layers=4 (@): use 1, 2 or 4."
    ),
    "remat.group=3 remat.policy=full remat.layers=6"  # all four of the encoder
    " model.encoder.kind=layers model.encoder.num_layers=4 model.encoder.sequence_length=16": (
        "remat.group=3 does not divide the 4 recomputed layers of model.encoder.num_layers=4 (@): use 1 or 2."
    ),
    "kernels.attention=cudnn model.attention_softcap=50": (
        "kernels.attention=cudnn cannot be combined with model.attention_softcap=50.0 (@): use kernels.attention=auto."
    ),
    "model.qk_clip=100 model.attention_softcap=50": (
        "model.qk_clip=100.0 cannot be combined with model.attention_softcap=50.0, because the soft-cap bounds the"
        " scores itself (@): remove one of them."
    ),
    "kernels.attention=cudnn precision.compute=float32": (
        "kernels.attention=cudnn cannot be combined with precision.compute=float32 (@): use kernels.attention=auto."
    ),
    "schedule.min_learning_rate=1": (
        "schedule.min_learning_rate=1.0 is more than schedule.learning_rate=0.0003 (@): use 0.0003 or less,"
        " or raise schedule.learning_rate."
    ),
    "schedule.warmup_steps=101": (
        "schedule.warmup_steps=101 is more than schedule.decay_steps=100 (@): use 100 or less, or raise "
        "schedule.decay_steps."
    ),
    "schedule.wsd_decay_steps=60 schedule.kind=wsd schedule.warmup_steps=41": (
        "schedule.wsd_decay_steps=60 and schedule.warmup_steps=41 together are more than"
        " schedule.decay_steps=100 (@): shorten one of them."
    ),
    "data.kind=indexed": (
        "data.kind=indexed needs data.train (@): set data.train to the prefix of a .bin/.idx pair,"
        " or data.kind=synthetic to try without data."
    ),
    "run.deterministic=true run.dir=/my runs/x": (
        "run.deterministic=true passes a path in run.dir=/my runs/x to XLA as a flag, but a flag cannot"
        " contain the space in /my runs/x (the command line: run.dir=/my runs/x): choose a run.dir"
        " without spaces."
    ),
    "data.split=9,1,0 data.kind=indexed data.train=a data.valid=b": (
        "data.split=9,1,0 cannot be combined with data.valid=b (@): remove one of them."
    ),
    "data.synthetic_documents=2 data.kind=indexed data.train=a": (
        "data.synthetic_documents=2 needs data.kind=synthetic, but data.kind=indexed (@): set "
        "data.kind=synthetic, or remove data.synthetic_documents."
    ),
    "data.synthetic_documents=33": (
        "data.synthetic_documents=33 is more than batch.sequence_length=32 (@): use 32 or less, or raise "
        "batch.sequence_length."
    ),
}


def test_modules_that_predict_tokens_in_sight_are_refused():
    config = load_config("x.yaml", ["model.mtp_layers=1"])
    model = config.model.model_copy(update={"causal": False})
    objective = config.objective.model_copy(update={"kind": "of a user"})
    with pytest.raises(ConfigError, match=r"model.mtp_layers=1 cannot be combined with model.causal=false"):
        check_rules(config.model_copy(update={"model": model, "objective": objective}))


def test_a_value_beyond_a_key_that_is_not_read_is_no_error():
    load_config("x.yaml", ["schedule.kind=constant", "schedule.warmup_steps=50", "schedule.decay_steps=20"])


@pytest.mark.smoke
@pytest.mark.parametrize("overrides", REFUSED)
def test_an_impossible_combination_is_refused(overrides: str):
    first, *rest = re.split(r" (?=\w+(?:\.\w+)+=)", overrides)
    with pytest.raises(ConfigError) as caught:
        load_config("x.yaml", [first, *rest])
    assert first_place(str(caught.value)) == REFUSED[overrides].replace("@", f"the command line: {first}")


def test_a_decay_that_ends_with_the_run_is_refused_with_the_steps_of_the_run():
    Path("steps.yaml").write_text(BASE.replace("decay_steps: 100", "kind: wsd, warmup_steps: 95, wsd_decay_steps: 10"))
    with pytest.raises(ConfigError, match=r"decay_steps=100 \(the command line: run.steps=100; .*, or raise run.steps"):
        load_config("steps.yaml", ["run.steps=100"])


OF_EXPERTS = {f"model.{n}": field for n, field in ModelConfig.model_fields.items() if "expert" in n}
OF_EXPERTS |= {f"model.{name}": ModelConfig.model_fields[name] for name in ("moe_layer_interval", "first_dense_layers")}
OF_EXPERTS |= {f"model.router.{name}": field for name, field in RouterConfig.model_fields.items()}
del OF_EXPERTS["model.num_experts"]


@pytest.mark.parametrize("key", OF_EXPERTS)
def test_a_key_that_only_experts_read_is_refused_without_any(key):
    field = OF_EXPERTS[key]
    other = 0.5 if "float" in str(field.annotation) else 7
    if isinstance(field.default, bool | str):
        choices = get_args(field.annotation) or ("true", "false")
        other = next(each for each in choices if each != str(field.default).lower())
    with pytest.raises(ConfigError, match=f"^{re.escape(key)}={other} needs experts, but "):
        load_config("x.yaml", [f"{key}={other}"])


ALLOWED = [
    "model.head_dim=16",
    "model.num_experts=8 model.router.num_groups=2 model.router.loss_counts=top_scores",
    "model.layer_pattern=[local,local,global] model.sliding_window=8",
    "model.sliding_window=8",
    "model.rope_fraction=0.25",
    "model.rope_fraction=0.58 model.head_dim=100",
    "model.position=none",
    "remat.policy=full remat.layers=9 remat.group=3",
    "schedule.kind=wsd schedule.warmup_steps=40 schedule.wsd_decay_steps=60",
    "schedule.kind=constant schedule.decay_steps=1000 schedule.warmup_steps=200",
    "schedule.kind=inverse_sqrt schedule.decay_steps=null schedule.warmup_steps=1000",
    "run.checkpoint_interval=50 checkpoint.keep_every=200",
    "checkpoint.keep_every=200",
    "run.checkpoint_interval=50 run.eval_interval=25 checkpoint.keep_best=3",
    "logging.profile_start=1000",
    "kernels.attention=cudnn precision.compute=float16",
    "data.kind=indexed data.train=a data.split=9,1,0 run.eval_interval=5",
    "data.kind=indexed data.train=b data.valid=b data.test=c run.eval_interval=5",
    "data.split=9,1,0 data.train=ignored data.tokenizer=ignored",
    "optimizer.kind=sgd optimizer.beta1=0",
    # no moments, but other state that is moved
    "optimizer.kind=sgd optimizer.beta1=0 optimizer.master=split optimizer.offload=1.0",
    "optimizer.kind=sgd optimizer.beta1=0 optimizer.ema_decay=0.9 optimizer.offload=1.0",
    "data.synthetic_documents=32 data.reset_attention=true data.mask_end_of_document_loss=true",
    "data.kind=indexed data.train=a data.reset_attention=true data.reset_positions=true",
]


@pytest.mark.parametrize("overrides", ALLOWED)
def test_a_sound_combination_passes_without_a_warning(overrides: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config("x.yaml", overrides.split())


# The last legal value of each limit, and the first one beyond it
LIMITS = [
    ("objective.masking.masked=0.9 objective.masking.random=0.1", "objective.masking.random=0.2", MASKED),
    ("model.router.num_groups=4 model.router.groups_per_token=2", "model.experts_per_token=5", EXPERTS),
    ("model.router.num_groups=8 model.router.groups_per_token=8", "model.router.groups_per_token=9", EXPERTS),
    ("model.first_dense_layers=11", "model.first_dense_layers=12", EXPERTS),
    ("checkpoint.dir=s3://bucket/runs", "checkpoint.dir=s3://bucket", ""),
    ("checkpoint.dir=gs://bucket/of/many/folders/", "checkpoint.dir=gs:///runs", ""),
    ("checkpoint.dir=/s3/bucket/runs", "checkpoint.dir=s3:/bucket/runs", ""),
    *((f"{key}=a:b/c", f"{key}=file:///c", "") for key in ("run.dir", "run.compilation_cache", "data.index_cache")),
    ("checkpoint.export_hf.dir=a/b", "checkpoint.export_hf.dir=gs://b/c", "run.checkpoint_interval=1"),
    ("checkpoint.local_dir=/b", "checkpoint.local_dir=gs://b", "checkpoint.local_interval=1"),
    ("run.eval_interval=25", "run.eval_interval=100", "run.checkpoint_interval=50 checkpoint.keep_best=3"),
    ("run.eval_interval=25", "run.eval_interval=0", "run.checkpoint_interval=50 checkpoint.keep_best=3"),
    ("run.checkpoint_interval=50", "run.checkpoint_interval=0", "run.eval_interval=25 checkpoint.keep_best=3"),
    ("model.num_kv_heads=8", "model.num_kv_heads=16", ""),
    ("model.sliding_window=32", "model.sliding_window=0", ""),
    ("data.synthetic_documents=32", "data.synthetic_documents=33", "data.reset_attention=true"),
    ("batch.num_microbatches=8", "batch.num_microbatches=16", ""),
    ("remat.layers=12", "remat.layers=13", "remat.policy=full"),
    ("batch.sequence_length=8192", "batch.sequence_length=8200", "batch.global_size=131072"),  # 2^30 tokens a step
]


@pytest.mark.parametrize(("legal", "beyond", "others"), LIMITS)
def test_the_last_value_of_a_limit_passes_and_the_next_is_refused(legal: str, beyond: str, others: str):
    load_config("x.yaml", [*others.split(), *legal.split()])
    with pytest.raises(ConfigError):
        load_config("x.yaml", [*others.split(), *legal.split(), beyond])


def test_each_relation_of_two_numbers_holds_up_to_its_border():
    pairs = {"AtMost": [(3, 3), (4, 3)], "Below": [(2, 3), (3, 3)], "Divides": [(2, 6), (4, 6)]}
    pairs |= {"MultipleOf": [(6, 2), (6, 4)]}
    for name, (holds, fails) in pairs.items():
        rule = getattr(rules, name)("other")
        assert rule.holds(*holds, None, None) and not rule.holds(*fails, None, None), name
        assert rule.holds(None, 3, None, None) and rule.holds(3, None, None, None)
    assert rules.Below("other").holds(3, 0, None, None)  # 0: no limit
    assert rules.MultipleOf("other").holds(0, 0, None, None) and not rules.MultipleOf("other").holds(2, 0, None, None)


FORCED = "model.router.force_balance=true"
WARNED = {
    "model.rope_theta=500000.0": ("model.position=learned", "model.position=learned"),
    "model.rope_fraction=0.5": ("model.position=none", "model.position=none"),
    "model.max_positions=64": ("", "model.position=rope"),
    "model.rope_scaling={factor: 8.0}": ("model.position=none", "model.position=none"),
    "model.rope_scaling.beta_fast=16.0": ("model.rope_scaling={factor: 8}", "model.rope_scaling.kind=llama3"),
    "model.v_head_dim=16": ("", "model.kv_lora_rank=null"),
    "model.rope_local_theta=500.0": ("", "model.sliding_window=null"),
    "model.rope_pattern=[rope, none]": ("model.position=none", "model.position=none"),
    "model.sliding_window=8": ("model.layer_pattern=[global]", "model.layer_pattern=[global]"),
    "schedule.wsd_decay_steps=10": ("", "schedule.kind=cosine"),
    "schedule.decay_steps=900": ("schedule.kind=inverse_sqrt", "schedule.kind=inverse_sqrt"),
    "schedule.decay_steps=901": ("schedule.kind=constant", "schedule.kind=constant"),
    "schedule.min_learning_rate=1.0e-05": ("schedule.kind=constant", "schedule.kind=constant"),
    "optimizer.beta2=0.99": ("optimizer.kind=sgd", "optimizer.kind=sgd"),
    "optimizer.ademamix.alpha=8.0": ("", "optimizer.kind=adamw"),
    "optimizer.epsilon=1.0e-06": ("optimizer.kind=lion", "optimizer.kind=lion"),
    "remat.layers=3": ("", "remat.policy=none"),
    "precision.accumulation=bfloat16": ("", "batch.num_microbatches=1"),
    "lora.alpha=16.0": ("", "lora.rank=null"),
    "run.eval_interval=5": ("run.eval_steps=0", "run.eval_steps=0"),
    "logging.wandb_project=p": ("", "logging.wandb=false"),
    "logging.profile_steps=5": ("", "logging.profile_start=null"),
    "logging.profile_start=1001": ("", "run.steps=1000"),
    "logging.norms_interval=2000": ("", "run.steps=1000"),
    "data.reset_attention=true": ("", "data.synthetic_documents=null"),
    "data.mask_end_of_document_loss=true": ("", "data.synthetic_documents=null"),
    "data.begin_of_document=true": ("", "data.kind=synthetic"),
    "data.synthetic_documents=4": ("", "data.reset_attention=false"),
    "communication.context=all_gather": ("", "mesh.context=1"),
    "communication.experts=all_gather": ("model.num_experts=8", "mesh.expert=1"),
    "mesh.experts_over=[data]": ("model.num_experts=8", "mesh.data=1"),
    "kernels.grouped_matmul=reference": ("", "model.num_experts=null"),
    "model.router.bias_update_rate=0.5": ("model.num_experts=8", "model.router.expert_bias=false"),
    "model.router.group_score=max": ("model.num_experts=8", "model.router.num_groups=1"),
    "model.mamba2.num_heads=16": ("", "model.block_pattern=null"),
    "model.router.loss_counts=top_scores": ("model.num_experts=8", "model.router.expert_bias=false"),
    "model.ffn_hidden_size=96": (
        "model={num_experts: 8, expert_ffn_hidden_size: 32}",
        "model.expert_ffn_hidden_size=32",
    ),
    "model.ffn_hidden_size=97": ("model.block_pattern=[mamba2]", "model.block_pattern=[mamba2]"),
    "model.mtp_loss_weight=0.5": ("", "model.mtp_layers=0"),
    "model.q_lora_rank=8": ("", "model.kv_lora_rank=null"),
    "model.qk_nope_head_dim=16": ("", "model.kv_lora_rank=null"),
    "model.qk_rope_head_dim=16": ("", "model.kv_lora_rank=null"),
    "optimizer.muon.momentum=0.5": ("", "optimizer.kind=adamw"),
    "model.rope_scaling.mscale=0.7": (
        "model.rope_scaling={kind: yarn, factor: 4}",
        "model.rope_scaling.mscale_all_dim=null",
    ),
    "lora.dropout=0.5": ("", "lora.rank=null"),
    "lora.targets=[query]": ("", "lora.rank=null"),
    "run.spike_window=7": ("", "run.spike_factor=null"),
    "logging.mlflow_experiment=e": ("", "logging.mlflow=null"),
    "logging.prometheus_host=0.0.0.0": ("", "logging.prometheus_port=null"),
    "checkpoint.local_interval=5": ("", "checkpoint.local_dir=null"),
    "checkpoint.export_hf.every=2": ("", "checkpoint.export_hf.dir=null"),
    "checkpoint.export_hf.dtype=bfloat16": ("", "checkpoint.export_hf.dir=null"),
    "data.chat_template=a.jinja": ("", "data.kind=synthetic"),
    "data.chat_template_args={a: 1}": ("", "data.kind=synthetic"),
    "data.packing=first_fit": ("", "data.kind=synthetic"),
    "data.too_long=drop": ("", "data.kind=synthetic"),
    "data.text_key=other": ("", "data.kind=synthetic"),
    "data.fim_rate=0.5": ("data.tokenizer=byte", "data.kind=synthetic"),
    "data.fim_spm_rate=0.25": ("", "data.fim_rate=0.0"),
    "data.fim_tokens.prefix=<p>": ("", "data.fim_rate=0.0"),
    "data.train_samples=900": ("", "data.order=shuffled"),
    "data.drop_last_validation_sample=false": ("", "data.order=shuffled"),
    "data.index_cache=elsewhere": ("", "data.order=shuffled"),
    "data.reset_positions=true": ("", "data.synthetic_documents=null"),
    "run.hang_min_seconds=60.0": ("run.hang_factor=null", "run.hang_factor=null"),
    "optimizer.decay_norms=true": ("optimizer.weight_decay=0", "optimizer.weight_decay=0.0"),
    "optimizer.state=int8": ("optimizer={kind: sgd, beta1: 0}", "optimizer.beta1=0.0"),
    "optimizer.offload=1.0": ("optimizer={kind: sgd, beta1: 0}", "optimizer.beta1=0.0"),
    "model.router.num_groups=2": ("model={num_experts: 8, router: {force_balance: true}}", FORCED),
    "model.qk_norm=true": ("model.block_pattern=[gated_deltanet]", "model.block_pattern=[gated_deltanet]"),
    "model.qk_clip=100.0": ("model.block_pattern=[mamba2]", "model.block_pattern=[mamba2]"),
    "model.rope_theta=500.0": ("model.rope_pattern=[none]", "model.rope_pattern=[none]"),
    "model.rope_scaling={factor: 2.0}": (
        "model={sliding_window: 8, rope_local_theta: 100}",
        "model.rope_local_theta=100.0",
    ),
    "run.eval_steps=5": ("data={kind: indexed, train: t}", "data.valid=null"),
    "run.eval_interval=7": ("data={kind: chat, train: t, tokenizer: byte}", "data.valid=null"),
    "kernels.attention=reference": ("model.block_pattern=[mamba2]", "model.block_pattern=[mamba2]"),
    "model.activation=gelu": ("model.block_pattern=[attention]", "model.block_pattern=[attention]"),
}


@pytest.mark.parametrize("override", WARNED)
def test_a_setting_without_effect_is_warned_about(override: str):
    other, reason = WARNED[override]
    shown = override.replace("{a: 1}", "'{a: 1}'")
    expected = f"{shown} has no effect with {reason} (the command line: {override}): remove it."
    quiet = ["schedule.decay_steps=1000"]
    with pytest.warns(UserWarning) as caught:
        load_config("x.yaml", [*quiet, *([other] if other else []), override])
    assert [str(item.message) for item in caught] == [expected]


@pytest.mark.parametrize(("packing", "given"), [("first_fit", False), ("none", True)])
def test_what_chats_decide_themselves_is_warned_about_if_it_is_set_otherwise(packing: str, given: bool):
    chats = ["data.kind=chat", "data.train=t", "data.tokenizer=byte", f"data.packing={packing}"]
    settings = [f"data.reset_attention={str(given).lower()}", "data.mask_end_of_document_loss=true"]
    with pytest.warns(UserWarning) as caught:
        config = load_config("x.yaml", [*chats, *settings, "schedule.decay_steps=1000"])
    assert config.data.reset_attention is not given
    expected = f"{settings[0]} has no effect with data.kind=chat and data.packing={packing} (the command line: "
    assert [str(item.message) for item in caught] == [f"{expected}{settings[0]}): remove it."]
    Path("printed.yaml").write_text(config.to_yaml())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config("printed.yaml")


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ("model.experts_per_token=1 model.router.pre_softmax=true", "experts_per_token=2"),
        ("model.router.normalise=false model.router.pre_softmax=true", "router.normalise=true"),
        ("model.router.normalise=false model.router.score_function=sigmoid", "router.normalise=true"),
        ("model.router.scaling_factor=2.0", "router.scaling_factor=1"),
        ("model.router.capacity_factor=2.0", "router.capacity_factor=null"),
    ],
)
def test_experts_that_do_not_begin_with_the_loss_of_the_mlp_that_they_copy_are_warned_about(settings, cure):
    with pytest.warns(UserWarning) as caught:
        load_config("x.yaml", [*UPCYCLE.split(), *settings.split()])
    (found,) = caught
    assert f"set model.{cure} to begin with" in str(found.message)


URL = "https://host/shard"
REMOTE = ("data.train={0}", "data.valid={0}", "data.test={0}", "data.valid_sets=[{{name: easy, prefix: {0}}}]")


@pytest.mark.parametrize("place", [*REMOTE, "data.stages=[{{from_step: 5, train: {0}}}]"])
def test_the_index_cache_has_an_effect_wherever_a_url_is(place: str):
    local = ["data.kind=indexed", "data.train=a", "data.split=null", "data.index_cache=elsewhere"]
    with pytest.warns(UserWarning, match=r"data\.index_cache=elsewhere has no effect"):
        load_config("x.yaml", [*local, place.format("b")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config("x.yaml", [*local, place.format(f"'{URL}'")])


def test_positions_that_the_model_does_not_read_are_warned_about():
    override = "data.reset_positions=true"
    with pytest.warns(UserWarning) as caught:
        load_config("x.yaml", ["model.position=none", "data.synthetic_documents=2", override])
    assert [str(item.message) for item in caught] == [
        f"{override} has no effect with model.position=none (the command line: {override}): remove it."
    ]


@pytest.mark.parametrize(("split", "reason"), [("null", "data.valid=null"), ("95,0,5", "data.split=95,0,5")])
def test_evaluation_without_data_to_evaluate_is_warned_about(split: str, reason: str):
    with pytest.warns(UserWarning) as caught:
        load_config("x.yaml", ["data.kind=indexed", "data.train=a", f"data.split={split}", "run.eval_interval=5"])
    assert [str(item.message) for item in caught] == [
        f"run.eval_interval=5 has no effect with {reason} (the command line: run.eval_interval=5): remove it."
    ]


def test_keep_every_that_misses_the_checkpoints_is_warned_about():
    with pytest.warns(UserWarning) as caught:
        load_config("x.yaml", ["run.checkpoint_interval=200", "checkpoint.keep_every=300"])
    assert [str(item.message) for item in caught] == [
        (
            "checkpoint.keep_every=300 is not a multiple of run.checkpoint_interval=200, so only steps that"
            " are a multiple of 600 are both saved and kept (the command line: checkpoint.keep_every=300):"
            " use a multiple of 200."
        )
    ]
    assert caught[0].filename == __file__


def test_an_allowed_change_that_needs_no_permission_is_warned_about():
    override = "checkpoint.allow_changes=[data, model.rope_theta, optimizer, schedule.learning_rate]"
    with pytest.warns(UserWarning) as caught:
        load_config("x.yaml", [override])
    assert [str(item.message) for item in caught] == [
        "checkpoint.allow_changes names schedule.learning_rate, which any resumed run may change (the command line: "
        f"{override}): remove it."
    ]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", ["constant", "inverse_sqrt"])
def test_a_key_that_nobody_set_is_never_warned_about(kind: str):
    """decay_steps is one past the warm-up here, another value than that of run.steps; nobody set it."""
    Path("x.yaml").write_text(BASE.replace("schedule: {decay_steps: 100}", ""))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config("x.yaml", [f"schedule.kind={kind}", "run.steps=10", "schedule.warmup_steps=10"])
        Path("printed.yaml").write_text(config.to_yaml())
        assert load_config("printed.yaml") == config


def test_a_warm_up_longer_than_the_run_is_warned_about():
    with pytest.warns(UserWarning) as caught:
        load_config("x.yaml", ["schedule.decay_steps=1000", "run.steps=20", "schedule.warmup_steps=100"])
    assert [str(item.message) for item in caught] == [
        "schedule.warmup_steps=100 is more than run.steps=20, so the run ends before it reaches"
        " schedule.learning_rate=0.0003 (the command line: schedule.warmup_steps=100): lower schedule.warmup_steps, or"
        " raise run.steps."
    ]


def test_blanks_in_the_path_of_a_deterministic_run_are_found_where_they_are(monkeypatch: pytest.MonkeyPatch):
    Path("my work").mkdir()
    monkeypatch.chdir("my work")
    load_config("../x.yaml", ["schedule.decay_steps=1000"])
    with pytest.raises(ConfigError, match="the space in .*/my work/runs/run .*choose a run.dir without spaces"):
        load_config("../x.yaml", ["run.deterministic=true"])
    monkeypatch.chdir("..")
    monkeypatch.setattr(tempfile, "tempdir", "/my tmp")
    with pytest.raises(ConfigError, match="the space in /my tmp .*set TMPDIR to one without spaces"):
        load_config("x.yaml", ["run.deterministic=true"])


def test_a_printed_config_warns_no_more_than_the_original():
    config = load_config("x.yaml", ["schedule.decay_steps=1000", "model.position=learned", "optimizer.kind=sgd"])
    Path("printed.yaml").write_text(config.to_yaml())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config("printed.yaml")


def test_both_settings_are_named_with_their_places_and_the_override_first():
    with pytest.raises(ConfigError) as caught:
        load_config("x.yaml", ["model.num_heads=4", "model.num_kv_heads=3"])
    assert "(the command line: model.num_kv_heads=3)" in str(caught.value)
    Path("y.yaml").write_text("include: x.yaml\nmesh: {tensor: 8}\n")
    with pytest.raises(ConfigError) as caught:
        load_config("y.yaml", ["model.num_heads=4"])
    assert "(the command line: model.num_heads=4; mesh.tensor: y.yaml, line 2): " in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("model.num_heads=6 model.head_dim=16 mesh.tensor=4 model.ffn_hidden_size=96", "mesh.tensor"),
        ("model.num_heads=8 model.num_kv_heads=2 mesh.tensor=16", "mesh.tensor"),
        ("mesh.tensor=64", "mesh.tensor"),
        ("model.num_experts=8 model.expert_ffn_hidden_size=36 mesh.tensor=8", "mesh.tensor"),
        ("model.num_heads=24 model.head_dim=8 model.num_kv_heads=5 mesh.tensor=4", "model.num_kv_heads"),
        ("batch.global_size=24 batch.num_microbatches=5 mesh.data=2 mesh.tensor=2", "batch.num_microbatches"),
        ("batch.global_size=24 batch.num_microbatches=8 batch.schedule='0:8,1K:24'", "batch.num_microbatches"),
        (
            "batch.global_size=24 batch.num_microbatches=1 mesh.pipeline=3 pipeline.virtual_stages=2",
            "batch.num_microbatches",
        ),
        ("model.num_experts=12 model.router.num_groups=5 model.router.groups_per_token=2", "model.router.num_groups"),
        (
            "model.num_experts=12 model.router.num_groups=4 model.router.groups_per_token=5 model.experts_per_token=6",
            "model.router.groups_per_token",
        ),
    ],
)
def test_every_listed_cure_passes_all_checks(overrides, key):
    words = shlex.split(overrides)
    with pytest.raises(ConfigError) as caught:
        load_config("x.yaml", words)
    listed = re.search(r"\): .*?((?:\d+, )*\d+(?: or \d+)?)(?=,|\.)", str(caught.value))
    assert listed, caught.value
    for number in re.findall(r"\d+", listed[1]):
        load_config("x.yaml", [*words, f"{key}={number}"])


@pytest.mark.parametrize("key", ["batch.schedule", "data.train", "data.valid", "data.test", "model.router"])
def test_a_later_mapping_of_data_or_sizes_replaces_the_earlier_one_and_a_section_is_added_to(key):
    section, name = key.split(".")
    tree = read_override(f"{key}={{a: 1, b: 2}}")
    tree.merge(read_override(f"{key}={{b: 3}}"))
    assert tree.values[section][name] == ({"a": 1, "b": 3} if key == "model.router" else {"b": 3})
