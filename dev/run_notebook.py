"""Runs a notebook of docs/notebooks on virtual CPU devices and stores the outputs of its cells.

python dev/run_notebook.py [pictures]
"""

import argparse
import os
import tempfile
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parents[1] / "docs/notebooks"
NOTEBOOK, PICTURES = FOLDER / "first_steps.ipynb", FOLDER / "pictures.ipynb"
DEVICES = {NOTEBOOK.stem: 8, PICTURES.stem: 1}


def executed(notebook: nbformat.NotebookNode, directory: Path, devices: int = 8) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in `directory`; CellExecutionError if a cell raises."""
    client = nbclient.NotebookClient(notebook, timeout=1800, kernel_name="python3", record_timing=False)
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    return client.execute(cwd=directory, env=os.environ | flags | {"TMPDIR": str(directory)})


def main() -> None:
    """Write the notebook with its outputs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=DEVICES, default=NOTEBOOK.stem, help="(default: %(default)s)")
    name = parser.parse_args().name
    path = FOLDER / f"{name}.ipynb"
    with tempfile.TemporaryDirectory() as directory:
        notebook = executed(nbformat.read(path, as_version=4), Path(directory), DEVICES[name])
    notebook.metadata["language_info"] = {"name": "python"}  # without the version of this Python
    nbformat.write(notebook, path)
    print(f"wrote {path}: look at its diff")


if __name__ == "__main__":
    main()
