"""The loss curves show what metrics.jsonl has, and leave out what is null."""

import importlib.util
import json
from pathlib import Path

import pytest

from megajax.errors import InputError

SCRIPT = Path(__file__).parents[1] / "scripts/plot_loss.py"
RECORDS = [
    {"step": 1, "loss": 4.0},
    {"step": 2, "loss": None},
    {"step": 2, "eval_loss": None},
    {"step": 3, "loss": 2.0},
    {"step": 3, "eval_loss": 2.5},
]


@pytest.fixture(scope="module")
def plot_loss():
    spec = importlib.util.spec_from_file_location("plot_loss", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return tmp_path


def test_null_is_left_out_of_curve_picture_and_sentence(plot_loss, run_dir: Path):
    assert plot_loss.read_curve(run_dir, "loss") == [(1, 4.0), (3, 2.0)]
    assert plot_loss.read_curve(run_dir, "eval_loss") == [(3, 2.5)]
    assert plot_loss.describe(run_dir, None) == f"{run_dir.name}: evaluation loss 2.500 at step 3."
    plot_loss.draw([run_dir], 5.0, run_dir / "loss.png")
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_with_experts_has_their_loads_beside_its_loss(plot_loss, run_dir: Path, monkeypatch):
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 5, "loss": 3.0, "expert_load_max": 1.5}) + "\n")
    drawn = {}
    monkeypatch.setattr(plot_loss.plt.Figure, "savefig", lambda figure, *_, **__: drawn.setdefault("figure", figure))
    plot_loss.draw([run_dir], None, run_dir / "loss.png")
    _, loads = drawn["figure"].axes
    assert loads.lines[0].get_xydata().tolist() == [[5, 1.5]]


@pytest.mark.parametrize("line", ["no json", "[1]", '{"loss": 1.0}'])
def test_a_line_that_is_no_record_is_named(plot_loss, run_dir: Path, line: str):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match="line 6 is no metrics record"):
        plot_loss.read_curve(run_dir, "loss")
