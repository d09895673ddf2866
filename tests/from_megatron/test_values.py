"""Values that follow from flags, and those of absent ones, worked by hand from Megatron-LM's arguments.py.

test_lines.py has whole lines, whose values Megatron's own parser made; these are cases that no such line has.
"""

import re
from typing import Any

import pytest
import yaml
from launch_lines import DENSE, EXPERTS, FILES, LATENT, MUON

from megajax.errors import InputError
from megajax.tools.from_megatron.__main__ import read, translate
from megajax.tools.from_megatron.arguments import from_mapping


def translated(line: str, world: int) -> dict[str, Any]:
    """The keys of a line's config with their values."""
    text, _ = translate(read(line.split())[0], world)

    def leaves(tree: dict, at: str):
        for key, value in tree.items():
            nested = isinstance(value, dict) and at + key not in ("model.rope_scaling", "data.fim_tokens")
            yield from leaves(value, f"{at}{key}.") if nested else [(at + key, value)]

    return dict(leaves(yaml.safe_load(text), ""))


LLAMA3 = {"kind": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# (line, devices, the keys with their values; None: absent)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "int(4 h · 2/3 / 64) · 64 is the width of SwiGLU": (DENSE, 1, {"model.ffn_hidden_size": 1024}),  # 16.67 · 64
    "4 h is the width without a gate": (DENSE.replace("--swiglu", ""), 1, {"model.ffn_hidden_size": 1600}),
    "heads divide the hidden size": (DENSE, 1, {"model.head_dim": 100, "model.num_kv_heads": 4}),
    "Llama 3's scaling of 8192 positions": (
        f"{DENSE} --use-rope-scaling --rope-scaling-factor 4",
        1,
        {"model.rope_scaling": LLAMA3 | {"original_max_positions": 8192}},
    ),
    "YaRN's betas are 32 and 1, of 4096 positions": (
        f"{DENSE.replace('rope ', 'yarn ')} --rotary-scaling-factor 2 --mscale-all-dim 0",
        1,
        {"model.rope_scaling.beta_fast": 32.0, "model.rope_scaling.beta_slow": 1.0},
    ),
    # 0.1 · mscale · ln(factor) + 1, divided by the same of mscale_all_dim
    "YaRN's factor of queries and keys is a quotient": (
        f"{DENSE.replace('rope ', 'yarn ')} --rotary-scaling-factor 4 --mscale 0.5 --mscale-all-dim 0.7",
        1,
        {"model.rope_scaling.attention_factor": pytest.approx(1.0693147180560 / 1.0970406052784)},
    ),
    "a batch without its size is one microbatch of each replica": (
        DENSE.replace("--global-batch-size 16", ""),
        4,
        {"batch.global_size": 8, "batch.num_microbatches": 1, "mesh.data": 4},
    ),
    "every n-th layer without rotary positions": (
        f"{DENSE} --no-rope-freq 2",
        1,
        {"model.rope_pattern": ["rope", "none"]},
    ),
    "every n-th layer without a window, of 128 keys": (
        f"{DENSE} --window-size 127,0 --window-attn-skip-freq 4",
        1,
        {"model.sliding_window": 128, "model.layer_pattern": ["local", "local", "local", "global"]},
    ),
    "no window is as long as all later tokens": (f"{DENSE} --window-size 127,-1", 1, {"model.sliding_window": 128}),
    # Of 24 samples half an increment each: 8 from 0 samples on, 12 from 12 and 16 from 24 on, of 128 tokens.
    "a ramp-up of two increments": (
        f"{DENSE.replace('size 2', 'size 4')} --rampup-batch-size 8 4 24",
        1,
        {"batch.schedule": "0: 8, 1536: 12, 3072: 16", "batch.global_size": 16},
    ),
    # 25 samples: an increment applies from 12.5 samples on, so from sample 13
    "a ramp-up whose samples are odd": (
        f"{DENSE.replace('size 2', 'size 4')} --rampup-batch-size 8 4 25",
        1,
        {"batch.schedule": f"0: 8, {13 * 128}: 12, {25 * 128}: 16"},
    ),
    # 2 steps of 8 read the first 16 samples, 2 of 12 reach 40 of 32, and 11 of 16 the 216.
    "samples are steps of a ramp-up": (
        f"{DENSE.replace('size 2', 'size 4').replace('--train-iters 100', '--train-samples 216')}"
        " --rampup-batch-size 8 4 32",
        1,
        {"run.steps": 2 + 2 + 11},
    ),
    # 14 samples more are less than a step
    "a ramp-up leaves out the last partial batch": (
        f"{FILES.replace('size 2', 'size 4').replace('--train-iters 100', '--train-samples 230')}"
        " --rampup-batch-size 8 4 32 --data-path x",
        1,
        {"run.steps": 2 + 2 + 11, "data.train_samples": 230},
    ),
    "the embedding takes the place of a layer": (
        f"{DENSE.replace('layers 4', 'layers 7')} --account-for-embedding-in-pipeline-split",
        4,
        {"pipeline.layout": [1, 2, 2, 2]},
    ),
    "the loss takes the place of a layer": (
        f"{DENSE.replace('layers 4', 'layers 7')} --account-for-loss-in-pipeline-split",
        4,
        {"pipeline.layout": [2, 2, 2, 1]},
    ),
    "a profile ends before its last step": (
        f"{DENSE} --profile --profile-step-start 10 --profile-step-end 12",
        1,
        {"logging.profile_start": 10, "logging.profile_steps": 2},
    ),
    "minutes of a distributed timeout": (
        f"{DENSE} --distributed-timeout-minutes 7",
        1,
        {"run.hang_min_seconds": 420.0},
    ),
    "no split is 969, 30, 1": (f"{FILES} --data-path x", 1, {"data.split": "969,30,1", "data.order": "megatron"}),
    "data of three splits": (
        f"{FILES} --train-data-path a --valid-data-path 1 b 2.5 c --test-data-path d",
        1,
        {
            "data.train": "a",
            "data.valid": [{"prefix": "b", "weight": 1}, {"prefix": "c", "weight": 2.5}],
            "data.test": "d",
        },
    ),
    "chats of three splits": (
        f"{FILES} --sft --tokenizer-model /t --train-data-path a --valid-data-path b --test-data-path c",
        1,
        {"data.kind": "chat", "data.train": "a", "data.valid": "b", "data.test": "c"},
    ),
    "evaluation sets of their own": (
        f"{FILES} --train-data-path a --valid-data-path 1 b 2 c --multiple-validation-sets --validation-set-names d e",
        1,
        {"data.valid_sets": [{"name": "d", "prefix": "b"}, {"name": "e", "prefix": "c"}], "data.valid": None},
    ),
    "GPT-2's tokenizer in its folder": (
        f"{FILES} --data-path x --vocab-file a/vocab.json --merge-file a/merges.txt",
        1,
        {"data.tokenizer": "a"},
    ),
    "experts over context and tensor too": (
        f"{EXPERTS} --tensor-model-parallel-size 2 --context-parallel-size 2 --expert-tensor-parallel-size 1"
        " --expert-model-parallel-size 8",
        8,
        {"mesh.experts_over": ["expert", "context", "tensor"], "mesh.expert": 2, "mesh.data": 1},
    ),
    "a dispatcher of earlier versions": (
        f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall_seq",
        2,
        {"communication.experts": "all_to_all"},
    ),
    "a split of two": (f"{FILES} --data-path x --split 99,1", 1, {"data.split": "99,1,0"}),
    "tokens to fill in": (
        f"{FILES} --data-path x --tokenizer-type HuggingFaceTokenizer --tokenizer-model ./x --fim-data --fim-rate 0.3"
        " --fim-spm-rate 0.7",
        1,
        {"data.fim_rate": 0.3, "data.fim_spm_rate": 0.7, "data.tokenizer": "./x"},
    ),
    "experts are as wide as an MLP": (EXPERTS, 1, {"model.expert_ffn_hidden_size": 1024}),
    "experts in every second layer": (f"{EXPERTS} --moe-layer-freq 2", 1, {"model.block_pattern": ["moe", "dense"]}),
    "a weight for each balancing loss": (
        f"{EXPERTS} seq_aux_loss --moe-aux-loss-coeff 0.01 0.02",
        1,
        {"model.router.global_loss": 0.01, "model.router.sequence_loss": 0.02},
    ),
    "losses over the same tokens add up": (
        f"{EXPERTS} global_aux_loss seq_aux_loss --moe-aux-loss-coeff 0.25 0.5 0.125",
        1,
        {"model.router.global_loss": 0.75, "model.router.sequence_loss": 0.125},
    ),
    "one weight is that of all": (
        f"{EXPERTS} seq_aux_loss --moe-aux-loss-coeff 0.01",
        1,
        {"model.router.global_loss": 0.01, "model.router.sequence_loss": 0.01},
    ),
    "Sinkhorn's weights of several experts are a softmax over all of them": (
        EXPERTS.replace("aux_loss", "sinkhorn"),
        1,
        {
            "model.router.score_function": "softmax",
            "model.router.pre_softmax": True,
            "model.router.normalise": False,
        },
    ),
    "tokens beyond the capacity by probability": (
        f"{EXPERTS} --moe-expert-capacity-factor 1.5",
        1,
        {"model.router.capacity_factor": 1.5, "model.router.drop_policy": "probability"},
    ),
    "tokens beyond the capacity by position": (
        f"{EXPERTS} --moe-expert-capacity-factor 1.5 --moe-token-drop-policy position",
        1,
        {"model.router.drop_policy": "position"},
    ),
    "experts that begin as copies of a dense model's MLPs": (
        f"{EXPERTS} --moe-use-upcycling --load dense --save x --save-interval 10",
        1,
        {"checkpoint.upcycle": True, "checkpoint.init_from": "dense", "checkpoint.init_state": "weights"},
    ),
    "no capacity": (EXPERTS, 1, {"model.router.capacity_factor": None}),
    "a checkpoint of each interval is kept": (
        f"{DENSE} --save x --save-interval 10",
        1,
        {"run.checkpoint_interval": 10, "checkpoint.keep_every": 10},
    ),
    "the newest three": (
        f"{DENSE} --save x --save-interval 10 --most-recent-k 3",
        1,
        {"checkpoint.keep": 3, "checkpoint.keep_every": None},
    ),
    "the newest, and some": (
        f"{DENSE} --save x --save-interval 10 --save-retain-interval 50",
        1,
        {"checkpoint.keep": 1, "checkpoint.keep_every": 50},
    ),
    "logits are clipped": (f"{DENSE} --qk-clip --qk-clip-threshold 50", 1, {"model.qk_clip": 50.0}),
    "Lion's own betas": (
        f"{DENSE} --optimizer lion --lion-beta1 0.8 --lion-beta2 0.7",
        1,
        {"optimizer.kind": "lion", "optimizer.beta1": 0.8, "optimizer.beta2": 0.7},
    ),
    "Nesterov's momentum by the flag of another version": (
        f"{MUON} --muon-use-nesterov",
        1,
        {"optimizer.kind": "muon", "optimizer.muon.nesterov": True},
    ),
    "no Nesterov's momentum by the flag of another version": (
        f"{MUON} --muon-nesterov --muon-no-use-nesterov",
        1,
        {"optimizer.muon.nesterov": False},
    ),
    "SGD's momentum": (f"{DENSE} --optimizer sgd --sgd-momentum 0.6", 1, {"optimizer.beta1": 0.6}),
    "embeddings have a multiple of the rate": (
        f"{DENSE} --min-lr 1e-4 --decoupled-lr 5e-3 --decoupled-min-lr 5e-4",
        1,
        {"optimizer.groups": [{"parameters": ["embedding.*", "head"], "learning_rate": 5.0}]},
    ),
    "a lowest rate is a multiple up to its digits": (
        f"{DENSE} --min-lr 1e-5 --lr 1.5e-4 --decoupled-lr 5e-4 --decoupled-min-lr 3.33333e-05",
        1,
        {"optimizer.groups": [{"parameters": ["embedding.*", "head"], "learning_rate": 3.33333333333}]},
    ),
    "norms are rare, at logged steps": (
        f"{DENSE} --log-interval 30 --log-params-norm",
        1,
        {"logging.norms_interval": 120},
    ),
    "a cyclic loader shuffles the whole data": (
        f"{FILES} --data-path x --dataloader-type cyclic",
        1,
        {"data.order": "shuffled", "data.train_samples": None},
    ),
    "a group of layers is computed again": (
        f"{DENSE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        1,
        {"remat.policy": "full", "remat.group": 2},
    ),
    "the first layers are computed again": (
        f"{DENSE} --recompute-granularity full --recompute-method block --recompute-num-layers 2",
        1,
        {"remat.policy": "full", "remat.layers": 2},
    ),
    "attention is computed again": (f"{DENSE} --recompute-activations", 1, {"remat.policy": "selective"}),
}


def test_an_empty_line_is_before_each_section_and_not_within_one():
    """EXPERTS has the section model.router."""
    lines = translate(read(EXPERTS.split())[0], 1)[0].splitlines()
    after = [line for line, before in zip(lines[1:], lines, strict=False) if not before]
    assert after == [line for line in lines if re.match("[a-z#].*:$", line)]
    assert "model:" in after and "  router:" in lines


COMMUNICATION = {
    "a2a+p2p": "all_to_all+ring",
    "p2p": "ring",
    "a2a": "all_to_all",
    "all_gather": "all_gather",
    "allgather": "all_gather",
}


@pytest.mark.parametrize("name", CASES)
def test_a_value_is_that_of_megatrons_rules(name):
    line, world, expected = CASES[name]
    if "layout" in str(expected):
        line += " --pipeline-model-parallel-size 4"
    found = translated(line, world)
    found |= {f"model.rope_scaling.{key}": value for key, value in (found.get("model.rope_scaling") or {}).items()}
    assert {key: found.get(key) for key in expected} == expected


# Megatron's dtype_map
@pytest.mark.parametrize(
    ("dtype", "name", "state"),
    [("float32", "fp32", "float32"), ("bfloat16", "bf16", "bfloat16"), ("uint8", "fp8", "int8")],
)
def test_saved_moments_have_the_form_of_their_flags(dtype, name, state):
    flags = "--use-precision-aware-optimizer --use-distributed-optimizer --bf16"
    expected = translated(f"{DENSE} {flags} --exp-avg-dtype {name} --exp-avg-sq-dtype {name}", 1)
    saved = read(f"{DENSE} {flags}".split())[0].given | dict.fromkeys(
        ("exp_avg_dtype", "exp_avg_sq_dtype"), f"torch.{dtype}"
    )
    found = yaml.safe_load(translate(from_mapping(saved, "a checkpoint"), 1)[0])["optimizer"]["state"]
    assert found == expected["optimizer.state"] == state


@pytest.mark.parametrize(("flags", "steps"), [("", 0), ("--valid-data-path y", 100)])
def test_chats_are_evaluated_where_there_are_some_to_validate(flags, steps):
    line = f"{FILES} --sft --tokenizer-type SFTTokenizer --tokenizer-model /t --train-data-path x {flags}"
    assert translated(line, 1)["run.eval_steps"] == steps  # Megatron's default: 100


@pytest.mark.parametrize("kind", COMMUNICATION)
def test_each_kind_of_context_parallelism_has_a_strategy(kind):
    found = translated(f"{DENSE} --context-parallel-size 2 --cp-comm-type {kind}", 2)
    assert found["communication.context"] == COMMUNICATION[kind]


# Megatron's AttnBackend; local is its own unfused attention.
BACKENDS = {"flash": "auto", "fused": "auto", "auto": "auto", "unfused": "reference", "local": "reference"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_attention_backend_is_a_kernel(backend):
    found = translated(f"{DENSE} --attention-backend {backend}", 1)
    assert found.get("kernels.attention", "auto") == BACKENDS[backend]


@pytest.mark.parametrize(
    "flags",
    [
        "--moe-router-dtype fp64",
        "--moe-router-score-function sqrtsoftplus",
        "--moe-router-topk 1",  # the softmax of one score
    ],
)
def test_a_router_that_does_not_exist_here_is_refused_with_its_flag(flags):
    with pytest.raises(InputError, match=flags):
        translated(f"{EXPERTS} {flags}", 1)


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        (DENSE, "--softmax-type off-by-one"),
        (LATENT, "--softmax-type off-by-one"),
        (LATENT, "--softmax-type learnable"),
        (LATENT, "--qk-clip --qk-clip-alpha 0.3"),
        (LATENT, "--rope-type rope --rotary-percent 0.5"),
    ],
)
def test_attention_that_does_not_exist_here_is_refused_with_its_flag(line, flags):
    """megatron-core applies each of them: latent attention has the same core attention."""
    with pytest.raises(InputError, match=f"\n  --{flags.rpartition('--')[2]}: "):
        translated(f"{line} {flags}", 1)


@pytest.mark.parametrize(
    ("line", "differs"),
    [
        (LATENT, False),
        (LATENT.replace("--norm-epsilon 1e-6", ""), True),
        (LATENT.replace("--q-lora-rank 32", ""), True),
    ],
)
def test_norms_of_latents_differ_with_another_epsilon_or_without_a_latent_of_queries(line, differs):
    warnings = translate(read(line.split())[0], 1)[1]
    assert any("row latent-norms)" in each for each in warnings) == differs


def test_what_upcycling_does_not_copy_exactly_is_refused_or_said():
    line = f"{EXPERTS} --moe-use-upcycling --load dense --save x --save-interval 10"
    with pytest.raises(InputError, match="--moe-upcycling-granularity 2: .*checkpoint.upcycle"):
        translated(f"{line} --moe-upcycling-granularity 2", 1)
    for flags, warned in (("", True), ("--finetune", False), ("--finetune --moe-router-pre-softmax", True)):
        warnings = translate(read(f"{line} {flags}".split())[0], 1)[1]
        assert any("--moe-use-upcycling" in each and "row upcycling" in each for each in warnings) == warned


@pytest.mark.parametrize(
    ("length", "flag"),
    [
        ("--train-iters 100", "--lr-decay-samples 9"),
        ("--train-samples 1600", "--lr-warmup-iters 9"),
        ("--train-iters 100", "--lr-wsd-decay-samples 9"),
    ],
)
def test_a_schedule_in_the_other_unit_is_refused_with_both_flags(length, flag):
    with pytest.raises(InputError, match=f"{flag} does not go with {length.split()[0]} "):
        translated(f"{DENSE.replace('--train-iters 100', length)} {flag}", 1)


STAGES = "--pipeline-model-parallel-size 2 --num-layers"
# (flags added to a line, devices, what is wrong and the way out)
CONTRADICTIONS = [
    ("--train-samples 1600", 1, "--train-iters or --train-samples, not both.*write one of them"),
    ("--train-iters 0", 1, "no --train-iters or --train-samples|a run has no step"),
    ("--lr-decay-style WSD", 1, "--lr-wsd-decay-iters is not set.*add it to the line"),
    ("--bf16 --fp16", 1, "--bf16 excludes --fp16.*remove one of them"),
    ("--fp8-format hybrid --fp4-format e2m1", 1, "--fp8-format excludes --fp4-format.*remove one of them"),
    (
        "--use-precision-aware-optimizer --exp-avg-dtype bf16",
        1,
        "exp-avg-sq-dtype fp32: both moments have one form: fp32, bf16 or fp8",
    ),
    ("--squared-relu", 1, "--swiglu and --squared-relu exclude each other.*remove one"),
    ("--num-attention-heads 3", 1, "3 heads do not divide a hidden size of 400.*add --kv-channels"),
    ("--group-query-attention --num-query-groups 2 --multi-latent-attention", 1, "remove one of them"),
    ("--window-size 127", 1, "--window-size 127 is no pair such as .*correct it"),
    ("--window-size 127,1", 1, "--window-size 127,1: tokens never attend to later ones"),
    ("--window-size 127,0 --window-attn-skip-freq [0]*2", 1, r"skip-freq \[0\]\*2 has 2 layers, the model 4"),
    ("--window-size 127,0 --window-attn-skip-freq 0", 1, "--window-attn-skip-freq 0 is no frequency.*use 1 or more"),
    ("--no-rope-freq 0", 1, "--no-rope-freq 0 is no frequency.*use 1 or more"),
    ("--no-rope-freq 3", 1, "--no-rope-freq 3 does not divide the model's 4 layers.*use 1, 2 or 4"),
    ("--no-rope-freq 8", 1, "--no-rope-freq 8 does not divide the model's 4 layers"),
    ("--no-rope-freq [0]*2", 1, r"--no-rope-freq \[0\]\*2 has 2 layers, the model 4"),
    ("--expert-model-parallel-size 2", 2, "--expert-model-parallel-size 2 needs --num-experts.*add it"),
    ("--use-torch-fsdp2 --num-distributed-optimizer-instances 3", 4, "instances 3 does not divide 4.*correct it"),
    ("--step-batch-size-schedule 0:2,9:16", 1, "excludes --global-batch-size.*remove one"),
    (
        "--step-batch-size-schedule 0:2,9:16 --rampup-batch-size 8 4 24",
        1,
        "--step-batch-size-schedule .*excludes --rampup-batch-size.*remove one",
    ),
    ("--rampup-batch-size 2 3 90", 1, "--rampup-batch-size 2 3 90 is no START INCREMENT SAMPLES.*correct it"),
    (f"{STAGES} 5", 2, "5 layers are no multiple of 2 virtual stages.*correct them"),
    (f"{STAGES} 6 --num-virtual-stages-per-pipeline-rank 2", 2, "6 layers are no multiple of 4 virtual stages"),
    (f"{STAGES} 4 --account-for-embedding-in-pipeline-split", 2, "4 layers and the ends are no multiple of 2 stages"),
    (f"{STAGES} 4 --num-layers-per-virtual-pipeline-stage 3", 2, "does not divide a stage's layers.*correct it"),
    (f"{STAGES} 4 --pipeline-model-parallel-layout Ett|tL", 2, "has 3 layers in 2 stages, not 4 in a multiple of 2"),
    (f"{STAGES} 4 --pipeline-model-parallel-layout Ett|(ttL", 2, r"\(ttL is no layout such as"),
    (f"{STAGES} 4 --decoder-first-pipeline-num-layers 5", 2, "4 layers cannot be divided into 2 stages"),
    (
        f"{STAGES} 4 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2",
        2,
        "4 layers cannot be divided into 2 stages",
    ),
    (
        "--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1",
        3,
        "4 layers cannot be divided into 3 stages",
    ),
]
CONTRADICTIONS += [
    (f"--{name} 0", 1, f"--{name} 0 is below 1.*use 1 or more")
    for name in (
        *("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size", "global-batch-size"),
        *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"),
        *("expert-model-parallel-size", "expert-tensor-parallel-size", "num-distributed-optimizer-instances"),
        *("make-vocab-size-divisible-by", "encoder-num-layers", "encoder-seq-length"),
    )
]
CONTRADICTIONS += [
    (f"--lr-warmup-fraction {share}", 1, f"--lr-warmup-fraction {share} is no share .*use 0 to below 1")
    for share in ("1", "-0.1", "inf", "nan")
]
CONTRADICTIONS += [("--lr 0 --decoupled-lr 2e-3", 1, "--lr 0 is not above 0.*use more")]
OF_EXPERTS = [
    ("--moe-layer-freq 0", 1, "--moe-layer-freq 0 is no frequency.*use 1 or more"),
    ("--moe-layer-freq [1]*3", 1, r"\[1\]\*3 has 3 layers, the model 4"),
    ("--moe-layer-freq [0]*[1,1,1]", 1, r"\[0\]\*\[1,1,1\] is neither a number nor a list"),
    ("--moe-aux-loss-coeff much", 1, "--moe-aux-loss-coeff much"),
    ("--moe-aux-loss-coeff 0.1 0.2", 1, "aux_loss has 1 kinds, but 2 weights.*give each one weight"),
]


@pytest.mark.parametrize(
    ("line", "world", "sentence"),
    [
        (f"{line} {flags}", *row)
        for line, rows in ((DENSE, CONTRADICTIONS), (EXPERTS, OF_EXPERTS))
        for flags, *row in rows
    ],
    ids=[row[0] for row in CONTRADICTIONS + OF_EXPERTS],
)
def test_a_line_that_contradicts_itself_is_refused(line, world, sentence):
    with pytest.raises(InputError, match=sentence):
        translated(line, world)
