"""The planner's tables on a terminal of 80 columns."""

import contextlib
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megajax.config import load_config
from megajax.errors import ConfigError
from megajax.estimate.costs import flops_per_token
from megajax.tools.plan.__main__ import parser
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.rates import rates_of
from megajax.tools.plan.report import cells, fit, limit_line, memory_text, mesh_text, table
from megajax.tools.plan.search import explained

H200, WIDTH = rates_of("h200"), 80
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def own_mesh(path: Path) -> Candidate:
    """A config on the smallest number of GPUs that its mesh fits."""
    for gpus in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048):
        with contextlib.suppress(ConfigError):
            return explained(path, [], gpus, H200)
    raise AssertionError(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_table_fits_the_terminal_and_keeps_axes_and_figures(path):
    found = own_mesh(path)
    lines = table([cells(found, 0.9, compiled=0.95 * H200.memory_gib)], False, WIDTH)
    assert max(map(len, lines)) <= WIDTH
    text, sizes = " ".join(lines), found.plan.sizes
    for axis, size in sizes.items():
        assert size == 1 or f"{axis} {size}{'^' * (axis in found.time.between_hosts)}" in text
    assert f"{1e3 * found.time.total:,.0f}" in text and load_config(path).remat.policy in text
    assert "ms: of a step" in lines[-1]


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ({"expert": 4}, "expert 4"),
        ({"expert": 2, "tensor": 2}, "expert 2 × tensor 2, experts over expert and tensor"),
        ({"tensor": 4}, "tensor 4, experts over tensor"),
    ],
)
def test_axes_of_one_device_divide_no_experts(mesh, text):
    sizes = {"data": 1, "fsdp": 1, "expert": 1, **mesh}
    overrides = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    found = explained("mixtral_l2", [*overrides, "mesh.experts_over=[expert,tensor]", "batch.global_size=16"], 4, H200)
    assert mesh_text(found) == text


def test_a_row_has_shares_of_the_step_and_marks_of_the_memory():
    found = own_mesh(next(path for path in CONFIGS if path.stem == "llama3_8b_l16_pipeline"))
    plan, seconds = found.plan, found.time.total
    *_, speed, mfu, lost = cells(found, 0.1)
    batch, gpus = plan.config.batch, math.prod(plan.sizes.values())
    tokens = batch.global_size * batch.sequence_length / seconds / gpus
    assert speed == f"{tokens:,.0f}" and mfu == f"{tokens * flops_per_token(plan.config) / 989e12:.1%}"
    largest = sorted(found.time.losses.values(), reverse=True)[:3]
    assert [part.rsplit(" ", 1)[1] for part in lost.split(", ")] == [f"{each / seconds:.0%}" for each in largest]
    # Of 100 GiB a tenth is the margin: more than 90 is marked.
    rates = replace(H200, memory_gib=100.0)
    assert [memory_text(gib, rates, 0.1) for gib in (89.9, 90.0, 90.1, 101.0)] == ["89.9", "90.0", "90.1~", "101.0~"]
    line = "Limit: 100.0 GiB of a GPU"
    assert limit_line(rates, [("",) * 4 + ("90.0",)], 0.1) == f"{line}."
    marked = limit_line(rates, [("",) * 4 + ("90.1~*",)], 0.1)
    assert marked == f"{line}; ~: above it, or less than 10% below; * is XLA's figure, the others are estimates."


def test_long_cells_are_cut_and_wide_terminals_have_the_whole_table():
    mesh = "pipeline 16 × data 8 × expert 8, experts over expert and data, zero_bubble, 4 virtual stages"
    mesh += ", layers 2 3×4 3, FP8"
    lost = "communication over data between hosts 33%, waiting for the slowest GPU 3%, recomputation 2%"
    row = (mesh, "pipeline, data", "1024", "save_matmuls, 12 layers", "128.6~*", "123,456", "11,093", "57.7%", lost)
    lines = table([row], False, WIDTH)
    assert max(map(len, lines)) <= WIDTH
    text = " ".join(lines)
    cells_of_mesh = [lines[1][:20], *lines[2:-2]]
    kept = " ".join(each.strip() for each in cells_of_mesh).replace("^", "")
    assert kept == mesh, "no comma and no word is lost or cut"
    assert "pipeline 16^" in text and "data 8^" in text and "expert 8" in text and "FP8" in text
    assert lines[1].endswith("57.7%")
    [head, whole] = table([row], False, 320)
    assert mesh in whole and lost in whole and "between hosts" in head
    assert table([row], False) == [head, whole] and "| --- |" in table([row], True, WIDTH)[1]


def test_overrides_that_are_cut_continue_in_a_shell():
    line = "The fastest: " + " ".join(f"section.key_{n}={n}" for n in range(12))
    for width in range(40, WIDTH + 1):  # in some a line is full
        *cut, last = fit(line, width)
        assert all(each.endswith(" \\") and len(each) <= width for each in cut) and not last.endswith("\\")
        assert " ".join(each.removesuffix(" \\").strip() for each in (*cut, last)) == line
    assert fit(line, None) == [line] and len(fit("words " * 30, WIDTH)) == 3
    assert "\\" not in "".join(fit("words " * 30, WIDTH)), "a sentence is none to copy"


@pytest.mark.parametrize("text, tokens", [("15T", 15e12), ("1.5B", 1.5e9), ("20M", 2e7), ("4K", 4e3), ("15e12", 15e12)])
def test_tokens_are_given_with_a_unit_or_as_a_number(text, tokens):
    assert parser().parse_args(["run.yaml", "--tokens", text]).tokens == tokens
