"""The notebook for newcomers runs from top to bottom on eight virtual devices; outputs of all are stored with them."""

import json
import re

import nbformat
import pytest
import run_notebook

STEPS = 40  # enough for the loss to fall; the stored outputs are of all steps
# Before the first cell: warn of flags that come too late as on GPUs, and make an error of it.
STRICT = """
import warnings
from megajax import runtime
runtime._on_gpu = lambda: True
warnings.filterwarnings("error", message="jax started before megajax could set")
"""


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(run_notebook.NOTEBOOK, as_version=4)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook) -> str:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def kinds(notebook) -> set[str]:
    return {kind for cell in code_cells(notebook) for output in cell.outputs for kind in output.get("data", ())}


def test_outputs_are_stored_and_hold_nothing_of_the_machine(notebook):
    text = printed(notebook)
    assert "8 devices: pipeline 1, data 2, fsdp 2, expert 1, context 1, tensor 2" in text
    assert "3 plus 4 is 7.\n" in text and "9 plus 8 is 17.\n" in text
    assert {"image/png", "text/html"} <= kinds(notebook)
    _check_outputs(notebook)


def test_the_captioner_has_learned_to_write_new_sentences():
    notebook = nbformat.read(run_notebook.PICTURES, as_version=4)
    (right,) = re.search(r"(\d+) of 200 sentences are exactly right", printed(notebook)).groups()
    assert int(right) >= 190
    _check_outputs(notebook)


def _check_outputs(notebook) -> None:
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert all(output.get("name", "stdout") == "stdout" for output in outputs), "warnings"
    for output in outputs:
        output.get("data", {}).pop("image/png", None)
    assert not re.search(r"/(tmp|home|root|work|Users|var)/|\.venv", json.dumps(outputs))


@pytest.mark.long
def test_notebook_trains_on_eight_virtual_devices(notebook, tmp_path):
    (training,) = [cell for cell in notebook.cells if "steps: 300" in cell.source]
    training.source = training.source.replace("steps: 300", f"steps: {STEPS}").replace("num_layers: 2", "num_layers: 1")
    assert f"steps: {STEPS}" in training.source and "num_layers: 1" in training.source
    first = code_cells(notebook)[0]
    first.source += STRICT
    done = run_notebook.executed(notebook, tmp_path)  # raises what a cell raises
    text = printed(done)
    assert "8 devices: pipeline 1, data 2, fsdp 2, expert 1, context 1, tensor 2" in text
    assert "model.num_head is not a config key" in text and "did you mean model.num_heads?" in text
    before, after = map(float, re.search(r"evaluation loss (\S+) -> (\S+)", text).groups())
    assert after < 0.2 * before
    assert f"resumed at step {STEPS}" in text and "3 plus 4 is " in text
    assert "12 arrays" in text
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("megajax-")]
