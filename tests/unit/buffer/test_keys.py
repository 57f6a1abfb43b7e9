"""Keys as files: who can read them, and what is refused before any socket is opened."""

import json
import os
import stat
from pathlib import Path

import pytest
import zmq

from buffer.keys import PUBLIC, ROLES, KeysError, client_keys, make_keys, server_keys


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_modes_are_the_same_under_every_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        make_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    folder = tmp_path / "keys"
    assert mode(folder) == 0o700
    assert {p.name: mode(p) for p in folder.iterdir()} == {PUBLIC: 0o644} | {
        f"{role}.secret": 0o600 for role in ROLES
    }
    assert [p.name for p in tmp_path.iterdir()] == ["keys"], "nothing half-made beside it"


def test_a_host_needs_its_own_secret_and_the_public_file_only(folder, tmp_path):
    host = tmp_path / "host"
    host.mkdir()
    for name in (PUBLIC, "rollout.secret"):
        (host / name).write_bytes((folder / name).read_bytes())
        (host / name).chmod(0o600)
    keys = client_keys(str(host), "rollout", "buffer")
    assert keys == client_keys(str(folder), "rollout", "buffer")
    assert keys.server == zmq.curve_public((folder / "buffer.secret").read_text().strip().encode())
    with pytest.raises(KeysError, match=r"learner\.secret: No such file .* `slipstream keys`"):
        client_keys(str(host), "learner", "buffer")


def test_a_server_admits_the_roles_that_have_business_with_it(folder):
    assert sorted(server_keys(str(folder), "buffer").admitted.values()) == [
        *("learner", "reference", "rollout", "scorer", "value")
    ]
    for server in ("learner", "scorer"):
        assert list(server_keys(str(folder), server).admitted.values()) == ["rollout"]
    for server in ("reference", "value"):
        assert list(server_keys(str(folder), server).admitted.values()) == ["learner"]


def test_without_a_folder_there_are_no_keys():
    assert server_keys(None, "buffer") is None
    assert client_keys(None, "rollout", "buffer") is None


def test_where_no_keys_can_be_made_the_folder_is_named_that_was_asked_for():
    with pytest.raises(KeysError, match=r"^/proc/x: cannot be made: No such file or directory$"):
        make_keys(Path("/proc/x"))


def test_keys_are_never_replaced(folder):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(KeysError, match="is there already"):
        make_keys(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_secrets_show_in_no_text_of_the_keys(folder):
    keys = [server_keys(str(folder), "buffer"), client_keys(str(folder), "rollout", "buffer")]
    secrets = [(folder / f"{role}.secret").read_text().strip() for role in ROLES]
    for text in (str(keys), repr(keys)):
        assert not any(secret in text for secret in secrets)


def test_a_secret_that_others_may_read_and_a_public_file_that_others_may_write_are_refused(folder):
    (folder / "rollout.secret").chmod(0o640)
    with pytest.raises(KeysError, match=r"rollout\.secret: others may read it; `chmod 600` it"):
        client_keys(str(folder), "rollout", "buffer")
    (folder / "rollout.secret").chmod(0o600)
    (folder / PUBLIC).chmod(0o666)
    with pytest.raises(KeysError, match="others may write it"):
        client_keys(str(folder), "rollout", "buffer")


def test_a_folder_in_which_others_may_replace_the_files_is_refused(folder):
    folder.chmod(0o777)
    with pytest.raises(KeysError, match="keys: others may write in it; `chmod 700` it"):
        client_keys(str(folder), "rollout", "buffer")
    folder.chmod(0o1777)  # as secrets are mounted: only a file's owner may take its place
    assert client_keys(str(folder), "rollout", "buffer") is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("name", ["", "rollout.secret", PUBLIC])
def test_what_belongs_to_another_user_is_refused(folder, name):
    os.chown(folder / name, 12345, -1)
    with pytest.raises(KeysError, match="belongs to another user, who may change it; `chown` it"):
        client_keys(str(folder), "rollout", "buffer")


def test_a_secret_of_another_set_is_told_before_it_is_used(folder, tmp_path):
    make_keys(tmp_path / "other")
    (folder / "rollout.secret").write_bytes((tmp_path / "other/rollout.secret").read_bytes())
    with pytest.raises(KeysError, match=r"not of the same set as public\.json"):
        client_keys(str(folder), "rollout", "buffer")


@pytest.mark.parametrize(
    "text",
    ["", "x", "#" * 40, "%" * 40, "é" * 40, "0" * 41, "\0" * 40, "[" * 4000, "0" * 5000],
    ids=["empty", "short", "beyond-32-bits", "also", "not-ascii", "long", "null", "deep", "huge"],
)
def test_what_is_no_key_is_one_line_that_does_not_repeat_it(folder, text):
    (folder / "rollout.secret").write_text(text)
    with pytest.raises(KeysError) as told:
        client_keys(str(folder), "rollout", "buffer")
    assert len(text) < 2 or text not in str(told.value)
    (folder / PUBLIC).write_text(text)
    with pytest.raises(KeysError):
        client_keys(str(folder), "buffer", "buffer")


def test_a_folder_from_before_a_role_was_known_says_what_to_do(folder):
    public = json.loads((folder / PUBLIC).read_text())
    del public["reference"]
    (folder / PUBLIC).write_text(json.dumps(public))
    with pytest.raises(
        KeysError, match=r"no key of the role reference.* new folder with `slipstream keys`"
    ) as told:
        server_keys(str(folder), "learner")
    assert len(str(told.value).splitlines()) == 1


def test_one_key_for_two_roles_is_refused(folder):
    public = json.loads((folder / PUBLIC).read_text())
    (folder / PUBLIC).write_text(json.dumps(public | {"scorer": public["rollout"]}))
    with pytest.raises(KeysError, match="two roles have the same key"):
        server_keys(str(folder), "learner")


def test_a_pipe_in_the_place_of_a_key_is_not_waited_for(folder):
    (folder / "rollout.secret").unlink()
    os.mkfifo(folder / "rollout.secret", 0o600)
    with pytest.raises(KeysError, match="not a file of keys"):
        client_keys(str(folder), "rollout", "buffer")


@pytest.mark.parametrize(
    "question",
    [
        [b"1.0", b"1", b"slipstream", b"", b"", b"NULL"],
        [b"1.0", b"1", b"slipstream", b"", b"", b"PLAIN", b"admin", b"admin"],
        [b"1.0", b"1", b"slipstream", b"", b"", b"CURVE", b"\0" * 32],
        [b"1.0", b"1", b"slipstream", b"", b"", b"CURVE"],
    ],
)
def test_only_a_known_curve_key_is_admitted(folder, question):
    keys = server_keys(str(folder), "buffer")
    assert keys.verdict(question)[2] == b"400"
    for known, role in keys.admitted.items():
        curve = [*question[:5], b"CURVE", known]
        assert keys.verdict(curve) == [b"1.0", b"1", b"200", b"admitted", role.encode(), b""]
        assert keys.verdict([*question[:2], b"other", *curve[3:]])[2] == b"400"


def test_a_question_with_frames_missing_is_answered_with_a_no(folder):
    keys = server_keys(str(folder), "buffer")
    question = [b"1.0", b"1", b"slipstream", b"", b"", b"CURVE", *list(keys.admitted)[:1]]
    assert keys.verdict(question)[2] == b"200"
    for count in range(7):
        assert keys.verdict(question[:count])[2] == b"400"
