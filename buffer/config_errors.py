"""A mistake in an experiment file as one line for a stranger: the key, what was expected, what is there."""

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from pydantic_core import PydanticCustomError

LONGEST_SHOWN = 80
BAD_SETTING = "bad_setting"
KEY = re.compile(r"[\w-]+(?:\.[\w-]+)*")
WRAPPED = re.compile(r"^\w+ raised while resolving interpolation: ")


class ConfigError(ValueError):
    """A mistake in an experiment file or an override; its text is one line per mistake, fit to print."""


EXPECTED = {
    "missing": "missing; it has no default",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_parsing_size": "expected a whole number of at most 2147483647",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "string_type": "expected text",
    "string_too_short": "expected text of at least {min_length} characters",
    "tuple_type": "expected a list",
    "dict_type": "expected keys of its own below it",
    "model_type": "expected keys of its own below it",
    "model_attributes_type": "expected keys of its own below it",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "too_short": "expected at least {min_length}",
    "too_long": "expected at most {max_length}",
}
"""pydantic's types of errors, in words of our own; the rest keeps pydantic's."""


def placed(path: str | Path, overrides: Sequence[str], reason: str) -> str:
    """The line for a mistake: behind the override that made the setting, else behind the file.

    Args:
        path: The experiment file.
        overrides: `section.key=value` texts.
        reason: Begins with the setting's key.
    """
    found = KEY.match(reason)
    key = found[0] if found else ""
    made = [name for text in overrides if (name := text.partition("=")[0])]
    if any(f"{key}.".startswith(f"{name}.") for name in made):
        return f"override {reason}"
    below = [text for text in overrides if text.startswith(f"{key}.")] if key else []
    return f"{path}{' with ' if below else ''}{' '.join(below)}: {reason}"


def explain_all(
    path: str | Path, overrides: Sequence[str], errors: Sequence[Any], schema: type[BaseModel]
) -> str:
    """A line for each of pydantic's errors, but those that only follow from others.

    A list that loses a wrong entry may be called too short for it.
    """
    places = [error["loc"] for error in errors]
    lines: list[str] = []
    for error in errors:
        place = error["loc"]
        below = any(len(other) > len(place) and other[: len(place)] == place for other in places)
        if error["type"] != "too_short" or not below:
            lines.append(placed(path, overrides, explain(error, schema)))
    return "\n".join(lines)


def explain(error: Any, schema: type[BaseModel]) -> str:
    """One of pydantic's errors, behind the setting's key.

    Args:
        error: As in `ValidationError.errors()`.
        schema: What was read.
    """
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    loc = tuple(part for part in error["loc"] if part != "[key]")
    keys, siblings = _locate(loc, schema)
    if kind == BAD_SETTING:
        keys = [*_walk(loc, schema)[0], context["name"]]
        kind, given = context["kind"], context["given"]
    if kind == "extra_forbidden":
        return f"{'.'.join(keys)}: unknown key{nearest(keys[-1], siblings)}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = context["discriminator"].strip("'")
        known = ", ".join(_tags(loc, schema))
        keys, given = [*keys, tag], given.get(tag)
        reason = f"{'missing; ' if given is None else ''}expected one of {known}"
        told = given is None
    elif kind == "missing" and isinstance(loc[-1], int):
        keys, reason, told = keys[:-1], "too few entries", False
    elif kind == "literal_error":
        reason, told = f"expected {context['expected'].replace(chr(39), '')}", False
    else:
        told_by_pydantic = error["msg"].removeprefix("Value error, ")
        reason = EXPECTED[kind].format(**_bounds(context)) if kind in EXPECTED else told_by_pydantic
        # A section's own check names its values itself; the whole section's input would bury the line.
        told = kind == "missing" or "got " in reason or (kind == "value_error" and isinstance(given, dict))
    where = ".".join(keys)
    tail = "" if told else f", got {shown(given)}"
    if kind == "string_type" and isinstance(given, int | float):
        tail += "; put it in quotes"
    return f"{where}{': ' if where else ''}{reason}{tail}"


def bad_setting(name: str, kind: str, given: object, **bounds: int) -> PydanticCustomError:
    """For a section to raise that looks at all its settings before pydantic does.

    Args:
        name: The setting.
        kind: As pydantic would call the error, of `EXPECTED`.
        given: Its value.
        bounds: What it exceeds.
    """
    return PydanticCustomError(BAD_SETTING, "", {"name": name, "kind": kind, "given": given, **bounds})


def _bounds(context: dict[str, Any]) -> dict[str, Any]:
    """A bound as it was written: to pydantic that of a float field is a float."""
    numbers = {key: value for key, value in context.items() if isinstance(value, int | float)}
    return {key: int(value) if value == int(value) else value for key, value in numbers.items()}


def shown(value: Any) -> str:
    """A value as YAML would have it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def not_yaml(
    where: str, error: yaml.YAMLError | OmegaConfBaseException | UnicodeDecodeError, in_file: bool = True
) -> str:
    """What keeps a text from being read as YAML, or one of its ${…} from being filled in.

    Args:
        where: The file or the override.
        error: What its reader said.
        in_file: Whether there are lines to count.
    """
    if isinstance(error, yaml.MarkedYAMLError):
        line = f":{error.problem_mark.line + 1}" if error.problem_mark and in_file else ""
        return f"{where}{line}: not YAML: {error.problem or error.context}"
    first = WRAPPED.sub("", str(error).strip().splitlines()[0]).strip('"')
    if isinstance(error, OmegaConfBaseException):
        key = f"{error.full_key}: " if error.full_key else ""
        missing = first.startswith("Environment variable") and first.endswith("not found")
        hint = "; set it, or give a default: ${oc.env:NAME,default}" if missing else ""
        return f"{where}: {key}{first[:1].lower()}{first[1:]}{hint}"
    return f"{where}: not a text file in UTF-8: {first}"


def nearest(key: str, known: Iterable[str]) -> str:
    """What was meant, or what there is."""
    known = list(known)
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known here: {', '.join(sorted(known))}"


def _locate(loc: tuple[Any, ...], schema: type[BaseModel]) -> tuple[list[str], list[str]]:
    """The keys down to a mistake, and those that were allowed where the last of them stands.

    A place also names each union's arm on the way, by its `kind` or by a key that only that arm has.
    """
    keys, models = _walk(loc[:-1], schema)
    return [*keys, *map(str, loc[-1:])], sorted({key for model in models for key in model.model_fields})


def _walk(loc: tuple[Any, ...], schema: type[BaseModel]) -> tuple[list[str], list[Any]]:
    """The keys of a place without the arms, and the models that may stand there."""
    models: list[Any] = [schema]
    keys: list[str] = []
    for part in loc:
        having = [m for m in models if part in m.model_fields]
        below = [arm for m in having for arm in _arms(m.model_fields[part].annotation)]
        arms = [m for m in models if part == _tag(m)] or having
        if below or len(models) == 1 or not arms:
            keys.append(str(part))
            models = below or models
        else:
            models = arms
    return keys, models


def _arms(annotation: Any) -> list[Any]:
    """The models in an annotation: itself, or the arms of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arm in getattr(annotation, "__args__", ()) for m in _arms(arm)]


def _tag(model: type[BaseModel]) -> Any:
    kind = model.model_fields.get("kind")
    return getattr(kind.annotation, "__args__", (None,))[0] if kind else None


def _tags(loc: tuple[Any, ...], schema: type[BaseModel]) -> list[str]:
    """The kinds that a place may be of."""
    _, models = _walk(loc, schema)
    return [str(_tag(model)) for model in models]
