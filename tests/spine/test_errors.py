"""The errors, their exit codes, and the message about a missing package."""

from __future__ import annotations

import inspect

import pytest

from cbmir import errors


def test_every_error_has_a_docstring_and_an_exit_code() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert len(kinds) > 15
    for kind in kinds:
        assert issubclass(kind, errors.CbmirError)
        assert kind.__doc__
        assert kind.exit_code == (2 if issubclass(kind, errors.UserError) else 1)


def test_require_imports() -> None:
    assert errors.require("json", "all").loads("1") == 1


def test_require_names_the_command() -> None:
    with pytest.raises(errors.MissingDependencyError, match='extra "train"') as caught:
        errors.require("no_such_module_of_ours.part", "train")
    assert str(caught.value).startswith("no_such_module_of_ours is not installed")
