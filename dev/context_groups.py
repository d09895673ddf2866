"""Steps with sequences of unequal lengths, simulated with the planner's model: three ways to divide them among GPUs.

    python -m dev.context_groups > docs/records/context_groups.md

data: each GPU has whole rows, packed by first fit or by work. context C: a row is divided among C GPUs, which have C
rows in a microbatch, so that a GPU has as many tokens as before; the best C up to 16 is shown. dynamic C: rows are C
times as long, packed by work, and `communication.context: dynamic` divides their documents among groups of the C GPUs
(`layout/context_groups.py`); the best C up to 16, and up to 64. All have the same documents. GPUs wait for the slowest
in each microbatch, as with `fsdp`, or once a step, as with `data`. Gathers of weights and the update, which are equal,
are left out. Kernels reach the rate of whole sequences in every range, which makes `context` look better than it is for
short documents. Devices of a group, and of static `context`, have equal work.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dev.packing_speed import code_and_books
from megajax.config import Config, load_config
from megajax.config.checks import check_mesh
from megajax.data.packing import RowPacking, fill_rows, spread
from megajax.estimate.costs import attention_flops
from megajax.estimate.traces import traces
from megajax.layout.attention_pairs import AttentionPairs
from megajax.layout.context_groups import ContextGroups
from megajax.layout.kinds import layer_kinds
from megajax.options.context import DYNAMIC, RING, ContextStrategy
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.rates import Rates, rates_of
from megajax.tools.plan.step_time import FORWARD
from megajax.tools.plan.work import CONTEXT_EXPOSED

ROWS = 4  # of each GPU in a batch: its microbatches with `data`
BATCHES = 4
GPUS = (2, 8, 64)
MOST = 16  # GPUs of `context`, but for the last way


def chats(tokens: int, seed: int) -> np.ndarray:
    """The lengths of conversations with this sum: log-normal, median 403, up to 8,192."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(8192, np.exp(rng.normal(6.0, 1.1, tokens // 100))).astype(np.int64) + 1
    some = int(np.searchsorted(np.cumsum(lengths), tokens))
    return np.append(lengths[:some], tokens - lengths[:some].sum())


CASES = (("chats", 8192, chats), ("code and books", 131_072, code_and_books))


@dataclass(frozen=True)
class Costs:
    """Seconds of a GPU for its share of a sequence, forward, backward and recomputed, by the planner's constants."""

    config: Config
    rates: Rates

    @property
    def row(self) -> int:
        """Tokens of a row."""
        return self.config.batch.sequence_length

    @cached_property
    def per_token(self) -> float:
        """Of everything but attention, from the planner's estimate of a row on one GPU."""
        time = Candidate.of(self.config, check_mesh(self.config, 1)).time(self.rates)
        linear = time.matmuls + time.elementwise + time.recomputed.matmuls + time.recomputed.elementwise
        return (linear + time.head) / self.row

    def attention(self, length: int, degree: int = 1, strategy: ContextStrategy = RING) -> float:
        """Causal attention of one document, divided."""
        rate = self.rates.attention(self.config.model.head_dim, length) * (strategy.attention_rate if degree > 1 else 1)
        return (1 + FORWARD) * length * self._flops(length) / degree / rate

    def exchange(self, length: int, degree: int) -> float:
        """The exposed part of sending keys and values of this number of tokens."""
        if degree == 1:
            return 0.0
        model = self.config.model
        width = model.num_kv_heads * (model.head_dim + model.value_dim)
        sent = 4 * 2 * length * width * (degree - 1) / degree  # as in `plan.work`: BF16, both passes
        bandwidth = min(self.rates.group_bytes(degree > self.rates.hosts_of, 1), self.rates.nccl_bytes)
        return (1 + FORWARD) * len(layer_kinds(model)) * CONTEXT_EXPOSED * sent / bandwidth

    def _flops(self, length: int) -> float:
        """Attention's FLOPs for a token of a sequence of this length."""
        return length * self._per_length

    @cached_property
    def _per_length(self) -> float:
        model, traced = self.config.model, traces(self.config.model, self.config.lora, self.row, "bfloat16")
        return sum(
            attention_flops(work, self.row, kind.window, model.causal) / self.row
            for kind in layer_kinds(model)
            for work in traced.of(kind.block).parts.values()
        )


def static(rows: list[list[int]], gpus: int, degree: int, costs: Costs) -> np.ndarray:
    """Seconds [microbatches, gpus] of rows that are divided among `degree` GPUs each."""
    linear = costs.row / degree * costs.per_token + costs.exchange(costs.row, degree)
    seconds = [linear + sum(costs.attention(each, degree) for each in row) for row in rows]
    groups = np.reshape(seconds, (-1, gpus // degree, degree)).sum(axis=2)  # as many rows at a time as GPUs
    return np.repeat(groups, degree, axis=1)


def dynamic(rows: list[list[int]], gpus: int, degree: int, costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and sizes of groups, both [microbatches, gpus], of rows that groups of `degree` GPUs share."""
    seconds, sizes, groups = [], [], ContextGroups.of_model(costs.config.model, degree)
    for row in rows:
        documents, of_row = groups.arrange(row)
        waiting, first = list(documents), 0
        while first < degree:
            size, tokens, attention = of_row[first], of_row[first] * costs.row, 0.0
            while tokens:
                length = row[waiting.pop(0)]
                tokens, attention = tokens - length, attention + costs.attention(length, size, DYNAMIC)
            each = costs.row * costs.per_token + attention + costs.exchange(size * costs.row, size)
            seconds += [each] * size
            first += size
        sizes += of_row
    return np.reshape(seconds, (-1, gpus)), np.reshape(sizes, (-1, gpus))


def powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def simulated(costs: Costs, draw: Callable[[int, int], np.ndarray], gpus: int) -> dict[str, np.ndarray]:
    """By name the seconds of a step, means of batches.

    With GPUs that wait in each microbatch, once a step, never; then the mean size of a GPU's group.
    """
    sums = dict[str, list[tuple[float, ...]]]()

    def add(name: str, seconds: np.ndarray, size: float = 1) -> None:
        steps = seconds.max(axis=1).sum(), seconds.sum(axis=0).max(), seconds.sum(axis=0).mean()
        sums.setdefault(name, []).append((*map(float, steps), size))

    for seed in range(BATCHES):
        count = ROWS * gpus
        filled = fill_rows(draw(count * costs.row, seed), count, costs.row, RowPacking("first_fit"))
        even = fill_rows(draw(count * costs.row, seed), count, costs.row, RowPacking("balanced"))
        pairs = [int(AttentionPairs().of([piece.length for piece in row]).sum()) for row in even]
        add("data, balanced", static([[p.length for p in even[i]] for i in spread(pairs)], gpus, 1, costs))
        rows = [[piece.length for piece in filled[i]] for i in np.random.default_rng(seed).permutation(count)]
        for degree in powers(min(gpus, MOST)):
            add(f"context {degree}" if degree > 1 else "data", static(rows, gpus, degree, costs), degree)
        for degree in powers(gpus)[1:]:
            tokens, number = degree * costs.row, count // degree
            packed = fill_rows(draw(count * costs.row, seed), number, tokens, RowPacking("balanced"))
            pairs = [int(AttentionPairs().of([piece.length for piece in row]).sum()) for row in packed]
            longer = [[piece.length for piece in packed[i]] for i in spread(pairs)]
            seconds, sizes = dynamic(longer, gpus, degree, costs)
            add(f"dynamic {degree}", seconds, float(sizes.mean()))
    return {name: np.mean(each, axis=0) for name, each in sums.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/llama3_8b.yaml")
    parser.add_argument("--device", default="h100")
    options = parser.parse_args()
    overrides = ["batch.global_size=1", "batch.num_microbatches=1", "remat.policy=full", "data.kind=synthetic"]
    overrides += [f"mesh.{axis}=1" for axis in ("data", "fsdp", "context", "tensor")]
    print(
        f"# Dynamic context, simulated\n\n`python -m dev.context_groups`: {options.config}, {options.device.upper()}."
    )
    print(f"A batch has {ROWS} rows of each GPU; means of {BATCHES} batches. Published, for other data, models and")
    print("clusters: up to 1.48 × (dynamic context in Megatron-Core), 1.23 × on average (WLB-LLM).\n")
    columns = "seconds, waiting in each microbatch | waiting | best dynamic is faster by | seconds, waiting once a step"
    print(f"| documents | GPUs | way | GPUs of a group, mean | {columns} |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row, draw in CASES:
        config = load_config(options.config, [*overrides, f"batch.sequence_length={row}"])
        costs = Costs(config, rates_of(options.device))
        for gpus in GPUS:
            found = simulated(costs, draw, gpus)
            by_seconds = sorted(found, key=lambda way: found[way][0])
            best = next(way for way in by_seconds if way.startswith("context"))
            groups = [way for way in by_seconds if way.startswith("dynamic")]
            small = next(way for way in groups if int(way.split()[1]) <= MOST)
            for way in dict.fromkeys(("data", "data, balanced", best, small, groups[0])):
                each, once, never, size = found[way]
                faster = each / found[groups[0]][0]
                cells = f"{way} | {size:.1f} | {each:.2f} | {1 - never / each:.1%} | {faster:.2f} | {once:.2f}"
                print(f"| {name} to {row:,} tokens | {gpus} | {cells} |")


if __name__ == "__main__":
    main()
