"""From an experiment file, its bases and the overrides to one mapping."""

from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from buffer.config_errors import ConfigError, not_yaml


def merged(path: Path, overrides: list[str]) -> dict[str, Any]:
    """The file over its base, the overrides over both, every ${…} filled in.

    Raises:
        ConfigError: One of them cannot be read.
    """
    try:
        layers = [_read(path, file) for file in _chain(path)] + [_parsed(overrides)]
        resolved: Any = OmegaConf.to_container(OmegaConf.create(reduce(_over, layers)), resolve=True)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except OmegaConfBaseException as error:
        raise ConfigError(not_yaml(str(path), error)) from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # such as a number of a thousand digits
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    return {str(k): v for k, v in resolved.items() if k != "base"}


def _parsed(overrides: list[str]) -> dict[str, Any]:
    """What the overrides say, as one mapping."""
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"override {text!r}: expected section.key=value")
        if key.split(".")[0] == "base":
            raise ConfigError(f"override {text!r}: only the file itself can name its base")
        try:
            OmegaConf.from_dotlist([text])
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(not_yaml(f"override {text!r}", error, in_file=False)) from None
    try:
        found: Any = OmegaConf.to_container(OmegaConf.from_dotlist(overrides))
    except OmegaConfBaseException as error:
        raise ConfigError(not_yaml(f"overrides {' '.join(overrides)}", error, in_file=False)) from None
    return found


def _read(path: Path, file: Path) -> dict[str, Any]:
    """One file as it stands; `path` is the one that was asked for."""
    try:
        found: Any = OmegaConf.to_container(OmegaConf.load(file))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(not_yaml(str(file), error)) from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a mapping of sections, found a {type(found).__name__}")
    return found


def _over(lower: Any, upper: Any) -> Any:
    """Mappings are merged, anything else is replaced; so is a mapping whose `kind` changes, because the keys
    of one kind mean nothing to another, and one that an empty mapping is put over."""
    if not isinstance(lower, dict) or not isinstance(upper, dict):
        return upper
    kinds = [layer["kind"] for layer in (lower, upper) if isinstance(layer.get("kind"), str)]
    if len(set(kinds)) > 1:
        return upper
    return {
        **lower,
        **{key: _over(lower[key], v) if key in lower and v != {} else v for key, v in upper.items()},
    }


def _chain(path: Path) -> list[Path]:
    """The files to merge, base first.

    Raises:
        ConfigError: One is missing, is not YAML, or the bases are a ring.
    """
    chain = [path]
    while True:
        base = "" if chain[0] == path else f"base: {chain[0]}: "
        if chain[0].exists() and not chain[0].is_file() and not chain[0].is_dir():
            raise ConfigError(f"{path}: {base}expected a file; a pipe or a device cannot be read twice")
        try:
            raw = yaml.safe_load(chain[0].read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(not_yaml(str(chain[0]), error)) from None
        except OSError as error:
            reason = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror).lower()
            raise ConfigError(f"{path}: {base}{reason}") from None
        base = raw.get("base") if isinstance(raw, dict) else None
        if base is None:
            return chain
        parent = chain[0].parent / str(base)
        if parent in chain:
            raise ConfigError(f"{path}: base: {parent} includes itself")
        chain.insert(0, parent)
