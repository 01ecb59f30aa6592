"""What `megalith` exports is there, says what it is, and costs nothing until it is used."""

import inspect
import subprocess
import sys

import megalith


def test_every_name_is_there_and_says_what_it_is():
    assert set(megalith.__all__) >= {
        "RunConfig",
        "train",
        "load",
        "ModelSpec",
        "parallelize",
        "Mesh",
        "Loader",
    }
    for name in megalith.__all__:
        value = getattr(megalith, name)
        assert value.__name__ == name and inspect.getdoc(value), name
        for method, function in inspect.getmembers(value, inspect.isfunction):
            own = (
                method in vars(value) and not method.startswith("_") and name != "MockDataset"
            )  # a SampleDataset
            assert not own or inspect.getdoc(function), f"{name}.{method}"


def test_importing_megalith_imports_no_torch():
    code = "import megalith, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
