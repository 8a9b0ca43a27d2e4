"""Public names of a package that are imported when they are first used: they need an extra, or load slowly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from cbmir.errors import require


def lazy_imports(
    package: str, modules: Mapping[str, str], *, needs: tuple[str, str] | None = None
) -> Callable[[str], object]:
    """A module's `__getattr__` (PEP 562) that imports public names of a package when they are asked for.

    Args:
        package: `__name__` of the package.
        modules: For each public name the module that defines it.
        needs: A module and the extra that installs it, checked before any import.

    Returns:
        The function to assign to `__getattr__`. It raises AttributeError for other names, and MissingDependencyError
        where `needs` is not installed.
    """

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if needs:
            require(*needs)
        found: object = getattr(import_module(modules[name]), name)
        return found

    return find
