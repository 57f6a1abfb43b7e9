import pytest

from buffer.inspection import inspect


def test_inspection_reads_beside_the_writer(bench, group):
    b = bench(rows=40, max_staleness=2)
    b.do(lambda s: s.published(0))
    leases = b.lease(6)
    for lease in leases[:3]:
        b.deliver(group(lease))
    b.batch(0)
    b.do(lambda s: s.give_up(leases[3].lease_id, "too_long", False))
    seen = inspect(b.folder)
    assert seen["groups"] == {"batched": 2, "stored": 1}
    assert seen["leases"] == {"server-0": 2}
    assert seen["prompts"] == {0: {"batched": 2, "dropped": 1, "leased": 2, "stored": 1}}
    assert seen["staleness"] == {0: 2}
    assert seen["dropped"] == {"too_long": 1}
    assert seen["oldest"]["prompt_id"] == "0/2"
    assert (seen["published"], seen["frontier"]) == (0, 1)


def test_a_folder_without_a_buffer_is_told(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        inspect(tmp_path)
    (tmp_path / "buffer.sqlite").write_text("not a database, but long enough to look at" * 100)
    with pytest.raises(ValueError, match="cannot be read"):
        inspect(tmp_path)
