"""Selection of the cases of a parametrised test that `make test` runs; `make test-all` runs every case."""

from collections.abc import Iterable

import pytest

COLLECTED = pytest.StashKey[set[str]]()  # nodes of a session, those that `-m` leaves out included


def in_full(*values: object, id: str | None = None):
    """Return a case that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.full, id=id)


def by_default(cases: Iterable, *chosen: object) -> list:
    """Return the cases for `parametrize`, all but the chosen ones marked as full.

    Args:
        cases: the values of each case, a tuple of them if there are several parameters.
        chosen: the cases that `make test` runs.
    """
    cases = list(cases)
    missing = [case for case in chosen if case not in cases]
    assert not missing, f"no such cases: {missing}"
    return [case if case in chosen else _full(case) for case in cases]


def _full(case: object):
    return in_full(*case) if isinstance(case, tuple) else in_full(case)


def cases_that_run(request: pytest.FixtureRequest, cases: Iterable, *names: str) -> list:
    """Return the cases, by the values of these parameters, that a test of the module has in this session.

    A fixture that computes the results of several cases in one job leaves out the others.
    """
    values = []
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and all(name in parameters for name in names):
            values.append(tuple(parameters[name] for name in names))
    return [case for case in cases if (case if len(names) > 1 else (case,)) in values]
