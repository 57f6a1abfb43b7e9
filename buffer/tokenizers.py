"""The tokenizer of a model folder."""

from pathlib import Path
from typing import Any

from buffer.experiment import ConfigError


def load_tokenizer(key: str, path: str) -> Any:
    """
    Args:
        key: The setting that names the folder, for messages.
        path: The folder.

    Raises:
        ConfigError: There is none, or one that cannot be read.
    """
    from transformers import AutoTokenizer

    if not (Path(path) / "config.json").exists():
        raise ConfigError(f"{key}: {path} has no config.json; expected a Hugging Face model folder")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # of files that are none transformers may raise anything
        told = next(iter(str(error).splitlines()), "")
        raise ConfigError(f"{key}: {path}: no tokenizer: {type(error).__name__}: {told}") from error
