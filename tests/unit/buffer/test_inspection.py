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


def test_what_the_learner_trained_is_trained_before_a_checkpoint_lets_it_go(bench, group):
    b = bench(rows=40, max_staleness=2)
    b.do(lambda s: s.published(0))
    for lease in b.lease(6):
        b.deliver(group(lease))
    for index in range(2):
        b.batch(index)
    assert inspect(b.folder)["trained"] == 0
    b.do(lambda s: s.published(1))
    seen = inspect(b.folder)
    assert (seen["frontier"], seen["trained"], seen["committed"]) == (2, 1, 0)
    assert seen["groups"] == {"batched": 2, "stored": 2, "trained": 2}
    assert seen["prompts"] == {0: {"batched": 2, "stored": 2, "trained": 2}}
    b.do(lambda s: s.published(2))
    b.do(lambda s: s.committed(1))
    seen = inspect(b.folder)
    assert (seen["trained"], seen["committed"]) == (2, 1)
    assert seen["groups"] == {"stored": 2, "trained": 4}
    assert "trained" not in seen["counters"], "of the committed ones: it would contradict"


def test_a_folder_without_a_buffer_is_told(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        inspect(tmp_path)
    (tmp_path / "buffer.sqlite").write_text("not a database, but long enough to look at" * 100)
    with pytest.raises(ValueError, match="cannot be read"):
        inspect(tmp_path)
