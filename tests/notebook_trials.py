"""The notebooks of examples/notebooks, run unchanged as notebooks (`make notebooks`).

jupytext reads each source. nbclient runs its cells in a kernel of this Python, in a folder of its own. With --output
the notebooks with their results are written there as .ipynb files.

    python tests/notebook_trials.py [NOTEBOOK …] [--output FOLDER]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="write the notebooks with their results"
    )
    options = parser.parse_args()
    for source in options.notebooks or sorted(FOLDER.glob("*.py")):
        start = time.monotonic()
        notebook = jupytext.read(source)
        notebook.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        with tempfile.TemporaryDirectory() as folder:
            client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}})
            client.create_kernel_manager()
            client.km.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            client.execute()  # raises CellExecutionError with the cell and its traceback
        print(f"{time.monotonic() - start:6.1f} s  {source.name}", flush=True)
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, options.output / f"{source.stem}.ipynb")


if __name__ == "__main__":
    main()
