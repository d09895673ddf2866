"""The pictures of the docs are drawn by a script from data beside them."""

import json
from pathlib import Path

import pictures
import pytest

from megajax.tools import plot


@pytest.mark.long
def test_kept_data_draw_the_picture_of_the_runs(tmp_path):
    runs = [tmp_path / "fsdp 2", tmp_path / "1 GPU"]
    for index, run in enumerate(runs):
        run.mkdir()
        lines = [{"step": s, "loss": 9.0 / s + index / 1e3, "grad_norm": 1.0, "mfu": None} for s in (1, 2, 3)]
        lines.append({"step": 3, "eval_loss": 3.1})
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"x": "step", "smooth": 0.5, "baseline": 5.0}
    (tmp_path / "images").mkdir()
    pictures.record(tmp_path / "images", "meshes", runs, settings)
    written = pictures.draw_all(tmp_path / "images")
    direct = plot.write(plot.draw({run.name: plot.read_records(run) for run in runs}, **settings), tmp_path / "direct")
    assert [path.read_bytes() for path in written[:2]] == [path.read_bytes() for path in direct]
    assert "mfu" not in (tmp_path / "images/data/meshes.json").read_text()


def test_schedules_in_the_docs_are_those_of_the_code(tmp_path):
    written = pictures.draw_all(tmp_path)
    assert {path.name for path in written} == {path.name for path in Path(pictures.IMAGES).glob("schedule_*.svg")}
    for path in written:
        assert path.read_text() == (pictures.IMAGES / path.name).read_text(), "run python dev/pictures.py"
