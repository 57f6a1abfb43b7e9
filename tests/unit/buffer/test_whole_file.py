import errno
import os

import pytest

from buffer.whole_file import write_whole


def test_it_takes_the_place_of_what_was_there(tmp_path):
    path = tmp_path / "told.json"
    for text in ("{}", "longer than before"):
        write_whole(path, text)
        assert path.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["told.json"]


def test_on_a_full_disk_what_was_there_stays_and_no_part_of_the_new(tmp_path, monkeypatch):
    path = tmp_path / "told.json"
    write_whole(path, "before")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["told.json"]
