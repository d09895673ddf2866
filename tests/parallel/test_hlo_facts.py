"""What the compiled step communicates and holds, read from its HLO."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxpr_equations import equations

import megajax
from megajax.config.checks import check_mesh
from megajax.mesh import build_mesh
from megajax.parallel.tensor.ring import TensorRing
from megajax.step.nodes import StepArrays
from megajax.tools import explain_weight
from megajax.training.step import TrainProgram

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast")
# Beginnings of the names of jax's primitives
OF_HLO = {"psum": "all-reduce", "pmax": "all-reduce", "ppermute": "collective-permute"}
OF_JAX = (
    "all_gather",
    "reduce_scatter",
    "psum",
    "pmax",
    "pmin",
    "all_to_all",
    "ragged_all_to_all",
    "ppermute",
    "pbroad",
)
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\((.*?)\), .*replica_groups=mesh\[.*?\] \{{(.*?)\}}")
PERMUTE = re.compile(r" (collective-permute)(?:-start)?\((.*?)\), .*source_target_pairs=()")
CALLED = re.compile(r"(\w+)=(?:%([\w.-]+)|\{(%[\w., %-]+)\})")
SHAPE = re.compile(r"\b[a-z]+\d+\w*\[([\d,]+)\]")
LAYERS = 4
LAYER_MATRICES = 4  # query, key and value in one; output; gate and up in one; down


@dataclass(frozen=True)
class Collective:
    kind: str
    axes: frozenset[str]  # none of a permutation, which names its devices
    arrays: int  # XLA may combine several into one operation
    loops: int  # while loops around it


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled module, with the mesh axes that it runs over."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if start := COMPUTATION.match(line):
            name = start[1]
            entry = name if line.startswith("ENTRY") else entry
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    found = []

    def visit(name: str, loops: int) -> None:
        for line in bodies[name]:
            if match := COLLECTIVE.search(line) or PERMUTE.search(line):
                axes = frozenset(re.findall(r"\w+", match[3]))
                found.append(Collective(match[1], axes, match[2].count("%"), loops))
            else:
                assert not re.search(rf" (?:{'|'.join(COLLECTIVES)})(?:-start)?\(", line), f"not understood: {line}"
            for attribute, single, several in CALLED.findall(line):
                for called in [single] if single else re.findall(r"%([\w.-]+)", several):
                    if called in bodies and attribute != "to_apply":
                        visit(called, loops + (attribute == "body"))

    visit(entry, 0)
    return found


def count(found: list[Collective], axis: str, *kinds: str, loops: int | None = None) -> int:
    """Arrays that collectives of these kinds move over an axis, alone or with others."""
    return sum(c.arrays for c in found if c.kind in kinds and axis in c.axes and loops in (None, c.loops))


def traced(jaxpr, loops: int = 0) -> Iterator[Collective]:
    """The collectives of a step that is not compiled, which XLA may merge but never moves into a loop."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith(OF_JAX):
            axes = equation.params.get("axes", equation.params.get("axis_name"))
            axes = frozenset(axes if isinstance(axes, tuple) else (axes,))
            yield Collective(OF_HLO.get(name, name.replace("_", "-")), axes, len(equation.invars), loops)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            yield from traced(inner, loops + (name in ("scan", "while"))) if hasattr(inner, "eqns") else ()


def largest_array(text: str) -> int:
    """Elements of the largest array of a compiled module."""
    return max(int(np.prod([int(d) for d in dims.split(",")])) for dims in SHAPE.findall(text))


@pytest.fixture(scope="module")
def build(table):
    def build(mesh, model="llama", **settings):
        config = table.make_config(model, mesh, **{"steps": 1, "optimizer": "sgd", **settings})
        count = int(np.prod([*mesh.values(), 1]))
        return TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))

    return build


@pytest.fixture(scope="module")
def compiled(build):
    """The compiled step of a mesh and settings, made once."""
    known = {}

    def compiled(mesh, **settings):
        key = repr((mesh, settings))
        if key not in known:
            program = build(mesh, **settings)
            known[key] = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
        return known[key]

    return compiled


# Once a step


CHUNKS = {"loss_chunk_tokens": 16}  # several, so that there is a loop over them


@pytest.fixture(scope="module")
def looped(compiled) -> list[Collective]:
    """The collectives of a stack that is a loop over the layers, forward, and another one, backward."""
    mesh, remat = {"data": 2, "fsdp": 2, "tensor": 2}, {"policy": "full"}
    return collectives(compiled(mesh, microbatches=4, remat=remat, kernels=CHUNKS).as_text())


def test_gradients_are_reduced_over_data_once_a_step_whatever_the_microbatches(looped):
    """Each gathered weight's gradient is scattered, and nothing else: embedding, head and the layers' matrices."""
    over_data = [c for c in looped if "data" in c.axes]
    assert {c.loops for c in over_data} == {0}, "a collective over data stands inside a loop"
    assert count(looped, "data", "all-gather") == count(looped, "data", "reduce-scatter") == LAYER_MATRICES + 2
    assert count(looped, "data", "all-reduce") > 0


def test_embedding_and_head_are_gathered_over_fsdp_once_a_step(looped):
    """With many tokens the table is gathered; with few, rows are sent instead."""
    assert count(looped, "fsdp", "all-gather", loops=0) == 2
    assert count(looped, "fsdp", "reduce-scatter", loops=0) == 2


# Once a layer and pass


def test_weights_are_gathered_over_fsdp_once_a_layer_and_pass(looped):
    in_layers = [c for c in looped if c.loops and "fsdp" in c.axes]
    assert len({c.loops for c in in_layers}) == 1
    assert count(in_layers, "fsdp", "all-gather") == 2 * LAYER_MATRICES
    assert count(in_layers, "fsdp", "reduce-scatter") == LAYER_MATRICES


@pytest.mark.long
def test_weights_are_gathered_over_fsdp_once_a_layer_and_pass_of_groups(compiled):
    group = 2
    found = collectives(compiled({"fsdp": 2}, remat={"policy": "full", "group": group}).as_text())
    assert count(found, "fsdp", "all-gather", loops=1) == 2 * LAYER_MATRICES * group
    assert count(found, "fsdp", "reduce-scatter", loops=1) == LAYER_MATRICES * group
    assert count(found, "fsdp", "all-gather", loops=0) == 2


@pytest.mark.parametrize("remat", ["none", "full"])
def test_an_unrolled_stack_gathers_over_fsdp_once_a_layer_and_pass_too(build, compiled, table, remat):
    """Only the last layer's gathers are merged: merged gathers keep a layer's whole weights.

    With the policy `full` the last layer's are not merged either. Of MLPs, which have two matrices.
    """
    layers, matrices = 2, LAYER_MATRICES // 2
    model = table.MODELS["llama"] | {"num_layers": layers, "block_pattern": ["mlp"]}
    settings = {"model": model, "remat": {"policy": remat}, "kernels": {"scan_unroll": layers}}
    found = collectives(compiled({"fsdp": 2}, **settings).as_text())
    gathers = 2 * layers - (remat != "full")
    assert count(found, "fsdp", "all-gather") == matrices * gathers + 2
    assert count(found, "fsdp", "reduce-scatter") == matrices * layers + 2
    graph = build({"fsdp": 2}, **settings).graph
    chains = [chain for name in explain_weight.names(graph) for chain in explain_weight.chains(graph, name)]
    assert sum(chain.count("all-gather", "fsdp") for chain in chains) == matrices * gathers + 2


# Forward, an input of attention and of the MLP is gathered and an output scattered; backward, their gradients the other
# way. What recomputation repeats: all but the last scatter, or only what names do not keep, the gathered inputs.
CROSSINGS = {"none": (4, 4), "save_matmuls": (6, 4), "full": (6, 5)}  # gathers, scatters


def check_crossings(found: list[Collective], loops: int, remat: str) -> None:
    """Those of layers are inside `loops` loops."""
    gathers, scatters = CROSSINGS[remat]
    in_layers = [c for c in found if c.loops == loops and c.kind in ("all-gather", "reduce-scatter")]
    assert {c.axes for c in in_layers if "tensor" in c.axes} == {frozenset({"tensor"})}
    assert count(in_layers, "tensor", "all-gather") == gathers + 1
    assert count(in_layers, "tensor", "reduce-scatter") == scatters + 1
    assert not [c for c in found if c.kind in ("all-to-all", "collective-permute")]


def test_the_residual_stream_crosses_tensor_at_the_edges_alone(looped):
    """Enter and leave of attention and MLP, and their transposes; the loop over chunks of the loss has one of each."""
    check_crossings(looped, 2, "full")


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "save_matmuls"])
def test_policies_that_keep_more_cross_tensor_less(compiled, remat):
    check_crossings(collectives(compiled({"tensor": 2}, remat={"policy": remat}, kernels=CHUNKS).as_text()), 1, remat)


@pytest.mark.long
def test_wide_layers_send_one_piece_per_other_device_instead(build, monkeypatch):
    remat, tensor = "full", 4
    monkeypatch.setattr(TensorRing, "overlap_width", 1)
    program = build({"tensor": tensor}, remat={"policy": remat}, kernels=CHUNKS)
    step = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    found = [c for c in collectives(step.as_text()) if c.loops == 1]
    pieces = [c for c in found if c.kind == "collective-permute"]
    assert sum(c.arrays for c in pieces) == sum(CROSSINGS[remat]) * (tensor - 1)
    assert [count(found, "tensor", kind) for kind in ("all-gather", "reduce-scatter")] == [1, 1], "the loss's alone"


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_one_device_communicates_nothing(build, model):
    program = build({}, model, microbatches=2)
    step = program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr
    names = {each.primitive.name for each in equations(step.jaxpr)}
    assert "dot_general" in names and not [name for name in names if name.startswith(OF_JAX)]


# Memory

# T = 512 tokens on every mesh below, one microbatch, and V = 2048: the largest array but the logits has T · 128.
WIDE = {"batch": {"global_size": 32, "sequence_length": 16}}


@pytest.mark.long
def test_no_array_is_as_large_as_the_logits(build, table):
    def largest(**kernels):
        settings = {**table.MODELS["llama"], "vocab_size": 2000}
        program = build({"tensor": 2}, settings, kernels=kernels, **WIDE)
        compiled = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
        return largest_array(compiled.as_text())

    tokens = 32 * 16
    logits = tokens * 2048 // 2
    assert largest(loss_chunk_tokens=tokens // 4) < logits
    assert largest(loss_chunk_tokens=tokens) >= logits, "one chunk holds all logits: the test would see them"


def temporary_bytes(build, layers=8, **settings) -> int:
    program = build({}, {"num_layers": layers, "hidden_size": 64, "num_heads": 8, "vocab_size": 250}, **settings)
    step = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    return step.memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_full_recomputation_needs_less_memory_than_none(build, record_property):
    deep = {"batch": {"global_size": 8, "sequence_length": 64}}
    peak = {
        "none": temporary_bytes(build, **deep),
        "selective": temporary_bytes(build, remat={"policy": "selective"}, **deep),
        "full": temporary_bytes(build, remat={"policy": "full"}, **deep),
    }
    for policy, size in peak.items():
        record_property(f"temporary bytes with remat {policy}", size)
    assert peak["full"] < 0.5 * peak["none"], peak
    assert peak["full"] < peak["selective"] < peak["none"], peak


@pytest.mark.long
def test_full_recomputation_is_not_merged_with_the_forward_pass_of_an_unrolled_stack(build):
    deep = {"batch": {"global_size": 8, "sequence_length": 64}, "kernels": {"scan_unroll": 6}}
    full = temporary_bytes(build, 6, remat={"policy": "full"}, **deep)
    assert full < 0.5 * temporary_bytes(build, 6, **deep)


def residual_shapes(program) -> list[tuple[int, ...]]:
    """Shapes of the residuals of the forward pass, on one device of a mesh."""
    graph = program.graph
    specs = {name: placement.spec for name, placement in program.placements.items()}

    def forward(params, batch):
        fields = {name: field[0] for name, field in batch.items()}
        at, layers = graph.microbatch(fields, 0), graph.layers.weights.gather_per_step(params, {}, {})
        arrays = StepArrays(graph.table.gather(params), {graph.layers.NAME: layers})
        streams, _ = graph.inner[0].forward(arrays, {}, at, save=True)
        return graph.layers.forward(arrays, streams, at, save=True)[1][1]  # without the inputs of all layers

    run = jax.shard_map(
        forward, mesh=program.mesh, in_specs=(specs, program.batch_sharding.spec), out_specs=P(), check_vma=False
    )
    kept = jax.eval_shape(run, program.abstract_state.params, program.abstract_batch)
    return [leaf.shape for leaf in jax.tree.leaves(kept)]


def layer_shapes(placement, mesh) -> set[tuple[int, ...]]:
    """What a layer's weight may look like on a device: gathered, and as `fsdp` shard."""
    divided = list(zip(placement.shape, placement.spec, strict=True))[1:]
    gathered = tuple(size // mesh.get("tensor", 1) if entry == "tensor" else size for size, entry in divided)
    shard = tuple(
        size // mesh.get("fsdp", 1) if isinstance(entry, tuple) else size
        for size, (_, entry) in zip(gathered, divided, strict=True)
    )
    return {gathered, shard}


@pytest.mark.parametrize("policy", ["none", "selective", "save_matmuls", "full"])
@pytest.mark.parametrize(("mesh", "unroll"), [({"tensor": 2}, 1), ({"fsdp": 2}, LAYERS)], ids=str)
def test_weights_are_not_kept_for_the_backward_pass(build, mesh, policy, unroll):
    program = build(mesh, remat={"policy": policy}, kernels={"scan_unroll": unroll})
    kept = residual_shapes(program)
    by_kind = program.graph.layers.weights.weights.values()
    fused = [(weight.name, weight.placement) for weights in by_kind for weight in weights.values()]
    placements = [*program.placements.items(), *fused]
    weights = set().union(*(layer_shapes(p, mesh) for n, p in placements if n.startswith("blocks.")))
    assert kept and not weights & {shape if unroll == LAYERS else shape[1:] for shape in kept}


def test_full_recomputation_keeps_the_inputs_of_the_blocks_alone(build):
    def kept(**remat):
        return sorted(residual_shapes(build({}, remat={"policy": "full", **remat})))

    tokens, width = 32 * 16, 64
    assert kept() == [(LAYERS, tokens, width)]
    assert kept(group=2) == [(LAYERS // 2, tokens, width)]


# Stages


def test_over_data_stages_communicate_once_a_step(build, table):
    """No tick gathers weights or reduces gradients over `data`, or those of non-block weights over `pipeline`."""
    model = table.MODELS["llama"] | {"num_layers": 2}
    program = build({"pipeline": 2, "data": 2}, model, microbatches=4, pipeline={"schedule": "zero_bubble"})
    found = [*traced(program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr.jaxpr)]
    assert {c.loops for c in found if "data" in c.axes} == {0}
    gathered, scattered = (count(found, "data", kind) for kind in ("all-gather", "reduce-scatter"))
    assert gathered == scattered == LAYER_MATRICES + 2, "two non-block weights and a layer's matrices"
    # A tick's head spreads its tokens over the stages and gathers their gradients.
    in_ticks = [c for c in found if c.loops and c.kind != "collective-permute"]
    assert {(c.kind, *c.axes) for c in in_ticks} == {("reduce-scatter", "pipeline"), ("all-gather", "pipeline")}


# In the sources

CALLS = {"psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "ppermute", "pshuffle", "pswapaxes"}
CALLS |= {"all_to_all", "axis_index"}


def called_names(path: Path) -> set[str]:
    """Names that a source file calls, imports or passes on, in code and not in comments."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text))) if any(name in text for name in CALLS) else []
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


@pytest.mark.smoke
def test_collectives_are_called_in_few_folders():
    package = Path(megajax.__file__).parent
    found = {path.relative_to(package).parts[0]: set() for path in package.rglob("*.py")}
    for path in package.rglob("*.py"):
        # A Pallas kernel reads its grid index with a function named like a collective.
        calls = CALLS - {"axis_index"} if "pallas" in path.read_text() else CALLS
        found[path.relative_to(package).parts[0]] |= called_names(path) & calls
    assert {"psum", "all_gather", "psum_scatter", "pmax", "axis_index"} <= found.pop("parallel"), "the test sees none"
    assert found.pop("weights") == {"psum", "psum_scatter", "axis_index"}, "the way back of gradients, and KV heads"
    assert found.pop("optim") == {"all_gather", "all_to_all", "axis_index"}, "of whole matrices"
    # Of the pipeline (the output of adapters' base too), the embedding in its shards, and rows of a stage.
    in_step = {"all_gather", "all_to_all", "axis_index", "pmax", "ppermute", "psum", "psum_scatter"}
    assert found.pop("step") == in_step
    assert found.pop("inference") == {"psum", "axis_index"}, "the sum over the experts of a model in use"
    measured = {"all_gather", "all_to_all", "ppermute", "psum", "psum_scatter"}
    assert found.pop("tools") == measured, "preflight measures them"
    assert found.pop("training") == {"all_gather"}, "of checksums, where copies of the state are compared"
    assert not {folder: names for folder, names in found.items() if names}
