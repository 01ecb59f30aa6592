"""Write docs/licences.md: the licences of Megalith's dependencies, from the metadata of the installed packages.

    python site/licences.py > docs/licences.md     in an environment with every extra
    python site/licences.py EXTRA                  compare the page's rows for an extra with the installed packages

The extra `none` is the package without extras.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageMetadata, metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
HEAD = """# Third-party licences

Megalith is under the [Apache License 2.0](../LICENSE). Installing it with `pip` also installs the packages in this
table. The licence is the one that the package's metadata states. Packages for an extra are installed only by `pip
install 'megalith[EXTRA]'`. Dependencies of these packages are not listed. The pages of the documentation site also
contain scripts of Material for MkDocs, Mermaid and iframe-worker, all under MIT. `python site/licences.py` writes
this page, and `make test-install` compares it with the installed packages.

| package | licence | needed by |
|---|---|---|
"""
# Short names of licences that older metadata spells out.
SHORT = {
    "Apache Software License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "MIT License": "MIT",
    "BSD License": "BSD",
    "Python Software Foundation License": "PSF-2.0",
}


def needed() -> dict[str, list[str]]:
    """Return the direct dependencies, each with the extras that need it; `none` is the package without extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"none": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, list[str]] = {}
    for extra, requirements in groups.items():
        for requirement in requirements:
            found.setdefault(re.match(r"[\w.-]+", requirement)[0], []).append(extra)
    return found


def licence_of(package: PackageMetadata) -> str:
    """Return the licence expression, or in older metadata the classifiers or the first line of the licence."""
    if expression := package.get("License-Expression"):
        return expression
    classifiers = [line.rpartition(" :: ")[2] for line in package.get_all("Classifier", [])
                   if line.startswith("License :: ") and not line.endswith((" Approved", " approved"))]  # fmt: skip
    names = classifiers or [(package.get("License") or "not told").strip().splitlines()[0].strip()]
    return ", ".join(SHORT.get(name, name) for name in names)


def line_of(name: str, extras: list[str]) -> str:
    uses = ", ".join("core install" if extra == "none" else f"`[{extra}]`" for extra in extras)
    return f"| {name} | {licence_of(metadata(name))} | {uses} |\n"


def main(extra: str | None = None) -> None:
    lines = {name: line_of(name, extras) for name, extras in needed().items() if extra in (None, *extras)}
    if extra is None:
        sys.stdout.write(HEAD + "".join(lines.values()))
        return
    page = PAGE.read_text(encoding="utf-8")
    if other := [line for line in lines.values() if line not in page]:
        raise SystemExit(
            f"docs/licences.md lacks these lines:\n{''.join(other)}run python site/licences.py > docs/licences.md"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
