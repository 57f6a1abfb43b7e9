"""A checkpoint as files: complete or not there at all, and known to be whole by meta.json, written last."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

META = "meta.json"
DIGEST = "digest"
"""meta.json's own, of everything else in it."""
VALUE = "value"
"""The folder of the value model, in a checkpoint of a run that has one."""
EMA = "ema"
"""The folder of the averaged weights, likewise."""
Digest = tuple[int, bytes]
"""A file's length and the 16 bytes of its BLAKE2b; a length of -1 of one that could not be read."""
UNREAD: Digest = (-1, bytes(16))
LOADED = (".distcp", ".metadata", "common.pt")
"""How the names of files end that torch's loader opens."""


def of_step(root: Path, step: int) -> Path:
    """The folder of a step's checkpoint in a run's folder of them."""
    return root / f"step-{step:06d}"


def being_written(root: Path, step: int) -> Path:
    """Its name until it is complete."""
    return root / f".{of_step(root, step).name}.tmp"


def step_of(folder: Path) -> int:
    """The reverse."""
    return int(folder.name.removeprefix("step-"))


def found_in(root: Path) -> list[Path]:
    """Complete ones, oldest first; not by name, whose six digits a step may outgrow. A copy by another name
    is nobody's."""
    folders = (meta.parent for meta in root.glob(f"step-*/{META}"))
    named = (f for f in folders if f.name.removeprefix("step-").isdecimal())
    return sorted((f for f in named if f == of_step(root, step_of(f))), key=step_of)


def leftovers(root: Path) -> Iterator[Path]:
    """Those that never were."""
    return root.glob(".step-*.tmp")


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files are not what its meta.json says."""


def complete(
    temporary: Path, target: Path, facts: dict[str, Any], found: dict[str, Digest] | None = None
) -> None:
    """Sync a written folder to disk, add meta.json, and give it its name; one of that name is replaced.

    Args:
        facts: `step`, `dtype` and what else meta.json tells of the checkpoint.
        found: Of its files, where they were read already.

    Raises:
        OSError: A file could not be read.
    """
    found = digests(temporary, files_in(temporary)) if found is None else found
    if unread := [name for name, digest in found.items() if digest == UNREAD]:
        raise OSError(f"{temporary / unread[0]} cannot be read by each rank; they have to see one run_dir")
    files = {name: _told(digest) for name, digest in found.items()}
    sync(temporary)
    meta: dict[str, Any] = json.loads(json.dumps({**facts, "files": files}))
    (temporary / META).write_text(json.dumps({**meta, DIGEST: _digest_of(meta)}, indent=1))
    _sync(temporary / META)
    _sync(temporary)
    shutil.rmtree(target, ignore_errors=True)
    os.rename(temporary, target)
    _sync(target.parent)


def check(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint that the user named, once every file was compared with it.

    Raises:
        ValueError: It is no checkpoint, or it is damaged.
    """
    meta = named_meta(path)
    verify(path)
    return meta


def named_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint that the user named.

    Raises:
        ValueError: It is no checkpoint; a run's folder is told its newest.
    """
    if (path / META).is_file():
        return read_meta(path)
    inside = found_in(path) or found_in(path / "checkpoints")
    hint = f"; the newest in it is {inside[-1]}" if inside else ""
    raise ValueError(
        f"{path}: no {META} in it; expected a checkpoint such as runs/NAME/checkpoints/step-000010{hint}"
    )


def refuse_existing(target: Path) -> None:
    """
    Raises:
        ValueError: What is to be written is there already.
    """
    if target.exists():
        raise ValueError(f"{target} exists; remove it or choose another name")


def verify(path: Path, found: dict[str, Digest] | None = None) -> None:
    """Compare a checkpoint's files with its meta.json.

    Args:
        found: Of its files, where they were read already.

    Raises:
        DamagedCheckpoint: Names the first file that is missing, differs, or would be loaded unchecked.
    """
    expected = read_meta(path)["files"]
    found = digests(path, files_in(path)) if found is None else found
    for name, facts in expected.items():
        if name not in found:
            raise DamagedCheckpoint(f"{path}/{name} is missing")
        if _told(found[name]) != facts:
            raise DamagedCheckpoint(f"{path / name} is not what was written")
    for name in found:
        if name not in expected and name.endswith(LOADED):
            raise DamagedCheckpoint(f"{path / name} is not named in {META}")


def read_meta(path: Path) -> dict[str, Any]:
    """What meta.json says.

    Raises:
        DamagedCheckpoint: It cannot be read, or is not what was written.
    """
    try:
        meta = json.loads((path / META).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path / META} cannot be read: {error}") from error
    if not isinstance(meta, dict) or DIGEST not in meta:
        raise DamagedCheckpoint(
            f"{path / META} has no {DIGEST} of what it says: it is damaged, or of an older Slipstream"
        )
    if meta[DIGEST] != _digest_of(meta):
        raise DamagedCheckpoint(f"{path / META} is not what was written")
    return meta


def _digest_of(meta: dict[str, Any]) -> str:
    """Of all that it says but the digest, however it is spaced and ordered."""
    facts = {name: value for name, value in meta.items() if name != DIGEST}
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def files_in(path: Path) -> list[str]:
    """Every file but meta.json, relative, sorted."""
    return sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file() and f.name != META)


def digests(path: Path, names: Sequence[str]) -> dict[str, Digest]:
    """Of these files; the hashing runs on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(_digest, (path / name for name in names)), strict=True))


def _digest(file: Path) -> Digest:
    try:
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16))
            return os.fstat(opened.fileno()).st_size, found.digest()
    except OSError:
        return UNREAD


def _told(digest: Digest) -> dict[str, Any]:
    """As meta.json has it."""
    return {"bytes": digest[0], "blake2b": digest[1].hex()}


def sync(folder: Path) -> None:
    """Have the disk hold its files; also those that other hosts are to see."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    for path in [*files, *{file.parent for file in files}]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def disk_error(error: BaseException) -> OSError | None:
    """What the system said, where torch raised something else while it dealt with that."""
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    return error if isinstance(error, OSError) else None
