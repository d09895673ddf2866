"""Each built-in sublayer declares what its `apply` does, whatever block it is in.

The declarations are compared with a trace: of the weights that it uses, those of the communication points, and the
names of arrays.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters.partial_eval import dce_jaxpr
from jaxpr_equations import equations
from mesh_models import GPT2, HYBRID, KIMI, LATENT_MODELS, MAMBA, MIXTRAL, MODELS, T5

from megajax.config import ModelConfig
from megajax.layout.kinds import BUILT_IN_BLOCKS, DECLARED, KINDS, LayerKind
from megajax.layout.sublayers import ABILITIES
from megajax.model.attention import Attention
from megajax.model.block import SUBLAYERS, Block
from megajax.model.comm import Comm, TokenPositions
from megajax.model.mlp import MLP
from megajax.model.parameters import parameters
from megajax.model.sublayer import MAX_SCORE, BlockInputs, LayerContext, Sublayer

B, S = 2, 16
LOSSES = {"router": {"global_loss": 0.1, "sequence_loss": 0.1, "z_loss": 0.1, "capacity_factor": 1.0}}
SHARED = {"shared_expert_ffn_hidden_size": 16, "shared_expert_gate": True}
BIASED = {"attention_bias": True, "mlp_bias": True, "qk_norm": "layernorm", "attention_gate": True}
# Models in which every weight of the sublayers is, and the kinds of blocks with them
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": (MODELS["llama"] | BIASED | {"qk_clip": None}, ("dense",)),
    "gpt2": (MODELS["gpt2"] | GPT2 | {"max_positions": S, "qk_clip": 9.0}, ("dense", "attention", "mlp")),
    "experts": (MIXTRAL | SHARED | LOSSES, ("moe", "experts")),
    "experts with biases": (MIXTRAL | LOSSES | {"mlp_bias": True}, ("moe",)),
    "latent": (LATENT_MODELS["dense"] | {"qk_clip": 9.0}, ("dense",)),
    "latent without a latent of queries": (LATENT_MODELS["v2"], ("dense",)),
    "gated DeltaNet": (HYBRID | LOSSES, ("gated_deltanet", "gated_deltanet_moe")),
    "KDA": (KIMI | LOSSES, ("kda", "kda_moe")),
    "Mamba-2": (MAMBA | LOSSES, ("mamba2", "attention_mamba2")),
    "Mamba-2 before others": (MODELS["llama"] | {"mamba2": MAMBA["mamba2"]}, ("mamba2_mlp",)),
    "Mamba-2 before experts": (MIXTRAL | LOSSES | {"mamba2": MAMBA["mamba2"]}, ("mamba2_moe",)),
    "T5": (T5 | {"encoder": T5["encoder"] | {"sequence_length": S}}, ("decoder", "first")),
}


class Noting(dict):
    """Streams, which notes those that are read."""

    read: set[str]

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


class NotingComm(Comm):
    """One device, which notes what its communication points were called with."""

    def __init__(self):
        self.called, self.weights = set[str](), list[int]()

    def column_linear(self, x, w):
        self.weights.append(id(w))
        return super().column_linear(x, w)

    row_linear = replicated_linear = column_linear

    def experts(self, activation, x, experts, weights, matrices, capacity):
        self.called.add("experts")
        self.weights += [id(matrices.up), id(matrices.down)]
        return super().experts(activation, x, experts, weights, matrices, capacity)

    def attend(self, q, k, v, positions, settings):
        self.called.add("attend")
        return super().attend(q, k, v, positions, settings)

    def in_order(self, x, back=False):
        self.called.add("in_order")
        return x


class Traced:
    """A sublayer of a model, and what it does with its fused weights."""

    def __init__(self, part: Sublayer, weights: dict[str, Any], config: ModelConfig, kind: str):
        self.part, self.comm, self.streams = part, NotingComm(), Noting()
        self.streams.read, self.metrics, self.clips, self.linear = set(), set[str](), False, list[str]()
        positions = jnp.broadcast_to(jnp.arange(S), (B, S))
        streams = {"encoder": (B * S, config.hidden_size), "relative_bias": (config.num_heads, config.relative_buckets)}

        def run(weights, x, streams):
            self.streams |= streams
            inputs = BlockInputs(
                positions,
                TokenPositions(positions),
                jnp.arange(B * S, dtype=jnp.uint32),
                None,
                layer_loss_scale=jnp.float32(1),
                streams=self.streams,
            )
            ctx = LayerContext(self.comm, inputs, 0, LayerKind(kind, None))
            y, metrics = part.apply(weights, x, ctx)
            self.metrics = {*metrics} - {MAX_SCORE}
            self.clips = MAX_SCORE in metrics
            self.linear = [name for each in self.comm.weights for name, w in weights.items() if id(w) == each]
            return y, metrics

        given = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in streams.items()}
        x = jax.ShapeDtypeStruct((B * S, config.hidden_size), jnp.float32)
        jaxpr = jax.make_jaxpr(run)(weights, x, given).jaxpr
        used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
        self.unused = {name for name, is_used in zip(sorted(weights), used, strict=False) if not is_used}
        self.names = {e.params["name"] for e in equations(jaxpr) if e.primitive.name == "name"}


def traced(case: str) -> Iterator[Traced]:
    """Each sublayer of the kinds of a case; one that several kinds have with the same weights once."""
    model, kinds = CASES[case]
    config, seen = ModelConfig.model_validate(model), []
    for kind in kinds:
        block = Block(config, kind)
        stored = {name: jax.ShapeDtypeStruct(p.shape, jnp.float32) for name, p in parameters(block).items()}
        fused = jax.eval_shape(block.fuse, stored)
        for name, part in block.parts.items():
            own = {n.removeprefix(f"{name}."): w for n, w in fused.items() if n.startswith(f"{name}.")}
            if name in block.parallel:
                own["norm"] = fused[f"{block.parallel[name]}.norm"]
            if (type(part), own.keys()) not in seen:
                seen.append((type(part), own.keys()))
                yield Traced(part, own, config, kind)


@pytest.mark.parametrize("case", CASES)
def test_a_sublayer_declares_what_it_does(case: str):
    for each in traced(case):
        part, called = each.part, each.comm.called
        assert not each.unused, f"{part.NAME}: FUSED, or a weight that has no effect"
        assert {*each.linear} == {*part.linear_layers()}, f"{part.NAME}: LINEAR"
        assert each.linear[0] == part.linear_layers()[0], f"{part.NAME}: the order of LINEAR"
        exchanged = {"exchanged"} if "attend" in called else set()  # named where the mesh divides sequences
        assert each.names | exchanged == {*part.SAVED}, f"{part.NAME}: SAVED"
        assert each.metrics == {*part.METRICS}, f"{part.NAME}: METRICS"
        assert {*part.losses()} == {name for name in each.metrics if name.endswith("_loss")}, f"{part.NAME}: LOSSES"
        assert (each.metrics != set() or each.clips) == part.has_metrics()
        assert each.streams.read <= {*part.streams(), "relative_bias"} and {*part.streams()} <= each.streams.read
        assert part.IN_ORDER == ("in_order" in called) and part.HAS_EXPERTS == ("experts" in called)


def test_a_sublayer_beside_another_one_has_that_ones_norm(monkeypatch):
    read = set[str]()

    class Beside(MLP):
        def apply(self, w, x, ctx):
            read.update(w)
            return x, {}

    monkeypatch.setitem(KINDS, "attention_mamba2", {"attention": Attention, "mamba2": Beside})
    block = Block(ModelConfig.model_validate(MODELS["gpt2"] | {"position": "none"}), "attention_mamba2")
    assert {name for name in parameters(block) if "norm" in name} == {"attention.norm", "attention.norm_bias"}
    weights = {name: jax.ShapeDtypeStruct(p.shape, jnp.float32) for name, p in parameters(block).items()}
    inputs = BlockInputs(jnp.zeros((1, S), int), TokenPositions(jnp.zeros((1, S), int)), jnp.arange(S), None)
    ctx = LayerContext(Comm(), inputs, 0, LayerKind("attention_mamba2", None))
    x = jax.ShapeDtypeStruct((S, block.input_width), jnp.float32)
    jax.eval_shape(lambda weights, x: block.apply(block.fuse(weights), x, ctx)[0], weights, x)
    assert {"norm", "norm_bias"} <= read


def test_the_cases_have_every_kind_of_block_and_checks_know_the_sublayers():
    assert {kind for _, kinds in CASES.values() for kind in kinds} == BUILT_IN_BLOCKS.keys() <= KINDS.keys()
    assert DECLARED.keys() == SUBLAYERS.keys()
    for name, part in SUBLAYERS.items():
        own = DECLARED[name]
        assert (own.in_order, own.has_experts, own.streams) == (part.IN_ORDER, part.HAS_EXPERTS, part.STREAMS), name


DOCS = Path(__file__).parents[2] / "docs"
IN_WORDS = {"attention": "attention", "an MLP": "mlp", "experts": "moe", "gated DeltaNet": "gated_deltanet"}
IN_WORDS |= {"Kimi delta attention": "kda", "Mamba-2": "mamba2"}
WITHOUT_KEY = {"first": ("attention", "mlp"), "decoder": ("attention", "cross_attention", "mlp")}  # of other settings


def rows(page: str, header: str) -> list[list[str]]:
    """The cells of a table of the docs."""
    lines = (DOCS / page).read_text().partition(f"\n{header}\n")[2].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]


def test_the_kinds_of_blocks_have_the_sublayers_that_the_docs_name():
    found: dict[str, tuple[str, ...]] = {}
    for named, text in rows("hybrids.md", "| kind | sublayers |"):
        kinds, (words, _, last) = re.findall(r"`(\w+)`", named), text.partition(", as in")[0].partition(", or ")
        parts = [part for word, part in IN_WORDS.items() if re.search(rf"(?<!delta ){word}\b", words)]
        parts = sorted(parts, key=lambda part: part == "mlp")
        if "alone" in text:
            found |= {kind: (IN_WORDS.get(kind, kind),) for kind in kinds}
        else:
            found |= dict(zip(kinds, ((*parts,), (parts[0], IN_WORDS.get(last, ""))), strict=False))
    assert found | WITHOUT_KEY == BUILT_IN_BLOCKS


def test_the_abilities_are_those_that_the_docs_list():
    cells = rows("extensions.md", "| word | needed by | the sublayer |")
    assert sorted(word for first, *_ in cells for word in re.findall(r"`(\w+)`", first)) == sorted(ABILITIES)
