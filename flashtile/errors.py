"""What a user sees when a call can't be served: what was given, what was expected, and the way out.

Every error of flashtile is a FlashtileError, and also the built-in error that fits, so that `except ValueError` works.
"""


class FlashtileError(Exception):
    """Base of all errors that flashtile raises on purpose."""


class ShapeError(FlashtileError, ValueError):
    """A tensor has the wrong rank, size or strides."""


class DtypeError(FlashtileError, TypeError):
    """A tensor or an argument has the wrong type."""


class DeviceError(FlashtileError, ValueError):
    """Tensors are on different devices, or on one that flashtile has no kernel for."""


class ValueRangeError(FlashtileError, ValueError):
    """An argument or the contents of an index tensor are out of range."""


class UnsupportedError(FlashtileError, NotImplementedError):
    """The call is well formed, but no tier takes it; lists each refusal."""


class Unavailable(FlashtileError):
    """It can't run on this machine; the message says what is missing."""


def explain(subject, expected, got, remedy=""):
    """One sentence form for every message: subject, what was expected, what came, the way out."""
    message = f"{subject}: expected {expected}, got {got}."
    return f"{message} {remedy}" if remedy else message
