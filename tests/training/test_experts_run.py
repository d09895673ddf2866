"""A run with experts: its logs, parameters and FLOPs."""

import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jax
import numpy as np
import plain_model
import pytest
from jax.sharding import PartitionSpec as P
from trainers import StoppedTrainer

from megajax.config import AXES, load_config
from megajax.config.checks import check_mesh
from megajax.console import STOPPED
from megajax.data.loader import make_loader
from megajax.estimate.costs import active_parameter_count, flops_per_token, parameter_count
from megajax.estimate.memory import estimate_memory
from megajax.kernel_choice import HOPPER
from megajax.model import Transformer, parameters
from megajax.sharding import place, place_all
from megajax.step_plan import StepPlan
from megajax.svg import text_width
from megajax.tools.verify.runs import canonical
from megajax.training.expert_load import MOST_COLUMNS, NAME, load_map
from megajax.training.logs import draw_load_map
from megajax.training.loop import Trainer
from megajax.training.step_log import expert_load, values_of

ROOT = Path(__file__).parents[2]
ROUNDED = 5.1e-5  # logged with four decimals


def test_load_is_the_largest_count_over_the_mean_and_the_fraction_without_a_token():
    values = expert_load(np.array([[2, 2, 2, 2], [8, 0, 0, 0]]))
    assert values["expert_load"] == [1.0, 4.0] and values["idle_experts"] == [0.0, 0.75]
    assert values["expert_load_max"] == 4.0 and values["idle_experts_max"] == 0.75
    assert not any(name.startswith("dropped") for name in values)
    counts, dropped = np.array([[8, 0, 0, 0], [4, 4, 0, 0], [2, 2, 2, 2]]), np.array([4, 2, 0])
    values = values_of({"expert_counts": counts, "dropped_tokens": dropped, "skipped": np.array(0)})
    assert values["dropped_tokens"] == [0.5, 0.25, 0.0]
    assert values["dropped_tokens_max"] == 0.5 and values["dropped_tokens_mean"] == 0.25
    assert values["expert_load_max"] == 4.0 and values["idle_experts_max"] == 0.75  # of the first layer


@pytest.mark.smoke
def test_a_token_meets_the_experts_that_it_is_sent_to():
    config = load_config(ROOT / "configs/mixtral_l2.yaml")
    attention, expert, head = 2 * 4096 * 128 * (32 + 8), 3 * 4096 * 14336, 4096 * 32000
    layer = attention + 2 * expert + 4096 * 8
    assert flops_per_token(config) == 6 * (2 * layer + head) + 6 * 2 * 4096 * 32 * 128
    model = Transformer(config.model)
    assert parameter_count(model) - active_parameter_count(model) == 2 * 6 * expert


def test_experts_are_stored_over_their_axis_and_not_gathered_over_it():
    config = load_config(ROOT / "configs/mixtral_l2.yaml", ["mesh={expert: 4, data: 2}", "batch.global_size=8"])
    sizes = check_mesh(config, 8)
    placements = place_all(parameters(Transformer(config.model)), sizes)
    up, query = (placements[f"blocks.moe.{name}"] for name in ("moe.up", "attention.query"))
    assert up.spec == P("pipeline", "expert", ("fsdp", "context", "data"), "tensor")
    assert query.spec[1] == ("fsdp", "expert", "context", "data")
    # Of one layer: most is needed when the first goes backward, and by then the second's are free
    experts, attention = 3 * 8 * 4096 * 14336, 2 * 4096 * 128 * 40
    memory = estimate_memory(StepPlan.make(config, sizes, HOPPER))
    assert memory.weights == pytest.approx(2 * (experts / 4 + attention), rel=1e-3)


@pytest.mark.parametrize(
    ("over", "gate"),
    [
        (("expert", "context", "tensor"), (("expert", "context", "tensor"), ("fsdp", "data"), None)),
        (("fsdp", "expert"), (("fsdp", "expert"), ("context", "data"), "tensor")),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_experts_may_lie_over_several_axes_and_are_stored_over_the_others(over, gate):
    shape, axes = (2, 16, 64, 96), ("layers", "experts", "embed", "expert_mlp")
    sizes = dict(zip(AXES, (1, 2, 2, 2, 2, 2), strict=True))
    placement = place(shape, axes, sizes, experts_over=over)
    assert placement.spec == P("pipeline", *gate)
    assert set(placement.replicated_axes) == set()


@pytest.mark.long
def test_a_run_logs_and_draws_its_routers_losses_and_loads_also_after_a_stop(tmp_path, capsys):
    config = load_config(
        ROOT / "configs/quickstart.yaml",
        [
            f"run={{dir: {tmp_path}/run, steps: 2, log_interval: 1, eval_steps: 1, eval_interval: 0}}",
            "model={num_layers: 3, hidden_size: 16, num_heads: 2, num_kv_heads: 2, ffn_hidden_size: 16}",
            "model.num_experts=4",
            "model.first_dense_layers=1",
            "model.router={global_loss: 0.01, z_loss: 0.001, expert_bias: true, capacity_factor: 0.75}",
            "data={kind: synthetic, train: null, valid: null, split: null, tokenizer: null}",
            "batch={global_size: 4, num_microbatches: 1, sequence_length: 16}",
            "mesh={expert: 2}",
            "precision.compute=float32",
        ],
    )

    def run(stop: bool) -> tuple[int, list[dict]]:
        status = (StoppedTrainer if stop else Trainer)(config, jax.devices()[:2]).run()
        lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        return status, [line for line in lines if "checkpoint_step" not in line or "loss" in line]

    first = plain_step(config)
    status, lines = run(stop=True)
    assert status == STOPPED and drawn(tmp_path / "run") == loads(lines) and len(lines) == 1
    status, lines = run(stop=False)
    assert status == 0 and drawn(tmp_path / "run") == loads(lines)
    logged = [line for line in lines if "loss" in line]
    assert len(logged) == 2 and any("eval_loss" in line for line in lines)
    for name in ("loss", "aux_loss", "router_z_loss", "router_entropy"):
        assert logged[0][name] == pytest.approx(first[name], rel=2e-6), name
    counts, dropped = first["expert_counts"], first["dropped_tokens"] / (2 * 4 * 16)
    assert (dropped > 0).all()
    assert logged[0]["expert_load"] == pytest.approx(counts.max(1) / counts.mean(1), abs=ROUNDED)
    assert logged[0]["idle_experts"] == [pytest.approx((row == 0).mean()) for row in counts]
    assert logged[0]["dropped_tokens"] == pytest.approx(dropped, abs=ROUNDED)
    assert logged[0]["dropped_tokens_mean"] == pytest.approx(dropped.mean())
    for name in ("expert_load", "idle_experts", "dropped_tokens"):
        assert all(line[f"{name}_max"] == pytest.approx(max(line[name]), abs=ROUNDED) for line in logged)
    assert "2 of 4 experts in 2 of 3 layers, capacity factor 0.75" in capsys.readouterr().out


def plain_step(config) -> dict:
    """What the plain model logs in the first step of a run."""
    elsewhere = config.model_copy(update={"run": config.run.model_copy(update={"dir": f"{config.run.dir}0"})})
    trainer = Trainer(elsewhere, jax.devices()[:2])
    fields = next(make_loader(config, split="train", rows=np.arange(config.batch.global_size)))
    weights = canonical(trainer.program, trainer.state.params)
    trainer.close()
    return plain_model.step(
        np, config.model.model_dump(), weights, {n: a[None] for n, a in fields.items()}, plain_model.NoDraws()
    )[1]


def drawn(run_dir: Path) -> list[str]:
    """What the cells of the run's heat map say."""
    picture = ElementTree.parse(run_dir / NAME)
    return [cell[0].text or "" for cell in picture.iter("{http://www.w3.org/2000/svg}rect") if cell.get("class")]


def loads(lines: list[dict]) -> list[str]:
    """The same for the logs of layers 1 and 2; layer 0 is dense."""
    cells = [(line["step"], *cell) for line in lines for cell in enumerate(line.get("expert_load", ()), start=1)]
    return [f"layer {layer}, step {step}: {load:.4g}" for step, layer, load in cells]


def test_a_long_run_is_drawn_in_as_many_columns_as_fit():
    steps, layers = np.arange(10, 10 * 3 * MOST_COLUMNS + 1, 10), 94
    values = np.ones((len(steps), layers))
    values[:, 3] = 2 + np.arange(len(steps)) % 3
    picture = ElementTree.fromstring(load_map(steps.tolist(), values, range(layers)))
    cells = [cell for cell in picture.iter("{http://www.w3.org/2000/svg}rect") if cell.get("class")]
    assert len(cells) == MOST_COLUMNS * layers
    assert [cell[0].text for cell in cells[2:4]] == ["layer 2, steps 10 to 30: 1", "layer 3, steps 10 to 30: 3"]
    assert "layer 0, step 5: 1<" in load_map([5], values[:1, :1], [0])
    assert float(picture.get("height", 0)) > float(cells[93].get("y", 0)) > float(cells[92].get("y", 0))
    assert cells[2].get("fill") == cells[4].get("fill") != cells[3].get("fill")
    # Columns stand side by side inside the picture; each second row has its name, beside its middle.
    sides = [tuple(float(cell.get(name, 0)) for name in ("x", "width")) for cell in cells[::layers]]
    assert all(x + width == after for (x, width), (after, _) in itertools.pairwise(sides))
    assert float(picture.get("width", 0)) > sum(sides[-1])
    names = [text for text in picture.iter("{http://www.w3.org/2000/svg}text") if "layer " in (text.text or "")[:6]]
    assert [name.text for name in names] == [f"layer {layer}" for layer in range(0, layers, 2)]
    for name, cell in zip(names, cells[:layers:2], strict=True):
        below_top = float(name.get("y", 0)) - float(cell.get("y", 0))
        assert float(name.get("x", 0)) < sides[0][0] and 4 < below_top < 4 + float(cell.get("height", 0))
    # The legend: nine boxes side by side from 1 to the largest load, between the two numbers.
    _, *legend = (box for box in picture.iter("{http://www.w3.org/2000/svg}rect") if not box.get("class"))
    places = [(float(box.get("x", 0)), float(box.get("width", 0))) for box in legend]
    assert len(places) == 9 and all(x + width == after for (x, width), (after, _) in itertools.pairwise(places))
    assert legend[0].get("fill") == cells[2].get("fill")
    texts = {text.text: float(text.get("x", 0)) for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    # The title, the note and the legend stand below each other.
    heights = [float(text.get("y", 0)) for text in picture.iter("{http://www.w3.org/2000/svg}text")][:3]
    assert "Expert load by layer and step" in texts and heights == sorted(heights)
    assert texts["1"] < places[0][0] and places[-1][0] + places[-1][1] < texts["4"]
    # Below the columns as many of their first steps as do not touch each other.
    named = [(x, text_width(name) / 2) for name, x in texts.items() if name.isdecimal() and int(name) % 10 == 0]
    assert len(named) > 9 and all(x + half < next - more for (x, half), (next, more) in itertools.pairwise(named))
    middles = {str(step): x + width / 2 for step, (x, width) in zip(steps[::3], sides, strict=True)}
    assert all(texts[name] == middles[name] for name in texts if name in middles) and {"10", "40"} & {*texts}


def test_small_differences_of_load_stay_light():
    fills = []
    for largest in (1.5, 2.0):  # the darkest colour is 2 in both
        picture = ElementTree.fromstring(load_map([1, 2], np.array([[1.5], [largest]]), [0]))
        fills.append([box.get("fill") for box in picture.iter("{http://www.w3.org/2000/svg}rect") if box.get("class")])
    assert fills[0][0] == fills[0][1] == fills[1][0] != fills[1][1]


def test_the_darkest_shade_and_the_end_of_the_legend_are_the_largest_load_of_all_steps_and_layers():
    small = np.full((3, 2), 1.5)
    for step, layer in np.ndindex(small.shape):
        loads = small.copy()
        loads[step, layer] = 7.25
        picture = ElementTree.fromstring(load_map([1, 2, 3], loads, [0, 1]))
        boxes = [*picture.iter("{http://www.w3.org/2000/svg}rect")]
        cells = [box.get("fill") for box in boxes if box.get("class")]
        darkest = [box.get("fill") for box in boxes if not box.get("class")][-1]
        assert [index for index, fill in enumerate(cells) if fill == darkest] == [2 * step + layer]
        assert "7.25" in [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]


def test_a_run_whose_picture_cannot_be_drawn_is_a_run_all_the_same(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "expert_load": [1.0]}\n')
    (tmp_path / "expert_load.svg").mkdir()
    draw_load_map(tmp_path, (0,))
    assert "megajax: warning: the heat map of expert load was not drawn: " in capsys.readouterr().out
    assert [*tmp_path.glob("*svg*")] == [tmp_path / "expert_load.svg"]
