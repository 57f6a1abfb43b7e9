"""Functions of the user's, named `package.module:function`; one in the working directory is found too."""

import ast
import difflib
import importlib
import importlib.util
import os
import re
import symtable
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

RAISED = (Exception, SystemExit)
"""What a user's function may: `exit` in one must not end its caller as though all were well."""
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


def fault(path: str, is_async: bool = False) -> str | None:
    """Why it can be no function, as far as can be told without running its module; None if nothing is wrong.

    Args:
        is_async: Whether it must be `async def`.
    """
    module, _, name = path.partition(":")
    here = os.getcwd()
    sys.path.append(here)  # services are started there with `python -m`, which looks there first
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError) as error:
        return f"no module {module}: {error}"
    finally:
        sys.path.remove(here)
    if spec is None:
        return f"no module {module}; expected one in {here} or an installed one"
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        source = Path(spec.origin).read_text(encoding="utf-8")
        return _missing(spec.origin, source, name, is_async)
    except (SyntaxError, ValueError, OSError) as error:
        return f"{spec.origin}: {error}"


def _missing(file: str, source: str, name: str, is_async: bool) -> str | None:
    """Why a module's top level does not bind the name to such a function."""
    symbols = symtable.symtable(source, file, "exec").get_symbols()
    bound = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported() or s.is_namespace()}
    body = ast.parse(source).body
    if name not in bound:
        if any(a.name == "*" for n in body if isinstance(n, ast.ImportFrom) for a in n.names):
            return None
        close = difflib.get_close_matches(name, bound, n=1, cutoff=0.5)
        return f"no function {name} in {file}" + (f"; did you mean {close[0]}?" if close else "")
    plain = next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    if is_async and plain is not None:
        return f"{file}:{plain.lineno}: {name} is not async; expected `async def {name}`"
    return None


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
    except RAISED as error:  # a user's module may raise anything
        told = f"{type(error).__name__}: {error}{place(error)}"
        raise ValueError(f"{path}: cannot be imported as package.module:function: {told}") from error
    if not callable(function):
        raise ValueError(f"{path}: is a {type(function).__name__}; expected a function")
    return function


def place(error: BaseException) -> str:
    """Where such a function raised it, as far as it was in Python."""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({raised.filename}:{raised.lineno})"
