"""The numbers that pass all checks on one setting, for the cures that errors list."""

from collections.abc import Iterable

from megajax.config.sentences import divisors, listed, value
from megajax.layout.kinds import ATTENTION, may_have, mlp_widths
from megajax.layout.recurrent import recurrent_heads
from megajax.schema.config import Config


def tensor_keys(config: Config) -> list[str]:
    """The keys of `model` whose values `mesh.tensor` must divide."""
    whole = {"expert_ffn_hidden_size"} if "tensor" in config.mesh.experts_over else set()
    widths = [key for key in mlp_widths(config.model) if key not in whole]
    shared = [heads.key(heads.shared) for heads in recurrent_heads(config.model)]
    heads = ["model.num_heads"] if may_have(config.model, ATTENTION) else []
    return [*heads, *shared, *(f"model.{key}" for key in widths)]


def fits_kv_heads(config: Config, tensor: int) -> bool:
    """Whether each device of `mesh.tensor` has whole KV heads, or whole groups of devices share one."""
    heads = config.model.num_kv_heads
    return heads % tensor == 0 or tensor % heads == 0


def axis_sizes(config: Config, axis: str, candidates: Iterable[int]) -> list[int]:
    """Those of the candidates that fit the model and the batch as `mesh.axis`, if the other axes have size 1."""
    model, batch = config.model, config.batch
    microbatch = batch.global_size // batch.num_microbatches

    def fits(n: int) -> bool:
        if axis == "tensor":
            whole = all(value(config, key) % n == 0 for key in tensor_keys(config))
            return whole and fits_kv_heads(config, n) and model.padded_vocab_size % n == 0
        if axis == "context":
            return n == 1 or batch.sequence_length % (2 * n) == 0
        if axis == "pipeline":
            several = config.pipeline.virtual_stages > 1 and n > 1
            return n <= min(model.num_layers, batch.num_microbatches) and not (several and batch.num_microbatches % n)
        return microbatch % n == 0 and (axis != "expert" or (model.num_experts or 1) % n == 0)

    return [n for n in candidates if fits(n)]


def microbatch_numbers(config: Config, sizes: dict[str, int]) -> list[int]:
    """The values of `batch.num_microbatches` that fit the batch, its schedule and a mesh of these sizes."""
    batch, shards, stages = config.batch, config.batch_shards(sizes), sizes["pipeline"]
    all_sizes = [size for _, size in config.batch.sizes_by_tokens]

    def fits(n: int) -> bool:
        microbatch = batch.global_size // n
        if microbatch % shards or any(size % microbatch for size in all_sizes):
            return False
        if microbatch // shards * batch.sequence_length // sizes["context"] % sizes["tensor"]:
            return False
        counts = [size // microbatch for size in all_sizes]
        if any(count % config.communication.microbatches_at_once for count in counts):
            return False
        in_rounds = config.pipeline.virtual_stages == 1 or not any(count % stages for count in counts)
        return min(counts) >= stages and in_rounds

    return [n for n in divisors(batch.global_size) if fits(n)]


def microbatches_cure(config: Config, sizes: dict[str, int]) -> str:
    """The values of `batch.num_microbatches` to use; if none fits the mesh, what the batch must be for one."""
    if usable := microbatch_numbers(config, sizes):
        return f"use {listed(usable)}"
    least = max(sizes["pipeline"], config.communication.microbatches_at_once)
    return f"use {least}, and make batch.global_size a multiple of {least * config.batch_shards(sizes)}"
