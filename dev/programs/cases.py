"""The programs: small models on meshes of at most eight devices, with every option that changes the step."""

from dataclasses import dataclass

COMMON = """
batch: {global_size: 16, num_microbatches: 2, sequence_length: 32}
schedule: {learning_rate: 1.0e-3, min_learning_rate: 1.0e-4, warmup_steps: 2}
data: {kind: synthetic}
"""
MODELS = {
    "llama": "{num_layers: 4, hidden_size: 64, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 128, vocab_size: 250}",
    "gpt2": """{num_layers: 2, hidden_size: 64, num_heads: 4, ffn_hidden_size: 128, vocab_size: 250, norm: layernorm,
        activation: gelu, position: learned, attention_bias: true, mlp_bias: true, tie_embeddings: true}""",
    "qwen": """{num_layers: 2, hidden_size: 64, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 128, vocab_size: 250,
        qk_norm: true, attention_bias: qkv}""",
    "gemma": """{num_layers: 4, hidden_size: 64, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 128, vocab_size: 250,
        qk_norm: true, norm_placement: both, norm_zero_centred: true, activation: geglu, sliding_window: 8,
        layer_pattern: [local, global], rope_local_theta: 1000.0, attention_softcap: 30.0, logit_softcap: 20.0,
        scale_embeddings: true, tie_embeddings: true}""",
    "gpt_oss": """{num_layers: 4, hidden_size: 64, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 128, vocab_size: 250,
        attention_sinks: true, attention_bias: true, mlp_bias: true, activation: clamped_swiglu, sliding_window: 8,
        layer_pattern: [local, global], num_experts: 8, expert_ffn_hidden_size: 64, router: {logit_bias: true}}""",
    "mixtral": """{num_layers: 2, hidden_size: 64, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 128, vocab_size: 250,
        num_experts: 8, expert_ffn_hidden_size: 64, router: {global_loss: 0.01, z_loss: 0.001}}""",
    "mixed": """{num_layers: 4, hidden_size: 64, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 128, vocab_size: 250,
        num_experts: 8, expert_ffn_hidden_size: 64, moe_layer_interval: 2, shared_expert_ffn_hidden_size: 32,
        shared_expert_gate: true, router: {sequence_loss: 0.01, jitter: 0.1}}""",
    "deepseek": """{num_layers: 3, hidden_size: 64, num_heads: 4, kv_lora_rank: 16, q_lora_rank: 32,
        qk_nope_head_dim: 16, qk_rope_head_dim: 16, v_head_dim: 16, ffn_hidden_size: 128, vocab_size: 250,
        num_experts: 8, expert_ffn_hidden_size: 64, first_dense_layers: 1, shared_expert_ffn_hidden_size: 64,
        mtp_layers: 1, router: {score_function: sigmoid, expert_bias: true, num_groups: 4, groups_per_token: 2,
        scaling_factor: 2.5, sequence_loss: 0.001}}""",
    "t5": """{num_layers: 2, hidden_size: 64, num_heads: 4, ffn_hidden_size: 128, vocab_size: 250, activation: geglu,
        position: relative, relative_buckets: 8, relative_max_distance: 10, attention_scale: 1.0, tie_embeddings: true,
        encoder: {kind: layers, num_layers: 2, sequence_length: 16}}""",
    "vision": """{num_layers: 3, hidden_size: 64, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 128, vocab_size: 250,
        rope_sections: [2, 3, 3], vision: {image_token: 249, num_layers: 3, hidden_size: 32, num_heads: 4,
        ffn_hidden_size: 64, patch_size: 2, merge: 2, norm: rmsnorm, patches_per_row: 48, grid: 3, interpolate: true,
        deepstack_layers: [0, 1]}}""",
}
# On the GPU's kernels: their least widths.
WIDE = "model.hidden_size=256 model.head_dim=64 model.ffn_hidden_size=512 batch.sequence_length=256"
WIDE_EXPERTS = f"{WIDE} model.expert_ffn_hidden_size=256"
PACKED = "data.synthetic_documents=3 data.reset_attention=true data.reset_positions=true"
LORA = "lora.rank=4 checkpoint.init_from=elsewhere"  # no file is read
DELAYED = "precision.fp8.recipe=delayed precision.fp8.amax_history_length=4"


@dataclass(frozen=True)
class Case:
    """A config: a model, overrides, and whether the program is lowered for GPUs."""

    model: str
    overrides: str
    on_gpus: bool

    @property
    def yaml(self) -> str:
        """The config without the overrides."""
        return f"model: {MODELS[self.model]}\n{COMMON}"


ON_CPU = {
    # dense: meshes
    "llama-one": "",
    "llama-data": "mesh.data=8",
    "llama-fsdp": "mesh.fsdp=8 batch.num_microbatches=1",
    "llama-tensor": "mesh.tensor=4",
    "llama-fsdp-tensor": "mesh.fsdp=2 mesh.tensor=2",
    "llama-hsdp-tensor": "mesh.data=2 mesh.fsdp=2 mesh.tensor=2",
    "llama-tensor-wide": "mesh.tensor=8 model.num_heads=8",
    "llama-overlap": "mesh.fsdp=2 mesh.tensor=2 model.ffn_hidden_size=6144",
    "llama-overlap-fp8": f"mesh.fsdp=2 mesh.tensor=2 model.ffn_hidden_size=6144 {DELAYED}",
    "gpt2-overlap": "mesh.fsdp=2 mesh.tensor=4 model.ffn_hidden_size=12288 remat.policy=selective",
    # context
    "llama-ring": "mesh.context=2 mesh.fsdp=2 communication.context=ring",
    "llama-ring-wide": "mesh.context=8 communication.context=ring",
    "llama-all_gather": "mesh.context=2 mesh.fsdp=2 communication.context=all_gather",
    "llama-all_to_all": "mesh.context=2 mesh.fsdp=2 communication.context=all_to_all",
    "llama-context-tensor": "mesh.context=2 mesh.tensor=2 mesh.data=2 communication.context=ring",
    "llama-all_to_all-tensor": "mesh.context=2 mesh.tensor=2 communication.context=all_to_all",
    "llama-packed": f"mesh.fsdp=2 mesh.tensor=2 {PACKED}",
    "llama-packed-ring": f"mesh.context=2 mesh.fsdp=2 communication.context=ring {PACKED}",
    "llama-packed-all_gather": f"mesh.context=2 mesh.fsdp=2 communication.context=all_gather {PACKED}",
    # remat, loops
    "llama-remat-full": "mesh.fsdp=2 mesh.tensor=2 remat.policy=full",
    "llama-remat-group": "mesh.fsdp=2 remat.policy=full remat.group=2",
    "llama-remat-selective": "mesh.fsdp=2 mesh.tensor=2 remat.policy=selective",
    "llama-remat-matmuls": "mesh.fsdp=2 mesh.tensor=2 remat.policy=save_matmuls",
    "llama-remat-offload": "mesh.fsdp=2 mesh.tensor=2 remat.policy=offload",
    "llama-remat-part": "mesh.fsdp=2 remat.policy=selective remat.layers=2",
    "llama-unrolled": "mesh.fsdp=2 mesh.tensor=2 kernels.scan_unroll=4 batch.num_microbatches=1",
    "llama-chunked-head": "mesh.fsdp=2 mesh.tensor=2 kernels.loss_chunk_tokens=16",
    # precision
    "llama-fp8-current": "mesh.fsdp=2 mesh.tensor=2 precision.fp8.recipe=current",
    "llama-fp8-delayed": f"mesh.data=2 mesh.fsdp=2 mesh.tensor=2 {DELAYED}",
    "llama-fp8-ends": f"mesh.fsdp=2 {DELAYED} precision.fp8.first_bf16_layers=1 precision.fp8.last_bf16_layers=1"
    " precision.fp8.format=e4m3 precision.fp8.amax_algorithm=most_recent",
    "llama-float16": "mesh.fsdp=2 precision.compute=float16",
    "llama-bf16-sums": "mesh.fsdp=2 precision.gradients=bfloat16 precision.accumulation=bfloat16",
    # optimizers and state
    "llama-muon": "mesh.fsdp=2 mesh.tensor=2 optimizer.kind=muon",
    "llama-muon-heads": "mesh.data=2 mesh.fsdp=2 optimizer.kind=muon optimizer.muon.per_head=true"
    " optimizer.muon.coefficients=polar_express optimizer.muon.scale=spectral",
    "llama-soap": "mesh.fsdp=2 mesh.tensor=2 optimizer.kind=soap",
    "llama-sgd": "mesh.fsdp=2 optimizer.kind=sgd",
    "llama-lion": "mesh.fsdp=2 optimizer.kind=lion",
    "llama-ademamix": "mesh.fsdp=2 optimizer.kind=ademamix",
    "llama-split-masters": "mesh.fsdp=2 mesh.tensor=2 optimizer.master=split",
    "llama-ema": "mesh.fsdp=2 mesh.tensor=2 optimizer.ema_decay=0.99",
    "llama-int8-moments": "mesh.fsdp=2 optimizer.state=int8",
    "llama-offload": "mesh.fsdp=2 optimizer.offload=0.5 optimizer.master=split optimizer.ema_decay=0.9",
    "llama-groups": 'mesh.fsdp=2 optimizer.layer_decay=0.8 optimizer.groups=\'[{parameters: ["*_norm"],'
    " weight_decay: 0, clip_norm: 0.3}]'",
    "llama-wsd": "mesh.fsdp=2 schedule.kind=wsd",
    # adapters
    "llama-lora": f"mesh.fsdp=2 mesh.tensor=2 {LORA} lora.dropout=0.1",
    "llama-lora-pipeline": f"mesh.pipeline=2 {LORA}",
    "mixtral-lora": f"mesh.expert=2 mesh.tensor=2 {LORA}",
    # pipelines
    "llama-1f1b": "mesh.pipeline=2 mesh.fsdp=2 batch.num_microbatches=4",
    "llama-gpipe": "mesh.pipeline=2 pipeline.schedule=gpipe batch.num_microbatches=4 remat.policy=full",
    "llama-zero-bubble": "mesh.pipeline=2 mesh.tensor=2 pipeline.schedule=zero_bubble batch.num_microbatches=4",
    "llama-rounds": "mesh.pipeline=2 mesh.fsdp=2 pipeline.virtual_stages=2 batch.num_microbatches=4",
    "llama-layout": "mesh.pipeline=2 pipeline.layout='[1, 3]' batch.num_microbatches=4",
    "llama-pipeline-context": "mesh.pipeline=2 mesh.context=2 mesh.tensor=2 batch.num_microbatches=4"
    " communication.context=ring",
    "llama-pipeline-fp8": f"mesh.pipeline=2 mesh.tensor=2 batch.num_microbatches=4 {DELAYED}",
    "mixtral-pipeline": "mesh.pipeline=2 mesh.expert=2 batch.num_microbatches=4",
    "deepseek-pipeline": "mesh.pipeline=2 mesh.fsdp=2 mesh.tensor=2 batch.num_microbatches=4",
    # other models and options
    "gpt2-dropout": "mesh.fsdp=2 mesh.tensor=2 model.dropout=0.1",
    "gpt2-dropout-pipeline": "mesh.pipeline=2 mesh.tensor=2 model.dropout=0.1 remat.policy=full",
    "qwen-norms": "mesh.fsdp=2 mesh.tensor=2",
    "qwen-norms-all_heads": "mesh.fsdp=2 mesh.tensor=2 model.qk_norm=all_heads model.norm_placement=after",
    "llama-clip": "mesh.fsdp=2 mesh.tensor=2 model.qk_clip=2.0 model.z_loss=0.001 model.mup_base_width=32",
    "gemma-windows": "mesh.fsdp=2 mesh.tensor=2",
    "gemma-windows-ring": "mesh.context=2 mesh.fsdp=2 communication.context=ring",
    "llama-modules": "mesh.fsdp=2 mesh.tensor=2 model.mtp_layers=2",
    # second stacks
    "t5-tensor": "mesh.fsdp=2 mesh.tensor=2",
    "t5-pipeline": "mesh.pipeline=2 mesh.tensor=2 pipeline.schedule=zero_bubble batch.num_microbatches=4",
    "vision-tensor": "mesh.fsdp=2 mesh.tensor=2",
    "vision-pipeline": "mesh.pipeline=2 mesh.fsdp=2 batch.num_microbatches=4",
    # experts
    "gpt_oss-one": "",
    "gpt_oss-context": "mesh.context=2 mesh.expert=2 communication.context=ring",
    "mixtral-all_gather": "mesh.expert=4 mesh.tensor=2 communication.experts=all_gather",
    "mixtral-all_to_all": "mesh.expert=4 mesh.fsdp=2 communication.experts=all_to_all",
    "mixtral-folded": "mesh.fsdp=2 mesh.tensor=2 mesh.expert=2 mesh.experts_over='[expert, tensor]'",
    "mixtral-capacity": "mesh.expert=2 mesh.fsdp=2 model.router.capacity_factor=1.0",
    "mixtral-fp8": f"mesh.expert=2 mesh.fsdp=2 {DELAYED}",
    "mixtral-padded": "mesh.expert=2 mesh.fsdp=2 data.kind=chat data.train=chats.jsonl data.tokenizer=byte",
    "mixtral-remat": "mesh.expert=2 mesh.tensor=2 remat.policy=selective",
    "mixtral-sinkhorn": "mesh.expert=2 model.router.sinkhorn=true model.router.global_loss=0 optimizer.kind=muon",
    "mixed-layers": "mesh.expert=2 mesh.fsdp=2 mesh.tensor=2",
    "deepseek-one": "",
    "deepseek-expert": "mesh.expert=2 mesh.fsdp=2 mesh.tensor=2",
    "deepseek-context": "mesh.context=2 mesh.fsdp=2",
    "deepseek-fp8": "mesh.expert=2 mesh.tensor=2 precision.fp8.recipe=current",
}
ON_GPUS = {
    "llama-fsdp-tensor": f"mesh.fsdp=2 mesh.tensor=2 {WIDE}",
    "llama-fp8-delayed": f"mesh.fsdp=2 mesh.tensor=2 {DELAYED} {WIDE}",
    "llama-overlap": f"mesh.fsdp=2 mesh.tensor=2 {WIDE} model.ffn_hidden_size=6144",
    "llama-overlap-fp8": f"mesh.fsdp=2 mesh.tensor=2 {DELAYED} {WIDE} model.ffn_hidden_size=6144",
    "llama-ring": f"mesh.context=2 mesh.fsdp=2 communication.context=ring {WIDE}",
    "llama-packed": f"mesh.fsdp=2 mesh.tensor=2 {WIDE} {PACKED}",
    "llama-zero-bubble": f"mesh.pipeline=2 mesh.tensor=2 pipeline.schedule=zero_bubble batch.num_microbatches=4 {WIDE}",
    "llama-remat-offload": f"mesh.fsdp=2 remat.policy=offload optimizer.offload=0.5 {WIDE}",
    "llama-hosts": f"mesh.data=2 mesh.fsdp=8 batch.num_microbatches=1 {WIDE}",
    "gpt_oss-context": f"mesh.context=2 mesh.expert=2 communication.context=ring {WIDE_EXPERTS}",
    "mixtral-all_gather": f"mesh.expert=2 mesh.fsdp=2 {WIDE_EXPERTS}",
    "mixtral-fp8": f"mesh.expert=4 communication.experts=all_to_all {DELAYED} {WIDE_EXPERTS}",
    "deepseek-expert": "mesh.expert=2 mesh.fsdp=2 model.hidden_size=256 model.qk_nope_head_dim=64"
    " model.qk_rope_head_dim=64 model.v_head_dim=128 model.expert_ffn_hidden_size=256 batch.sequence_length=256",
}


def _case(name: str, overrides: str, on_gpus: bool) -> Case:
    return Case(name.partition("-")[0], overrides, on_gpus)


CASES = {name: _case(name, overrides, False) for name, overrides in ON_CPU.items()}
CASES |= {f"gpu-{name}": _case(name, overrides, True) for name, overrides in ON_GPUS.items()}
