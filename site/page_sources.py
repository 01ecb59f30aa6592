"""Pages of the site that are not in docs/."""

PAGES = {  # in the repository → on the site
    "README.md": "readme.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security.md",
    "site/home.md": "index.md",  # its links are relative to the root of the repository
}
