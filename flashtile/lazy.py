"""Modules of a package that are there, as its attributes, without an import of their own."""

from importlib import import_module


def modules(package, *names):
    """A package's __getattr__: its modules of these names, imported on first use."""

    def find(name):
        if name in names:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
