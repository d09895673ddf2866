"""The notebook for newcomers runs from top to bottom on eight virtual devices, and what it trains gets better."""

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs/notebooks/first_steps.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def printed(notebook) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def test_notebook_is_kept_without_outputs(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)


def test_notebook_trains_on_eight_virtual_devices(notebook, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # A cell that raises makes execute() raise CellExecutionError.
    executed = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=tmp_path)
    text = printed(executed)
    assert "8 devices: pipeline 1, data 2, fsdp 2, expert 1, context 1, tensor 2" in text
    assert "model.num_head is not a config key" in text and "did you mean model.num_heads?" in text
    before, after = map(float, re.search(r"evaluation loss (\S+) -> (\S+)", text).groups())
    assert after < 0.6 * before
    assert "resumed at step 60" in text
    shown = {kind for cell in executed.cells for output in cell.get("outputs", []) for kind in output.get("data", ())}
    assert "image/png" in shown
