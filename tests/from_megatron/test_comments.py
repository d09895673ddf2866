"""The comment of a setting names the flags that change it: of each line's flags each is left out once."""

import json
from pathlib import Path

import pytest
from launch_lines import DENSE, EXPERTS, FILES, LATENT, MUON

from megajax.config.megatron_flags import FLAGS, MEGATRON
from megajax.errors import InputError
from megajax.tools.from_megatron.__main__ import read, translation
from megajax.tools.from_megatron.arguments import Arguments

HERE = Path(__file__).parent
SCRIPTS = json.loads((HERE.parent / "data_files/megatron_scripts.json").read_text())
PIPELINE = f"{DENSE} --pipeline-model-parallel-size 4"
WSD = f"{DENSE.replace('--train-iters 100', '--train-samples 1600')} --lr-decay-style WSD"
# Lines with flags that no other test's line has, and the number of devices.
MORE = [
    (f"{DENSE} --adam-eps 1e-6 --check-weight-hash-across-dp-replicas-interval 7 --num-workers 3", 1),
    (f"{FILES} --sft --tokenizer-model /t --train-data-path x --valid-data-path y --chat-template z", 1),
    (f"{DENSE} --load x --ckpt-step 5 --save y --save-interval 10", 1),
    (f"{DENSE} --pretrained-checkpoint x --no-save-optim", 1),
    (f"{DENSE} --cpu-offloading", 1),
    (f"{DENSE} --cpu-offloading-num-layers 2", 1),
    (f"{DENSE} --fine-grained-activation-offloading", 1),
    (f"{FILES} --data-args-path x --data-cache-path y --full-validation --split 9,1,0", 1),
    (f"{FILES} --train-data-path x --test-data-path z --fim-data", 1),
    (f"{FILES} --data-path x --fim-data --fim-prefix-token a --fim-middle-token b --fim-suffix-token c", 1),
    (f"{FILES} --data-path x --tokenizer-type T --vocab-file a/vocab.json --merge-file a/merges.txt", 1),
    (f"{FILES} --train-data-path x --valid-data-path 1 a 2 b --multiple-validation-sets --validation-set-names c d", 1),
    (f"{FILES} --data-path x --tokenizer-type NullTokenizer --null-tokenizer-eod-id 7 --reset-position-ids", 1),
    (f"{FILES} --data-path x --reset-attention-mask", 1),
    (f"{FILES} --data-path x --eod-mask-loss", 1),
    (f"{DENSE} --fp8-format hybrid --fp8-margin 1 --fp8-amax-history-len 4 --fp8-amax-compute-algo max", 1),
    (
        f"{DENSE} --fp8-format e4m3 --fp8-recipe blockwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 2"
        " --num-layers-at-end-in-bf16 0",
        1,
    ),
    (f"{DENSE} --fp4-format e2m1", 1),
    (f"{WSD} --lr-wsd-decay-samples 160 --lr-warmup-samples 32 --lr-decay-samples 800", 1),
    (f"{DENSE} --lr-warmup-iters 5 --lr-decay-iters 50 --exit-interval 20 --min-lr 1e-5", 1),
    (f"{DENSE} --lr-warmup-fraction 0.1", 1),
    (f"{DENSE} --bf16 --main-grads-dtype bf16", 1),
    (f"{DENSE} --bf16 --grad-reduce-in-bf16", 1),
    (f"{MUON} --muon-num-ns-steps 4", 1),
    (f"{DENSE} --optimizer-cpu-offload --optimizer-offload-fraction 0.5", 1),
    (f"{EXPERTS} --moe-input-jitter-eps 0.1 --moe-router-force-load-balancing --moe-z-loss-coeff 0.1", 1),
    (f"{EXPERTS} --moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate", 1),
    (f"{EXPERTS} --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm", 2),
    (f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall", 2),
    (f"{EXPERTS} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2", 2),
    (f"{DENSE} --use-torch-fsdp2 --num-distributed-optimizer-instances 2", 4),
    (f"{DENSE} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 4),
    (f"{DENSE} --use-custom-fsdp", 4),
    (f"{DENSE} --no-pad-vocab-size", 1),
    (f"{DENSE} --padded-vocab-size 1024 --make-vocab-size-divisible-by 64", 1),
    (f"{DENSE.replace('--num', '--encoder-num', 1).replace('--seq', '--encoder-seq')}", 1),
    (f"{DENSE.replace('--swiglu', '')} --openai-gelu", 1),
    (f"{DENSE.replace('--swiglu --disable-bias-linear', '')} --no-bias-gelu-fusion", 1),
    (f"{DENSE.replace('--swiglu', '')} --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7", 1),
    (f"{PIPELINE} --decoder-first-pipeline-num-layers 1 --num-layers 7", 4),
    (f"{PIPELINE} --decoder-last-pipeline-num-layers 1 --num-layers 7", 4),
    (f"{PIPELINE} --num-layers 8 --num-virtual-stages-per-pipeline-rank 2", 4),
    (f"{PIPELINE} --num-layers 8 --num-layers-per-virtual-pipeline-stage 1", 4),
    (f"{PIPELINE} --num-layers 8 --pipeline-model-parallel-layout Ettt|tt|tt|tL", 4),
    (
        f"{DENSE.replace('rope ', 'yarn ')} --rotary-scaling-factor 2 --mscale 0.5 --mscale-all-dim 0.7"
        " --yarn-original-max-position-embeddings 64 --yarn-beta-fast 16 --yarn-beta-slow 2"
        " --no-yarn-correction-range-round-to-int",
        1,
    ),
    (f"{DENSE} --rotary-base 500 --rotary-percent 0.5 --rotary-seq-len-interpolation-factor 2", 1),
    (f"{DENSE} --group-query-attention --num-query-groups 2 --kv-channels 32 --add-qkv-bias --qk-layernorm", 1),
    (f"{DENSE.replace('rope', 'none')}", 1),
    (f"{DENSE.replace('--position-embedding-type rope', '')} --use-rotary-position-embeddings", 1),
    (f"{DENSE} --profile --profile-step-start 3 --profile-step-end 8 --tensorboard-dir x --wandb-project y", 1),
    (f"{LATENT} --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --kv-lora-rank 16", 1),
    (f"{LATENT} --rope-type rope --rotary-scaling-factor 4", 1),
    (f"{DENSE.replace('rope', 'learned_absolute')}", 1),
    (f"{DENSE} --qk-clip --qk-clip-threshold 50 --adam-beta1 0.8 --clip-grad 0.5 --seed 5 --log-interval 5", 1),
    (f"{EXPERTS} --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1", 1),
    (f"{EXPERTS} --moe-expert-capacity-factor 2 --moe-token-drop-policy position --moe-layer-freq 2", 1),
    (f"{MUON.replace('factor 0.2', 'factor 1')} --muon-scale-mode shape_scaling --muon-momentum 0.5", 1),
    (f"{DENSE} --decoupled-lr 2e-3 --min-lr 1e-4 --decoupled-min-lr 2e-4", 1),
    (f"{FILES} --data-path x --fim-data --fim-rate 0.3 --fim-spm-rate 0.7 --dataloader-type cyclic", 1),
    (f"{DENSE} --load x --no-load-optim", 1),
    (f"{EXPERTS} --load x --moe-use-upcycling", 1),
    (EXPERTS.replace("aux_loss", "none"), 1),
    (EXPERTS.replace("aux_loss", "sinkhorn"), 1),
    (f"{DENSE} --save y --save-interval 10 --most-recent-k 3", 1),
    (f"{DENSE} --save y --persistent-save-interval 10 --save-retain-interval 30", 1),
    (f"{PIPELINE} --num-layers 7 --account-for-embedding-in-pipeline-split", 4),
    (f"{PIPELINE} --num-layers 7 --account-for-loss-in-pipeline-split", 4),
    (f"{DENSE} --lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style cosine", 1),
    (f"{DENSE} --fp4-format e2m1 --fp4-recipe nvfp4", 1),
    (f"{DENSE} --recompute-granularity full --recompute-method block --recompute-num-layers 2", 1),
    (f"{DENSE} --recompute-granularity selective --recompute-modules mlp", 1),
    (f"{DENSE} --wandb-exp-name a/b --exit-duration-in-mins 9 --deterministic-mode --check-for-spiky-loss", 1),
]
# Flags that never change a key: they are read beside others, or their only value here is the default.
WITHOUT_A_CHANGE = {
    *("hierarchical_context_parallel_sizes", "load_main_params_from_ckpt", "use_pytorch_profiler", "main_params_dtype"),
    *("transformer_impl", "mup_base_hidden_size", "use_mup", "mup_attn_scale_power", "decoder_num_layers"),
    *("decoder_seq_length", "qk_clip_alpha", "moe_layer_recompute", "add_position_embedding", "fp4_recipe"),
    "accumulate_allreduce_grads_in_fp32",
}
# The keys of docs/migration.md, by arguments
DOCUMENTED = {flag.dest: set[str]() for flag in FLAGS.values()}
for row in MEGATRON:
    for flag in row.names:
        DOCUMENTED[FLAGS[flag].dest].add(row.ours.partition("=")[0])


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    """For each flag of each line: (its argument, its text, the keys that differ without it, the translation)."""
    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning, match="MASTER_ADDR has no value"):
        folder = tmp_path_factory.mktemp("lines")
        patch.chdir(folder)
        (folder / "split.json").write_text('{"train": ["a"], "valid": ["b"], "test": ["c"]}')
        lines = [(read([str(HERE / "lines" / name), *words])[0], world) for name, (words, world) in SCRIPTS.items()]
        lines += [(read(line.split())[0], world) for line, world in MORE]
        return [change for given, world in lines for change in _changes(given, world)]


def _changes(given: Arguments, world: int):
    whole = translation(given, world)
    assert not whole.refused
    for dest, text in [(dest, given.shown(dest)) for dest in given.given]:
        without = Arguments({name: value for name, value in given.given.items() if name != dest}, given.texts, "")
        try:
            less = translation(without, world)
        except InputError:
            less = None
        if less is None or less.refused:  # the line needs it
            keys = {key for key, setting in whole.settings.items() if text in setting.source}
        else:
            both = [{key: setting.value for key, setting in t.settings.items()} for t in (whole, less)]
            keys = {key for key in both[0] | both[1] if both[0].get(key) != both[1].get(key)}
        yield dest, text, keys, whole


def test_a_flag_that_changes_a_setting_is_in_its_comment(changes):
    for dest, text, keys, t in changes:
        here = keys & t.settings.keys()
        named = {key for key in here if text in t.settings[key].source}
        assert dest in t.arguments.used or not keys, text
        assert bool(named) == bool(here) and here & DOCUMENTED[dest] <= named, (text, here - named)


def test_each_flag_changes_the_key_of_the_documented_table(changes):
    found: dict[str, set[str]] = {dest: set() for dest in DOCUMENTED}
    for dest, _, keys, _ in changes:
        found[dest] |= keys
    found["moe_layer_freq"].add("model.moe_layer_interval")  # a pattern of layers is that too
    missing = {dest: keys - found[dest] for dest, keys in DOCUMENTED.items() if dest not in WITHOUT_A_CHANGE}
    assert not {dest: keys for dest, keys in missing.items() if "" not in keys and keys}
