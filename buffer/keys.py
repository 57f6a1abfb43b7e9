"""CURVE keys: who may speak to whom, how the keys lie in a folder, and how a socket gets them.

Each role has one key pair, which all its processes share. What is public of all six stands in one file, so a
host needs that file and the secret of its own role, and nothing else of the folder. A server admits the keys
of the roles that have business with it, by name; ZeroMQ asks it for each connection, in this process
(rfc.zeromq.org/spec/26 for CURVE, /spec/27 for the question).
"""

import json
import os
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

ROLES = ("buffer", "learner", "rollout", "scorer", "reference", "value")
ADMITTED: Mapping[str, tuple[str, ...]] = {
    "buffer": ("learner", "rollout", "scorer", "reference", "value"),
    "learner": ("rollout",),
    "scorer": ("rollout",),
    "reference": ("learner",),
    "value": ("learner",),
}
"""Server → the roles whose keys it admits."""

PUBLIC = "public.json"
LONGEST_FILE = 4096
OTHERS = "belongs to another user, who may change it; `chown` it to the one who runs this, or to root"
KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""Z85, as ZeroMQ writes 32 bytes (rfc.zeromq.org/spec/32)."""
DOMAIN = b"slipstream"
GATE = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks whether a key is admitted; the name is its own."""


class KeysError(ValueError):
    """The keys cannot be made or used; the text names the file, never what is in it."""


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client shows to one server, and by which it knows that server."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes
    """The server's public key."""

    def show(self, socket: Any) -> None:
        """Before `connect`."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)


@dataclass(frozen=True, slots=True)
class ServerKeys:
    secret: bytes = field(repr=False)
    admitted: Mapping[bytes, str]
    """A client's public key, as its 32 bytes → its role."""

    def guard(self, socket: Any) -> None:
        """Before `bind`: nobody gets in whom `verdict`, asked at `GATE`, did not admit."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        # Without this, a gate that is not there would let in everybody who knows our public key.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def verdict(self, question: Sequence[bytes]) -> list[bytes]:
        """ZeroMQ's question whether a connection may be, answered; the peer's messages then bear its role.

        Args:
            question: Version, id, domain, address, identity, mechanism and the client's public key; with
                fewer frames the answer is a no.
        """
        whole = [*question, *[b""] * (6 - len(question))]
        version, request_id, domain, _, _, mechanism, *credentials = whole
        known = (version, domain, mechanism) == (b"1.0", DOMAIN, b"CURVE") and len(credentials) == 1
        role = self.admitted.get(credentials[0]) if known else None
        if role is None:
            return [b"1.0", request_id, b"400", b"not admitted", b"", b""]
        return [b"1.0", request_id, b"200", b"admitted", role.encode(), b""]


def server_keys(folder: str | None, role: str) -> ServerKeys | None:
    """What the server of a role binds with; None without a folder.

    Raises:
        KeysError: The folder lacks something, others may read its secret, or it is of two sets.
    """
    if folder is None:
        return None
    secret, public = _read(Path(folder), role)
    return ServerKeys(secret, {z85.decode(public[client]): client for client in ADMITTED[role]})


def client_keys(folder: str | None, role: str, server: str) -> ClientKeys | None:
    """What a role shows to a server's role; None without a folder. Raises as `server_keys`."""
    if folder is None:
        return None
    secret, public = _read(Path(folder), role)
    return ClientKeys(public[role], secret, public[server])


def check_keys(folder: str | None, roles: Iterable[str]) -> None:
    """Raises as `server_keys` where a role's keys cannot be used."""
    for role in roles if folder is not None else ():
        _read(Path(folder or ""), role)


def make_keys(folder: Path) -> None:
    """Make a key pair for every role: `public.json`, and `ROLE.secret` that only its owner can read.

    Raises:
        KeysError: There is something in the folder already, or this ZeroMQ has no CURVE.
    """
    if not zmq.has("curve"):
        raise KeysError("this build of ZeroMQ has no CURVE; install pyzmq from PyPI")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise KeysError(f"{folder}: is there already; keys are never replaced, name another folder")
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    except OSError as error:  # which names the temporary folder
        raise KeysError(f"{folder}: cannot be made: {error.strerror}") from None
    try:
        pairs = {role: zmq.curve_keypair() for role in ROLES}
        for role, (_, secret) in pairs.items():
            _write(partial / f"{role}.secret", secret.decode() + "\n", 0o600)
        public = {role: public.decode() for role, (public, _) in pairs.items()}
        _write(partial / PUBLIC, json.dumps(public, indent=1) + "\n", 0o644)
        partial.chmod(0o700)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(path: Path, text: str, mode: int) -> None:
    """A new file of exactly this mode, whatever the umask."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        os.fchmod(handle, mode)
        file.write(text)


def _read(folder: Path, role: str) -> tuple[bytes, dict[str, bytes]]:
    """A role's secret, and every role's public key."""
    _is_ours(folder)
    public = _public(folder / PUBLIC)
    path = folder / f"{role}.secret"
    secret = _key(path, _text(path, 0o077, "others may read it; `chmod 600` it").strip())
    if zmq.curve_public(secret) != public[role]:
        raise KeysError(f"{path}: not of the same set as {PUBLIC} beside it; copy both from one folder")
    return secret, public


def _is_ours(folder: Path) -> None:
    """Whoever may write in a folder may replace what is in it, whatever its files' modes; one with the sticky
    bit, as Kubernetes mounts secrets, lets nobody do so but the files' owners."""
    try:
        about = folder.stat()
    except OSError:
        return  # what is read in it tells why
    if about.st_uid not in (os.geteuid(), 0):
        raise KeysError(f"{folder}: {OTHERS}")
    if about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX:
        raise KeysError(f"{folder}: others may write in it; `chmod 700` it")


def _public(path: Path) -> dict[str, bytes]:
    text = _text(path, 0o022, "others may write it; `chmod 644` it")
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise KeysError(f"{path}: not JSON") from None
    lacking = [role for role in ROLES if isinstance(value, dict) and role not in value]
    if lacking and len(lacking) < len(ROLES):
        raise KeysError(
            f"{path}: has no key of the role {', '.join(lacking)}, which an older Slipstream did not know; "
            "make a new folder with `slipstream keys`, bring it to every host and start all services again"
        )
    if not isinstance(value, dict) or set(value) != set(ROLES):
        raise KeysError(f"{path}: expected one public key for each of {', '.join(ROLES)}")
    keys = {role: _key(path, value[role]) for role in ROLES}
    if len(set(keys.values())) < len(keys):
        raise KeysError(f"{path}: two roles have the same key")
    return keys


def _key(path: Path, value: object) -> bytes:
    """A key in Z85 that stands for 32 bytes."""
    if isinstance(value, str) and KEY.fullmatch(value):
        try:
            if len(z85.decode(value)) == 32:
                return value.encode()
        except (struct.error, OverflowError):
            pass  # five characters that stand for more than four bytes hold
    raise KeysError(f"{path}: expected a key of 40 characters")


def _text(path: Path, forbidden: int, why: str) -> str:
    """A small file's text, whose mode has none of the forbidden bits."""
    try:
        # Not to wait for a writer, should it be a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise KeysError(
            f"{path}: {error.strerror}; `slipstream keys` makes a folder of keys, and each host needs "
            f"{PUBLIC} and its role's secret"
        ) from None
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size > LONGEST_FILE:
            raise KeysError(f"{path}: not a file of keys")
        if about.st_uid not in (os.geteuid(), 0):
            raise KeysError(f"{path}: {OTHERS}")
        if stat.S_IMODE(about.st_mode) & forbidden:
            raise KeysError(f"{path}: {why}")
        raw = file.read(LONGEST_FILE)
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError:
        raise KeysError(f"{path}: not a file of keys") from None
