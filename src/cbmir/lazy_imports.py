"""Import public names of a package on first use, since they need an extra or load slowly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from cbmir.errors import require


def lazy_imports(
    package: str, modules: Mapping[str, str], needs: tuple[str, str] | None = None
) -> Callable[[str], object]:
    """Return a package's `__getattr__` (PEP 562). `modules` maps each public name to the module that defines it.
    `needs` is a module that all of them need, and the extra that installs it."""

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if needs is not None:
            require(*needs)
        found: object = getattr(import_module(modules[name]), name)
        return found

    return find
