"""Functions of the user's, named `package.module:function`; one in the working directory is found too."""

import importlib
import re
from collections.abc import Callable
from functools import cache
from typing import Any

_SHAPE = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


def is_dotted(path: str) -> bool:
    """Whether it has the shape; nothing is imported."""
    return _SHAPE.fullmatch(path) is not None


def named(*names: str) -> Callable[[str], str]:
    """A check for configurations: one of the names, or a function of the user's."""
    known = f"{', '.join(names)} or your own " if names else ""

    def check(value: str) -> str:
        if value not in names and not is_dotted(value):
            raise ValueError(f"expected {known}package.module:function")
        return value

    return check


@cache
def resolve(path: str) -> Callable[..., Any]:
    """Import it.

    Raises:
        ValueError: There is no such function; the text says what was looked for and what went wrong.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name or " ")
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: cannot be imported as package.module:function: {error}") from None
    if not callable(function):
        raise ValueError(f"{path}: is a {type(function).__name__}; expected a function")
    return function
