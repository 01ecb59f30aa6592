"""What `megalith` exports is there, says what it is, and costs nothing until it is used."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

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
        assert value.__name__ == (megalith._MODULES[name].partition(":")[2] or name), name
        assert inspect.getdoc(value), name
        for method, function in inspect.getmembers(value, inspect.isfunction):
            own = (
                method in vars(value) and not method.startswith("_") and name != "MockDataset"
            )  # a SampleDataset
            assert not own or inspect.getdoc(function), f"{name}.{method}"


def test_importing_megalith_imports_no_torch():
    code = "import megalith, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_wheel_has_every_file_that_the_package_reads():
    package = Path(megalith.__file__).parent
    project = tomllib.loads((package.parent / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["megalith"]
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others == shipped


def test_the_citation_and_the_changes_name_this_version():
    root = Path(__file__).parents[1]
    assert f"\nversion: {megalith.__version__}\n" in (root / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {megalith.__version__}" in (root / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_page_of_licences_names_every_dependency_and_what_it_is_for():
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {(re.match(r"[\w.-]+", line)[0], "core install") for line in project["dependencies"]}
    for extra, lines in project["optional-dependencies"].items():
        needed |= {(re.match(r"[\w.-]+", line)[0], f"`[{extra}]`") for line in lines}
    page = (root / "docs" / "licences.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert {(name, use) for name, _, uses in rows if name != "package" for use in uses.split(", ")} == needed


def test_type_checkers_are_given_every_name_from_where_it_is():
    stub = Path(megalith.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    imports = re.findall(r"^from (\S+) import (\w+) as (\w+)$", stub, re.MULTILINE)
    aliases = {private: name for name, private in re.findall(r"^(\w+) = (_\w+)$", stub, re.MULTILINE)}
    exported = [(home, name, aliases.get(imported, imported)) for home, name, imported in imports]
    homes = {name: home.partition(":") for name, home in megalith._MODULES.items()}
    assert sorted(exported) == sorted((home, other or name, name) for name, (home, _, other) in homes.items())
