"""Every notebook runs from top to bottom, in a kernel of this interpreter, and is committed without outputs."""

import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 200


class ThisInterpreter(AsyncKernelManager):
    """Starts a kernel of our own Python. An installed kernel named python3 may belong to another one."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], display_name="this")


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_notebook_runs(path, tmp_path, monkeypatch):
    """The notebook's own assertions are the test; it must leave nothing beside itself."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    work = tmp_path / "work"
    work.mkdir()
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_manager_class=ThisInterpreter,
        timeout=CELL_SECONDS,
        resources={"metadata": {"path": str(work)}},
    )
    client.execute()
    assert not list(work.iterdir())
    pictures = [out for cell in notebook.cells for out in cell.get("outputs", ()) if "image/png" in out.get("data", {})]
    assert pictures, "no plot was drawn"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stripped(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
