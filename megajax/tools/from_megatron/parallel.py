"""Parallel sizes, batches and the pipeline."""

from megajax.config.sentences import listed
from megajax.errors import counted
from megajax.options.context import STRATEGIES
from megajax.schema.amounts import UNITS
from megajax.tools.from_megatron.translation import Translation

# The sharding of weights in layers, which is that of mesh.fsdp.
ZERO3 = "optim_grads_params"


def translate_mesh(t: Translation) -> int:
    """The axes of the mesh; returns the number of devices that divide the batch."""
    tensor, pipeline, context = (
        t[f"{axis}_model_parallel_size" if axis != "context" else "context_parallel_size"]
        for axis in ("tensor", "pipeline", "context")
    )
    parts = tensor * pipeline * context
    if t.world % parts:
        problem = f"the world size {t.world} is no multiple of tensor x pipeline x context = {parts}"
        raise t.arguments.fail(problem, "correct the sizes, or --world")
    replicas = t.world // parts
    t.put("mesh.pipeline", pipeline, "pipeline_model_parallel_size")
    axes, expert = _experts(t, replicas, tensor, context)
    copies = t["num_distributed_optimizer_instances"]
    flags = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy")
    flags += ("num_distributed_optimizer_instances",)
    t.use(*flags)
    of_megatron = t["use_megatron_fsdp"] or t["use_custom_fsdp"]
    sharded = t["use_torch_fsdp2"] or (of_megatron and t["data_parallel_sharding_strategy"] == ZERO3)
    left = replicas // expert
    if sharded and left % copies:
        raise t.arguments.fail(
            f"{t.arguments.shown('num_distributed_optimizer_instances')} does not divide {left}", "correct it"
        )
    rest = f"{counted(t.world, 'device')} / the other axes"
    t.put("mesh.data", (copies if sharded else left), *(flags if sharded or of_megatron else ()), note=rest)
    if sharded:
        t.put("mesh.fsdp", left // copies, *flags)
    if expert > 1:
        t.put("mesh.expert", expert, "expert_model_parallel_size")
    t.put("mesh.context", context, "context_parallel_size")
    t.put("mesh.tensor", tensor, "tensor_model_parallel_size")
    if axes != ["expert"]:
        t.put("mesh.experts_over", axes, "expert_model_parallel_size", "expert_tensor_parallel_size")
    if context > 1 and t.given("cp_comm_type"):
        t.use("hierarchical_context_parallel_sizes")
        kinds = {"p2p": "ring", "a2a": "all_to_all", "a2a+p2p": "all_to_all+ring"}
        kinds |= dict.fromkeys(("all_gather", "allgather"), "all_gather")
        chosen = {kinds.get(kind) for kind in t["cp_comm_type"]}
        if len(chosen) > 1 or None in chosen:
            t.refuse(f"all layers have one communication.context: {listed(list(STRATEGIES))}", "cp_comm_type")
        else:
            t.put("communication.context", chosen.pop(), "cp_comm_type")
    return replicas


def _experts(t: Translation, replicas: int, tensor: int, context: int) -> tuple[list[str], int]:
    """(the axes that divide the experts, the size of the axis expert)."""
    size = t["expert_model_parallel_size"]
    width = t["expert_tensor_parallel_size"] or tensor
    t.use("expert_model_parallel_size", "expert_tensor_parallel_size")
    if not t["num_experts"]:
        if size > 1:
            raise t.arguments.fail(f"{t.arguments.shown('expert_model_parallel_size')} needs --num-experts", "add it")
        return ["expert"], 1
    if width not in (1, tensor):
        t.refuse(f"tensor divides each expert's width by 1 or by {tensor}", "expert_tensor_parallel_size")
        return ["expert"], 1
    if width == tensor or tensor == 1:
        if replicas % size == 0:
            return ["expert"], size
        if size % context == 0 and replicas % (size // context) == 0:
            return ["expert", "context"], size // context
    elif size % tensor == 0:
        within = size // tensor
        if replicas % within == 0:
            return ["expert", "tensor"], within
        if within % context == 0 and replicas % (within // context) == 0:
            return ["expert", "context", "tensor"], within // context
    problem = f"the experts' axes have {replicas} replicas x context {context} x tensor {tensor} devices"
    t.refuse(f"{problem}, with whole experts only over all of tensor", "expert_model_parallel_size")
    return ["expert"], 1


def translate_batch(t: Translation, replicas: int) -> int:
    """Batch sizes and their ramp-up; returns the largest number of sequences of a step."""
    micro, length = t.arguments.required("micro_batch_size"), sequence_length(t)
    schedule = _step_schedule(t, length) or _ramp_up(t, length)
    size = schedule[-1][1] if schedule else t["global_batch_size"]
    if size is None:
        size = micro * replicas
    if size < 1 or size % (micro * replicas):
        problem = f"a global batch of {size} is no multiple of {micro} x {replicas}, micro-batch and data-parallel size"
        raise t.arguments.fail(problem, "correct the sizes, or --world")
    source = ("global_batch_size", "step_batch_size_schedule")
    t.put("batch.global_size", size, *source, note=f"Megatron's default: micro-batch x {replicas} replicas")
    number = size // (micro * replicas)
    t.put("batch.num_microbatches", number, "micro_batch_size", *source[:1])
    t.put("batch.sequence_length", length, "seq_length", "encoder_seq_length")
    if len(schedule) > 1:
        text = ", ".join(f"{tokens}: {each}" for tokens, each in schedule)
        t.put("batch.schedule", text, "step_batch_size_schedule", "rampup_batch_size")
        for _, each in schedule:
            if each % (micro * replicas):
                problem = f"a step of {each} sequences is no multiple of {micro} x {replicas}"
                t.refuse(problem, *t.given("step_batch_size_schedule", "rampup_batch_size"))
    return size


def sequence_length(t: Translation) -> int:
    """The number of tokens of a sequence."""
    return t["encoder_seq_length"] or t.arguments.required("seq_length")


def _step_schedule(t: Translation, length: int) -> list[tuple[int, int]]:
    """(tokens, sequences) of --step-batch-size-schedule, whose thresholds are rounded down to samples."""
    text = t["step_batch_size_schedule"]
    if text is None:
        return []
    for name in ("rampup_batch_size", "global_batch_size"):
        if t[name] is not None:
            problem = f"{t.arguments.shown('step_batch_size_schedule')} excludes --{name.replace('_', '-')}"
            raise t.arguments.fail(problem, "remove one")
    try:
        pairs = [entry.split(":") for entry in text.replace(",", " ").split()]
        found = sorted((_amount(tokens) // length * length, _amount(size)) for tokens, size in pairs)
        if not found or found[0][0]:
            raise ValueError
    except (ValueError, OverflowError):
        problem = f"{t.arguments.shown('step_batch_size_schedule')} is no schedule such as '0:256 50B:512'"
        raise t.arguments.fail(problem, "correct it") from None
    return found


def _amount(text: str) -> int:
    factor = UNITS.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if factor > 1 else text) * factor)


def _ramp_up(t: Translation, length: int) -> list[tuple[int, int]]:
    """(tokens, sequences) of --rampup-batch-size START INCREMENT SAMPLES."""
    ramp = t["rampup_batch_size"]
    if ramp is None:
        return []
    try:
        start, increment, samples = map(int, ramp)
        increments, rest = divmod(t.arguments.required("global_batch_size") - start, increment)
        if rest or increments < 0 or min(start, increment, samples) < 1:
            raise ValueError
    except (ValueError, ZeroDivisionError):
        problem = f"{t.arguments.shown('rampup_batch_size')} is no START INCREMENT SAMPLES that leads to the batch size"
        raise t.arguments.fail(problem, "correct it") from None
    t.differs("batch-schedule", "rampup_batch_size")
    steps = range(increments + 1)
    # A size applies from the first step on that begins at k * samples / increments samples or later.
    return [(-(-k * samples // max(increments, 1)) * length, start + k * increment) for k in steps]


def translate_pipeline(t: Translation) -> None:
    """The layers of each virtual stage."""
    stages, layers = t["pipeline_model_parallel_size"], layer_count(t)
    rounds, layout, names = _rounds(t, stages, layers)
    uneven = t["decoder_first_pipeline_num_layers"], t["decoder_last_pipeline_num_layers"]
    t.use(
        "pipeline_model_parallel_layout",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    )
    if stages == 1:
        return
    if layout is None and any(size is not None for size in uneven):
        names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        layout = _uneven(t, stages, rounds, layers, *uneven)
    elif layout is None and (_at_ends(t) != (0, 0)):
        names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        first, last = _at_ends(t)
        each, rest = divmod(layers + first + last, stages * rounds)
        if rest:
            raise t.arguments.fail(
                f"{layers} layers and the ends are no multiple of {stages * rounds} stages", "correct them"
            )
        layout = [each - first, *[each] * (stages * rounds - 2), each - last]
    elif layout is None and layers % (stages * rounds):
        raise t.arguments.fail(f"{layers} layers are no multiple of {stages * rounds} virtual stages", "correct them")
    if rounds > 1:
        t.put(
            "pipeline.virtual_stages",
            rounds,
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "pipeline_model_parallel_layout",
        )
    if layout is not None and 0 in layout[1:-1]:
        t.differs("stage-layout", *names)
    elif layout is not None:
        t.put("pipeline.layout", layout, *names)


def _at_ends(t: Translation) -> tuple[int, int]:
    names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    t.use(*names)
    return int(t[names[0]]), int(t[names[1]])


def layer_count(t: Translation) -> int:
    """The number of layers."""
    return t["num_layers"] or t["encoder_num_layers"] or t.arguments.required("num_layers")


def _rounds(t: Translation, stages: int, layers: int) -> tuple[int, list[int] | None, tuple[str, ...]]:
    """(virtual stages of a stage, layers of each if they are named, the arguments)."""
    text, each = t["pipeline_model_parallel_layout"], t["num_layers_per_virtual_pipeline_stage"]
    if text is not None:
        layout = _layout(t, text)
        if len(layout) % stages or sum(layout) != layers:
            shown = t.arguments.shown("pipeline_model_parallel_layout")
            problem = f"{shown} has {sum(layout)} layers in {len(layout)} stages"
            raise t.arguments.fail(f"{problem}, not {layers} in a multiple of {stages}", "correct it")
        return len(layout) // stages, layout, ("pipeline_model_parallel_layout",)
    if each is not None:
        rounds, rest = divmod((layers + sum(_at_ends(t))) // stages, max(each, 1))
        if rest or each < 1:
            problem = f"{t.arguments.shown('num_layers_per_virtual_pipeline_stage')} does not divide a stage's layers"
            raise t.arguments.fail(problem, "correct it")
        return max(rounds, 1), None, ()
    return t["num_virtual_stages_per_pipeline_rank"] or 1, None, ()


def _layout(t: Translation, text: str) -> list[int]:
    """The layers of each virtual stage in a text such as Et*3|(tt|)*29,m|L."""
    try:
        plain = _repeated(text.replace(" ", "").replace(",", ""))
        if set(plain) - set("Etm|L"):
            raise ValueError
    except ValueError:
        problem = f"{t.arguments.shown('pipeline_model_parallel_layout')} is no layout such as Et*3|(tt|)*29m|L"
        raise t.arguments.fail(problem, "correct it") from None
    return [stage.count("t") for stage in plain.split("|")]


def _repeated(text: str) -> str:
    """The text with repetitions, x*3 and (xy)*3, written out."""
    found, at = "", 0
    while at < len(text):
        if text[at] == "(":
            end = text.find(")", at)
            if end < 0:
                raise ValueError
            unit, at = text[at + 1 : end], end + 1
        else:
            unit, at = text[at], at + 1
        digits = ""
        if text[at : at + 1] == "*":
            digits = text[at + 1 :][: len(text[at + 1 :]) - len(text[at + 1 :].lstrip("0123456789"))]
            at += 1 + len(digits)
        found += unit * (int(digits[:4]) if digits else 1)
        if len(found) > 10_000:
            raise ValueError
    return found


def _uneven(t: Translation, stages: int, rounds: int, layers: int, first: int | None, last: int | None) -> list[int]:
    """The layers of the virtual stages where the first or the last stage has a number of its own."""
    inner = stages - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    middle, rest = divmod(left, inner) if inner else (0, left)
    counts = [middle if first is None else first, *[middle] * (stages - 2), middle if last is None else last]
    if rest or any(count % rounds or count < 0 for count in counts):
        problem = f"{layers} layers cannot be divided into {stages} stages of {rounds} parts with these ends"
        raise t.arguments.fail(problem, "correct the numbers of layers")
    return [count // rounds for count in counts] * rounds
