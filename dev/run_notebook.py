"""Runs docs/notebooks/first_steps.ipynb on eight virtual CPU devices and stores the outputs of its cells.

python dev/run_notebook.py
"""

import argparse
import os
import tempfile
from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).parents[1] / "docs/notebooks/first_steps.ipynb"
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def executed(notebook: nbformat.NotebookNode, directory: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in `directory`; CellExecutionError if a cell raises."""
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False)
    return client.execute(cwd=directory, env=os.environ | ENVIRONMENT | {"TMPDIR": str(directory)})


def main() -> None:
    """Write the notebook with its outputs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        notebook = executed(nbformat.read(NOTEBOOK, as_version=4), Path(directory))
    notebook.metadata["language_info"] = {"name": "python"}  # without the version of this Python
    nbformat.write(notebook, NOTEBOOK)
    print(f"wrote {NOTEBOOK}: look at its diff")


if __name__ == "__main__":
    main()
