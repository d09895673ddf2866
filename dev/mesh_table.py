"""The mesh tables: `python dev/mesh_table.py [--table pipeline] [--model llama] [--output FILE] [--jobs N]`.

Trains a Llama-style and a GPT-2-style model in FP32 on 8 virtual CPU devices and compares each run with the same config
on one device with one microbatch. Prints a markdown table; exit status 1 if a row disagrees.

- `mesh`: 4 layers, every mesh of `data`, `fsdp` and `tensor` with 1, 2, 4 or 8 devices, 1, 2 and 4 microbatches.
- `pipeline`: 16 layers on P = 2, 4 and 8 stages, the other devices on `data`, `fsdp` or `tensor`, every schedule, one
  and two virtual stages each, P, 2P and 4P microbatches.
- `context`: 4 layers, sequences of 48 tokens over 2, 4 or 8 devices, the others on one other axis (or two), each
  `communication.context` (the GPT-2-style model: only ring), whole sequences and packed documents.
- `experts`: 2 layers of 8 experts over 1, 2, 4 or 8 devices, alone and with each other axis, each
  `communication.experts`; routers like Mixtral's and DeepSeek-V3's, and one that sends every token to the same expert.
  The reference has the same number of microbatches on one device; the routers' losses have the tolerance of gradient
  norms, assignments are equal exactly. Models of dense and MoE layers on some meshes, with up to four stages and two
  virtual stages.
- `latent`: latent attention (DeepSeek-V2 and V3) on two devices of every axis, every pair and some triples, with and
  without documents, experts and MTP modules, under each remat policy; `communication.context` takes turns.
- `hybrid`: gated DeltaNet beside gated attention, and Mamba-2 beside attention, with experts: on the meshes of `latent`
  that their two groups of heads allow, with and without documents and MTP modules, under remat policies in turn; every
  schedule with one and two virtual stages; LoRA and Muon on a few meshes.
- `encoders`: models with an encoder (T5) or a vision tower (LLaVA, Gemma 3, Qwen2.5-VL, Qwen3-VL), ModernBERT and
  prefix-LM on axes, pairs, triples and stages, with packed documents, adapters and frozen parts.
- `dynamic`: groups of devices (`communication.context: dynamic`) with documents of random lengths, few and many in a
  row of 64 tokens: every other axis, every schedule, experts, latent attention, MTP modules, layers with a state.
- `one_operation`: `1f1b` on stages of two or more layers, which do one operation a tick, with everything above.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/references"))
import virtual_devices

os.environ.update(virtual_devices.ENVIRONMENT)

import jax
import numpy as np
from mesh_models import (
    DEEP_MODELS,
    DEEP_OPTIMIZERS,
    DYNAMIC_VARIANTS,
    ENCODER_VARIANTS,
    EXPERT_MODELS,
    HYBRID_VARIANTS,
    LATENT_VARIANTS,
    MIXED_MODELS,
    MODELS,
    all_meshes,
    context_meshes,
    dynamic_rows,
    encoder_rows,
    expert_meshes,
    hybrid_rows,
    latent_meshes,
    mixed_meshes,
    one_operation_rows,
    pipeline_meshes,
    uneven_weights,
)
from single_device import (
    GRADIENT_TOLERANCE,
    OPTIMIZERS,
    SCALAR_TOLERANCE,
    ZERO_TOLERANCE,
    Difference,
    compare,
    make_config,
    reference_config,
    train,
    weights_of,
)

from megajax.config import Config
from megajax.layout.backward_parts import backward_parts
from megajax.mesh import AXES
from megajax.options.pipeline_schedules import KINDS

SETTINGS = {
    "mesh": ("model", "optimizer", "mesh", "M"),
    "pipeline": ("model", "optimizer", "mesh", "schedule", "R", "M"),
    "context": ("model", "optimizer", "mesh", "context", "documents", "M"),
    "experts": ("model", "optimizer", "mesh", "dispatch", "M"),
    "latent": ("model", "mesh", "context", "documents", "remat", "M"),
    "hybrid": ("model", "optimizer", "mesh", "schedule", "R", "context", "documents", "remat", "M"),
    "encoders": ("model", "mesh", "schedule", "R", "context", "documents", "remat", "M"),
    "dynamic": ("model", "mesh", "schedule", "R", "documents", "remat", "M"),
    "one_operation": ("model", "mesh", "remat", "M"),
}
HYBRIDS = [mixer + variant for mixer, variants in HYBRID_VARIANTS.items() for variant in variants]
DOCUMENTS = {"synthetic_documents": 5, "reset_attention": True, "reset_positions": True}
GRADIENTS = {
    "encoders": 1e-5,
    "dynamic": 1e-5,
}  # tolerances of tables whose rows are all closer than GRADIENT_TOLERANCE
RESULTS = ("loss", "gradient norm", "worst gradient", "initial weights")
STEPS = {
    "mesh": 20,
    "pipeline": 10,
    "context": 10,
    "experts": 10,
    "latent": 10,
    "hybrid": 5,
    "encoders": 3,
    "dynamic": 3,
    "one_operation": 3,
}


def mesh_name(mesh: Mapping[str, int]) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one device"


def parse_meshes(text: str) -> list[dict[str, Any]]:
    """`data=2,tensor=4;expert=2,fsdp=4,experts_over=expert+fsdp` → settings, one mesh between semicolons."""
    meshes = []
    for part in text.split(";"):
        pairs = (pair.split("=") for pair in part.split(",") if pair.strip())
        meshes.append({key.strip(): int(v) if v.isdigit() else v.split("+") for key, v in pairs})
    return meshes


def table_row(table: str, config: Config, optimizer: str, model: str, difference: Difference) -> str:
    name, worst = difference.worst
    of_row = config.data.synthetic_documents
    sizes, folded = {axis: getattr(config.mesh, axis) for axis in AXES}, config.mesh.experts_over
    settings = {
        "model": model,
        "optimizer": optimizer,
        "mesh": mesh_name(sizes)
        + (f", experts over {', '.join(folded)}" if folded != ("expert",) else "")
        + (
            f", {config.pipeline.virtual_stages} virtual stages"
            if table == "experts" and config.pipeline.virtual_stages > 1
            else ""
        ),
        "schedule": config.pipeline.schedule if sizes["pipeline"] > 1 else "",
        "R": config.pipeline.virtual_stages if sizes["pipeline"] > 1 else "",
        "context": config.communication.context if sizes["context"] > 1 else "",
        "dispatch": config.dispatch(sizes).name if config.expert_shards(sizes) > 1 else "",
        "documents": of_row if table == "dynamic" else "packed" if config.data.reset_attention else "",
        "remat": config.remat.policy,
        "M": config.batch.num_microbatches,
    }
    results = (
        f"{difference.loss:.1e}",
        f"{difference.norm:.1e}",
        f"{worst:.1e} {name.removeprefix('blocks.dense.').removeprefix('blocks.moe.')}",
        "differ" if difference.changed else "identical",
    )
    return markdown([*(settings[column] for column in SETTINGS[table]), *results])


def markdown(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


TITLES = {  # of a page, and what its letters mean
    "mesh": ("Mesh table", "(M: microbatches)"),
    "pipeline": ("Pipeline mesh table", "(R: virtual stages, M: microbatches)"),
    "context": ("Context mesh table", "(context: `communication.context`, M: microbatches)"),
    "experts": (
        "Expert mesh table",
        "(dispatch: `communication.experts`, M: microbatches, the reference's too)",
    ),
    "latent": ("Latent attention mesh table", "(M: microbatches, the reference's too with experts)"),
    "hybrid": ("Hybrid mesh table", "(M: microbatches, the reference's too)"),
    "encoders": ("Mesh table of encoders, towers and prefixes", "(R: virtual stages, M: microbatches)"),
    "dynamic": (
        "Mesh table of dynamic context",
        "(documents: in a row of 64 tokens, R: virtual stages, M: microbatches, the reference's too with experts)",
    ),
    "one_operation": (
        "Mesh table of stages with one operation a tick",
        "(M: microbatches, the reference's too with experts)",
    ),
}


def introduction(table: str, steps: int) -> str:
    header = (*SETTINGS[table], *RESULTS)
    (title, letters), option = TITLES[table], "" if table == "mesh" else f" --table {table}"
    runs = f"{'16 layers, ' if table == 'pipeline' else ''}{steps} steps in FP32"
    return f"""# {title}

`python dev/mesh_table.py{option}` with jax {jax.__version__} on 8 virtual CPU devices: {runs}, each row
against the same config on one device{"" if "reference" in letters else " with one microbatch"} {letters}.

- *loss*, *gradient norm*: worst relative difference over the steps, at most {SCALAR_TOLERANCE:g}.
- *worst gradient*: largest ‖Δ‖/‖g‖ of the first step over all weights, layer by layer, at most
  {GRADIENTS.get(table, GRADIENT_TOLERANCE):g}. Biases of keys without rotary positions are compared separately, because
  their true gradient is zero: at most {ZERO_TOLERANCE:g} of the whole gradient's norm.
- *initial weights*: compared bit for bit.

SGD runs with momentum and without clipping: AdamW and clipping both hide a wrong scale of the gradients.

{markdown(header)}
{markdown(["---"] * len(header))}"""


def mesh_configs(args: argparse.Namespace) -> Iterator[tuple[str, str, Config]]:
    """(model, optimizer, config) of each row, grouped by reference."""
    meshes = parse_meshes(args.meshes) if args.meshes else all_meshes()
    counts = args.microbatches or [1, 2, 4]
    for model, optimizer in itertools.product(args.model or MODELS, OPTIMIZERS):
        # SGD runs each mesh with one number of microbatches only.
        for mesh, count in itertools.product(meshes, counts if optimizer == "adamw" else counts[:2][-1:]):
            yield model, optimizer, make_config(model, mesh, microbatches=count, steps=args.steps, optimizer=optimizer)


def pipeline_configs(args: argparse.Namespace) -> Iterator[tuple[str, str, Config]]:
    """The same for the table of schedules."""
    meshes = parse_meshes(args.meshes) if args.meshes else pipeline_meshes()
    for model in args.model or DEEP_MODELS:
        for mesh, schedule, virtual_stages in itertools.product(meshes, KINDS, (1, 2)):
            for count in args.microbatches or [mesh["pipeline"] * n for n in (1, 2, 4)]:
                optimizer, pipeline = DEEP_OPTIMIZERS[model], {"schedule": schedule, "virtual_stages": virtual_stages}
                yield (
                    model,
                    optimizer,
                    make_config(
                        DEEP_MODELS[model],
                        mesh,
                        microbatches=count,
                        steps=args.steps,
                        optimizer=optimizer,
                        pipeline=pipeline,
                    ),
                )


def context_configs(args: argparse.Namespace) -> Iterator[tuple[str, str, Config]]:
    """The same for sequences over several devices."""
    meshes = parse_meshes(args.meshes) if args.meshes else context_meshes()
    for model, packed in itertools.product(args.model or MODELS, (False, True)):
        documents = DOCUMENTS if packed else {}
        strategies = ("ring", "all_gather", "all_to_all") if model == "llama" else ("ring",)
        for mesh, strategy in itertools.product(meshes, strategies):
            config = make_config(
                model,
                mesh,
                microbatches=mesh.get("pipeline", 1),
                steps=args.steps,
                optimizer=DEEP_OPTIMIZERS[model],
                batch={"sequence_length": 48},
                communication={"context": strategy},
                data=documents,
            )
            yield model + " packed" * packed, DEEP_OPTIMIZERS[model], config


def expert_configs(args: argparse.Namespace) -> Iterator[tuple[str, str, Config]]:
    """The same for experts over several devices."""
    given = parse_meshes(args.meshes) if args.meshes else None
    for model in args.model or [*EXPERT_MODELS, *MIXED_MODELS]:
        if model in MIXED_MODELS:
            for mesh, virtual_stages in [(mesh, 1) for mesh in given] if given else mixed_meshes():
                pipeline = {"virtual_stages": virtual_stages} if virtual_stages > 1 else {}
                settings = {"microbatches": max(2, mesh.get("pipeline", 1)), "steps": args.steps, "pipeline": pipeline}
                yield model, "sgd", make_config(MIXED_MODELS[model], mesh, optimizer="sgd", **settings)
            continue
        for i, mesh in enumerate(given or expert_meshes()):
            strategies = ("all_gather", "all_to_all")
            if mesh.get("expert", 1) == 1 and "experts_over" not in mesh:
                strategies = ("auto",)
            elif model != "mixtral":  # they take turns, or the table would be twice as long
                strategies = strategies[i % 2 :][:1]
            for dispatch in strategies:
                communication = {"experts": dispatch}
                settings = {"microbatches": 2, "steps": args.steps, "optimizer": "sgd", "communication": communication}
                yield model, "sgd", make_config(EXPERT_MODELS[model], mesh, **settings)


def latent_configs(args: argparse.Namespace) -> Iterator[tuple[str, str, Config]]:
    """The same for latent attention; every mesh has one model with experts, and without `expert` one without."""
    meshes = parse_meshes(args.meshes) if args.meshes else latent_meshes()
    for variant, (model, packed, policy) in LATENT_VARIANTS.items():
        if args.model and variant not in args.model:
            continue
        routed, turn = "num_experts" in model, list(LATENT_VARIANTS).index(variant) % 2
        for i, mesh in enumerate(meshes):
            if (i % 2 != turn and len(mesh) == 2) or (not routed and "expert" in mesh):
                continue
            divided = mesh.get("context", 1) * mesh.get("tensor", 1)  # all-to-all divides the four heads
            strategy = ("ring", "all_gather", "all_to_all")[i % (3 if divided <= 4 else 2)]
            microbatches = max(2 * routed, mesh.get("pipeline", 1))
            settings = {"steps": args.steps, "optimizer": "sgd", "communication": {"context": strategy}}
            settings |= {"data": DOCUMENTS} if packed else {}
            config = make_config(model, mesh, microbatches=microbatches, remat={"policy": policy}, **settings)
            yield variant, "sgd", config


def hybrid_configs(args: argparse.Namespace) -> Iterator[tuple[str, str, Config]]:
    """The same for layers with a state."""
    for i, (mixer, variant, mesh, pipeline) in enumerate(hybrid_rows()):
        if args.model and mixer + variant not in args.model:
            continue
        model, packed, policy, more = HYBRID_VARIANTS[mixer][variant]
        strategy = ("ring", "all_gather", "all_to_all")[i % (3 if mesh.get("context", 1) <= 2 else 2)]
        settings = {"steps": args.steps, "optimizer": "sgd", "communication": {"context": strategy}, **more}
        settings |= {"batch": {"sequence_length": 48}, "data": DOCUMENTS if packed else {}, "pipeline": pipeline}
        count = max(2, mesh.get("pipeline", 1))
        config = make_config(model, mesh, microbatches=count, remat={"policy": policy}, **settings)
        yield mixer + variant, settings["optimizer"], config


def encoder_configs(args: argparse.Namespace) -> Iterator[tuple[str, str, Config]]:
    """The same for models with an encoder, with pictures or with a prefix."""
    for i, (variant, mesh, pipeline) in enumerate(encoder_rows()):
        if args.model and variant not in args.model:
            continue
        model, packed, policy, more = ENCODER_VARIANTS[variant]
        strategy = "auto" if "encoder" in model else ("ring", "all_gather", "all_to_all")[i % 3]
        settings = {"steps": args.steps, "communication": {"context": strategy}, "pipeline": pipeline, **more}
        settings |= {"batch": {"global_size": 8, "sequence_length": 32}, "remat": {"policy": policy}}
        settings |= {"data": DOCUMENTS} if packed else {}
        count = max(2, 2 * mesh.get("pipeline", 1))
        settings |= {"optimizer": OPTIMIZERS["sgd"]["optimizer"] | more.get("optimizer", {})}
        settings |= {"schedule": OPTIMIZERS["sgd"]["schedule"]}
        yield variant, "sgd", make_config(model, mesh, microbatches=count, **settings)


def dynamic_configs(args: argparse.Namespace) -> Iterator[tuple[str, str, Config]]:
    """The same for groups of devices."""
    for variant, documents, mesh, pipeline in dynamic_rows():
        if args.model and variant not in args.model:
            continue
        model, policy, _ = DYNAMIC_VARIANTS[variant]
        settings = {"batch": {"global_size": 8, "sequence_length": 64}, "remat": {"policy": policy}}
        settings["data"] = DOCUMENTS | {"synthetic_documents": documents}
        settings |= {"steps": args.steps, "communication": {"context": "dynamic"}, "pipeline": pipeline}
        count = 2 * mesh.get("pipeline", 1)
        yield variant, "sgd", make_config(model, mesh, microbatches=count, optimizer="sgd", **settings)


def one_operation_configs(args: argparse.Namespace) -> Iterator[tuple[str, str, Config]]:
    """The same for stages that do one operation a tick."""
    for name, model, mesh, sections in one_operation_rows():
        if args.model and name not in args.model:
            continue
        settings = {"steps": args.steps, "microbatches": 2 * mesh["pipeline"], "optimizer": "sgd", **sections}
        config = make_config(model, mesh, **settings)
        assert backward_parts(config, dict.fromkeys(AXES, 1) | mesh, "cpu").slots, config
        yield name, "sgd", config


def first_weights(model: str, config: Config) -> dict[str, np.ndarray] | None:
    """Initial weights, if those of the seed give too even a load, or adapters that are zero."""
    if config.lora.rank is not None:
        return weights_of(config)
    if model != "uneven":
        return None
    weights = train(reference_config(config).model_copy(update={"run": config.run.model_copy(update={"steps": 1})}))
    return uneven_weights(weights.initial)


type Row = tuple[str, str, Config]  # model, optimizer, config
_kept: dict[Any, tuple[Any, Any]] = {}  # the newest reference of this process: (its run, its first weights)


def configs(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of a table."""
    return {
        "mesh": mesh_configs,
        "pipeline": pipeline_configs,
        "context": context_configs,
        "experts": expert_configs,
        "latent": latent_configs,
        "hybrid": hybrid_configs,
        "encoders": encoder_configs,
        "dynamic": dynamic_configs,
        "one_operation": one_operation_configs,
    }[args.table](args)


def judged(table: str, row: Row) -> tuple[str, list[str]]:
    """A row of the table and its problems."""
    model, optimizer, config = row
    alone = reference_config(config)
    held_to = model, optimizer, alone.batch.num_microbatches, alone.data.synthetic_documents
    if held_to not in _kept:
        weights = first_weights(model, config)
        _kept.clear()
        _kept[held_to] = train(alone, weights), weights
    reference, weights = _kept[held_to]
    difference = compare(train(config, weights), reference)
    jax.clear_caches()  # hundreds of programs, each used once
    line = table_row(table, config, optimizer, model.removesuffix(" packed"), difference)
    return line, difference.problems(gradient=GRADIENTS.get(table, GRADIENT_TOLERANCE))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Every mesh against the single device, as a markdown table.")
    parser.add_argument("--table", choices=SETTINGS, default="mesh", help="default: mesh")
    parser.add_argument(
        "--model",
        choices=[
            *MODELS,
            *EXPERT_MODELS,
            *MIXED_MODELS,
            *LATENT_VARIANTS,
            *HYBRIDS,
            *ENCODER_VARIANTS,
            *DYNAMIC_VARIANTS,
            *(name for name, *_ in one_operation_rows()),
        ],
        action="append",
        help="only this; may be repeated",
    )
    parser.add_argument("--meshes", help='only these meshes: "data=2,tensor=4;fsdp=8"')
    parser.add_argument("--microbatches", type=int, nargs="+", help="default: 1 2 4, P 2P 4P, or P, or with experts 2")
    parser.add_argument("--steps", type=int, help="default: 20 of the mesh table, else 10")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time, each in a process (default: 1)")
    parser.add_argument("--output", type=Path, help="write the table to this file too")
    args = parser.parse_args()
    args.steps = args.steps or STEPS[args.table]
    return args


def main() -> int:
    args, start = arguments(), time.perf_counter()
    lines, wrong = [introduction(args.table, args.steps)], []
    print(lines[0], flush=True)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        # Neighbours have one reference
        of_each = partial(pool.map, chunksize=4) if args.jobs > 1 else map
        for line, problems in of_each(partial(judged, args.table), configs(args)):
            lines.append(line)
            wrong += [f"- {line}: {'; '.join(problems)}"] if problems else []
            print(line, flush=True)
    count = len(lines) - 1
    verdict = f"All {count} rows agree." if not wrong else f"{len(wrong)} of {count} rows disagree:"
    lines += ["", f"**{verdict}**", *wrong]
    print("\n".join(lines[count + 1 :]))
    print(f"{time.perf_counter() - start:.0f} seconds", file=sys.stderr)
    if args.output:
        args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
