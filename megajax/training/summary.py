"""The summary of a run's settings, printed once before training starts."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from megajax import cluster
from megajax.config import Config
from megajax.config.sentences import mesh_name
from megajax.console import amount, memory_size
from megajax.errors import counted
from megajax.estimate.costs import active_parameter_count, adapter_parameter_count, flops_per_token, parameter_count
from megajax.estimate.memory import estimate_memory
from megajax.layout.kinds import extra_of, layer_kinds
from megajax.layout.recurrent import recurrent_heads
from megajax.layout.stages import virtual_stages
from megajax.mesh import describe_hosts, hosts_of, mesh_sizes
from megajax.model.lora import targets
from megajax.schema.batch_schedule import BatchSizes
from megajax.step.pipeline.buffers import schedule_of
from megajax.step.pipeline.simulator import Costs, simulate
from megajax.step_plan import StepPlan
from megajax.training.step import TrainProgram

OF_GPUS = ("--xla_gpu", "CUDA_", "XLA_PJRT_GPU")  # flags and variables that have no effect on CPUs


def summary(
    program: TrainProgram, flags: list[str], data: Sequence[str] = (), batch_sizes: BatchSizes | None = None
) -> str:
    """Run directory, mesh, parameters, memory per device, precision and kernels.

    `data` describes the data sets; `batch_sizes` are those of the run's steps, by default the config's.
    """
    config, plan, sizes = program.config, program.plan, mesh_sizes(program.mesh)
    kernels, batch, device = plan.kernels, config.batch, program.mesh.devices.flat[0]
    memory, on_gpu = estimate_memory(plan.on_gpus()), device.platform == "gpu"
    shown = [flag for flag in flags if on_gpu or not flag.startswith(OF_GPUS)]
    lines = [
        f"run        {config.run.name} → {config.run.dir}, seed {config.run.seed}, {_length(config)}",
        f"devices    {program.mesh.size} × {device.device_kind}, {counted(cluster.current().size, 'process')}",
        f"mesh       {mesh_name(sizes)}",
        *describe_hosts(sizes, hosts_of(list(program.mesh.devices.flat))),
        *(_pipeline(plan) if plan.is_pipelined else ()),
        f"model      {parameter_count(program.model):,} parameters{_experts(program)}, "
        f"{amount(flops_per_token(config), 'FLOP')} per token",
        *_beside_the_model(program),
        f"memory     estimate per device: parameters {memory_size(memory.parameters)}, "
        f"optimizer {memory_size(memory.optimizer)}, gradients {memory_size(memory.gradients)}, "
        f"gathered weights {memory_size(memory.weights)}, activations {memory_size(memory.activations)}, "
        f"working buffers {memory_size(memory.working)}, total {memory_size(memory.total)}",
        f"batch      {counted(batch.global_size, 'sequence')} of {counted(batch.sequence_length, 'token')}, "
        f"{counted(batch.num_microbatches, 'microbatch')} of {counted(plan.sequences, 'sequence')} per device"
        + (", two at a time" if plan.microbatches_at_once > 1 else ""),
        *_ramp_up(program, batch_sizes or BatchSizes.of(config)),
        f"precision  {config.precision.compute}, {_weights_and_gradients(plan)}, {_fp8(program)}",
        f"kernels    attention: {kernels.attention} ({kernels.attention_reason}); layers: {_layers(plan)}; "
        f"loss: {kernels.loss} in {counted(plan.loss_chunks, 'chunk')}",
        *(f"{'data' if index == 0 else '':<10} {line}" for index, line in enumerate(data)),
        *_of_some_models(plan, sizes, on_gpu),
    ]
    if on_gpu and kernels.attention == "reference":
        lines.append("warning    the reference attention is slow on a GPU and keeps [S, S] scores in memory")
    if replicated := [name for name, placement in program.placements.items() if placement.kv_groups > 1]:
        lines.append(f"replicated over tensor (fewer KV heads than devices): {', '.join(replicated)}")
    if padded := [name for name, placement in program.placements.items() if placement.is_padded]:
        lines.append(f"stored with padding (the mesh does not divide them): {', '.join(padded)}")
    return "\n".join(lines + ([f"set        {' '.join(shown)}"] if shown else []))


def _beside_the_model(program: TrainProgram) -> Iterator[str]:
    """A frozen teacher, adapters, and layers after the model's."""
    config, teacher = program.config, program.plan.teacher
    if config.teacher.base:
        yield "teacher    the base of the adapters, without weights of its own"
    elif teacher is not None:
        source = config.teacher.source or "new weights"
        yield f"teacher    {parameter_count(teacher.transformer):,} frozen parameters; weights: {source}"
    if (second := program.plan.second_stack) is not None:
        layers, own, crossed = counted(second.model.num_layers, "layer"), second.kernels, program.plan.kernels
        attention = f"attention: {own.attention} ({own.attention_reason})"
        if config.model.vision is None:
            length = counted(second.batch_shape[2], "token")
            cross = f"cross-attention: {crossed.cross_attention} ({crossed.cross_attention_reason})"
            yield f"encoder    {layers} over sequences of {length}; {attention}; {cross}"
        else:
            yield f"vision     {layers} over {counted(second.batch_shape[2], 'patch')} of a row; {attention}"
    if frozen := program.plan.frozen_parts:
        yield f"frozen     {' and '.join(frozen)}: learning rate 0 in optimizer.groups, so no gradients are computed"
    if (streamed := program.streamed) is not None:
        buffers, folder = memory_size(streamed.memory), config.optimizer.offload_dir
        yield f"files      {memory_size(streamed.bytes)} of moments per device in {folder}, buffers of {buffers}"
    if config.lora.rank:
        count = adapter_parameter_count(program.model)
        lora = f"rank {config.lora.rank}, alpha {config.lora.alpha:g}, {count:,} trained parameters in adapters of "
        yield f"lora       {lora}{', '.join(targets(config))}; base: {config.checkpoint.init_from}"
    if extra := extra_of(config.model):
        weight = f"{extra.weight(config.model):g} × the mean of their losses"
        yield f"modules    {extra.count(config.model)} for {extra.purpose}; {weight} is added to the loss"


def _of_some_models(plan: StepPlan, sizes: Mapping[str, int], on_gpu: bool) -> Iterator[str]:
    """Experts, recurrences, and sequences that are divided over `context`."""
    config, kernels = plan.config, plan.kernels
    if config.model.num_experts and plan.collectives.expert_shards > 1:
        experts = config.model.num_experts // plan.collectives.expert_shards
        axes = " × ".join(axis for axis in config.mesh.experts_over if sizes[axis] > 1)
        dispatch = plan.collectives.dispatch.name
        yield f"experts    {experts} per device, divided over {axes}; dispatch: {dispatch}"
    if config.model.num_experts:
        yield f"kernels    experts: {kernels.grouped_matmul} ({kernels.grouped_matmul_reason})"
    if recurrent_heads(config.model):
        yield f"kernels    recurrences: {kernels.linear_attention} ({kernels.linear_attention_reason})"
        if on_gpu and kernels.linear_attention == "reference":
            yield "warning    the reference of the recurrences is slow on a GPU"
    if sizes["context"] > 1:
        tokens = config.batch.sequence_length // sizes["context"]
        chunks = (
            "chunks balanced by work" if plan.balances_context else f"two chunks of {counted(tokens // 2, 'token')}"
        )
        chunks = counted(tokens, "consecutive token") if plan.has_consecutive_tokens else chunks
        strategy, reason = config.choose_context(sizes)
        groups = "" if plan.context_groups is None else f", in groups of 1 to {sizes['context']} devices by documents"
        yield f"context    {strategy.name} ({reason}); per sequence and device {chunks}{groups}"


def _length(config: Config) -> str:
    steps, epochs = counted(config.run.steps, "step"), config.run.epochs
    return steps if epochs is None else f"{steps} = {counted(f'{epochs:g}', 'epoch')} of data.train"


def _ramp_up(program: TrainProgram, sizes: BatchSizes) -> list[str]:
    """The sizes of the batch with the steps from which they apply, if they change."""
    length, parts = program.config.batch.sequence_length, []
    for (step, samples), size in sizes.phases:
        microbatches = program.by_size[size].plan.num_microbatches
        from_step = f"from step {step + 1} ({samples * length:,} tokens) on " if parts else ""
        parts.append(f"{from_step}{counted(size, 'sequence')} in {counted(microbatches, 'microbatch')}")
    return [f"ramp-up    {', '.join(parts)}"] if len(parts) > 1 else []


def _layers(plan: StepPlan) -> str:
    """The layers: unrolled or in loops, their remat policy, and the reason."""
    parts = []
    for (unroll, policy), segments in itertools.groupby(
        plan.segments, key=lambda s: (s.layers_per_iteration, s.policy)
    ):
        segments = list(segments)
        loops = [segment.iterations for segment in segments if segment.iterations > 1]
        text = f"{sum(segment.iterations for segment in segments)} × {unroll} ({policy.name})"
        parts.append(f"{text} in {len(loops)} loops" if len(loops) > 1 else text)
    return f"{', '.join(parts)}; {plan.unrolling.reason}"


def _pipeline(plan: StepPlan) -> list[str]:
    config, sizes, slots = plan.config, plan.sizes, plan.layer_slots
    stages, settings, microbatches = sizes["pipeline"], config.pipeline, config.batch.num_microbatches
    report = simulate(schedule_of(plan), Costs())
    counts = [len(layers) for layers in virtual_stages(config, stages)]
    each = f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    several = f" × {settings.virtual_stages} virtual stages" if settings.virtual_stages > 1 else ""
    lines = [
        f"pipeline   {settings.schedule}, {stages} stages{several} of {counted(each, 'layer')}, idle for "
        f"{report.bubble:.1%} of a step; "
        f"a stage keeps activations of at most {max(report.in_flight):g} of {counted(microbatches, 'microbatch')}"
    ]
    if plan.backward_parts.slots:
        lines[0] += "; one operation a tick, backward in two parts"
    elif settings.schedule == "1f1b":
        lines[0] += f"; a forward and a backward operation a tick, because {plan.backward_parts.lockstep_because}"
    if min(counts) < len(slots):
        moe = sum(slot.has_experts for slot in slots)
        kinds = f" ({len(slots) - moe} dense, {moe} MoE)" if 0 < moe < len(slots) else ""
        empty = sorted({len(slots) - count for count in counts})
        lines.append(
            f"slots      {len(slots)} per virtual stage{kinds}, {empty[0]}"
            f"{f' to {empty[-1]}' if len(empty) > 1 else ''} of them empty; empty slots take as long as others, "
            "see pipeline.layout"
        )
    if sizes["fsdp"] > 1:
        lines.append(
            f"note       mesh.fsdp gathers most of a stage's weights for each of {microbatches} microbatches, forward "
            "and backward; mesh.data gathers them once per step and is faster if memory allows"
        )
    return lines


def _experts(program: TrainProgram) -> str:
    model = program.config.model
    if model.num_experts is None:
        return ""
    active, factor = active_parameter_count(program.model), model.router.capacity_factor
    limit = "" if factor is None else f", capacity factor {factor:g}"
    which = f"{model.experts_per_token} of {model.num_experts} experts"
    count = sum(kind.has_experts for kind in layer_kinds(model))
    layers = f" in {count} of {model.num_layers} layers" if count < model.num_layers else ""
    return f", {active:,} active per token ({which}{layers}{limit})"


def _weights_and_gradients(plan: StepPlan) -> str:
    masters = "FP32 master weights in two halves, " if plan.config.optimizer.master == "split" else ""
    sums = f"summed over microbatches in {plan.accumulation}, " if plan.sums_gradients else ""
    return f"{masters}gradients {sums}reduced in {plan.config.precision.gradients}"


def _fp8(program: TrainProgram) -> str:
    config, layers = program.config, program.config.fp8_layers
    if not layers:
        return "no FP8"
    which = "all layers" if len(layers) == config.model.num_layers else f"layers {layers.start} to {layers.stop - 1}"
    recipe, implementation = config.precision.fp8.recipe, program.plan.kernels.fp8
    if implementation == "emulated":
        return f"{recipe} emulated in {which}: its numbers are multiplied in {config.precision.compute}, which is slow"
    if implementation == "cudnn":
        return f"{recipe} in {which}: block-scaled matmuls of cuDNN"
    return f"FP8 matmuls in {which}: {recipe} scaling, kernels of {implementation}"
