"""Prompts from files through the store: bad rows leave the run by a named rule, a restart and a blend keep
every prompt apart."""

import json
import re
from collections import Counter

import pytest

from buffer import service
from buffer.config import BufferConfig
from buffer.experiment import DataConfig
from buffer.ledger import MOST_FRUITLESS
from buffer.prompts import open_prompts
from buffer.store import Sources, Store

RULES = BufferConfig(groups_per_batch=2, max_staleness=4)


def source(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "files", "path": str(path)}


def opened(tmp_path, rows, **keys):
    train = source(tmp_path / "rows.jsonl", rows)
    data = {"train": train, "epochs": 1, "shuffle": False, **keys}
    queue = open_prompts(DataConfig.model_validate(data), 1)
    store = Store(tmp_path, "test", RULES, Sources(queue, [], None), lambda: 0.0)
    with store.transaction():
        store.published(0)
    return store


def test_a_bad_row_is_dropped_and_counted(tmp_path):
    store = opened(tmp_path, [{"prompt": "a"}, {"prompt": 3}, {"prompt": "c"}], on_bad_row="skip")
    with store.transaction():
        store.take_changes()
        leases = store.lease("server", "request", 3)
        assert [lease.prompt.row for lease in leases] == [{"prompt": "a"}, {"prompt": "c"}]
        assert store.take_changes() == (True, True)
        assert store.status()["dropped"] == {"bad_row": 1}
        assert store.status()["max_staleness"] == 4, "which a learner holds its own against"
        assert [lease.prompt.prompt_id for lease in store.lease("server", "request", 3)] == ["0/0", "0/2"]
    states = dict(store.database.run("SELECT prompt_id, state FROM prompts").fetchall())
    assert states == {"0/0": "leased", "0/1": "dropped", "0/2": "leased"}
    store.close()


def test_by_default_a_bad_row_ends_the_start(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: prompt: expected text"):
        opened(tmp_path, [{"prompt": "a"}, {"prompt": 3}])


def test_a_file_that_changes_under_a_run_costs_prompts_not_the_service(tmp_path):
    store = opened(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    with store.transaction():
        assert len(store.lease("server", "request", 1)) == 1
    (tmp_path / "rows.jsonl").write_text("")
    with store.transaction():
        assert store.lease("server", "request", 1) == [], "the lease that was granted cannot be told again"
        assert store.lease("server", "next", 1) == []
        assert store.status()["dropped"] == {"bad_row": 2}
        assert store.status()["leased"] == 0
    store.close()


def taken(store, count, at_once=4):
    """How many requests for leases came back empty, and whether another would try again at once."""
    empty = 0
    for number in range(count):
        store.take_changes()
        with store.transaction():
            empty += store.lease("server", f"another {number}", at_once) == []
    return empty, store.take_changes()[0]


@pytest.mark.parametrize(("epochs", "rows"), [(None, 20), (1, 20), (3, 20), (None, 300), (1, 300)])
def test_a_file_that_is_written_anew_under_a_run_ends_it_and_says_so(tmp_path, epochs, rows):
    store = opened(tmp_path, [{"prompt": f"p{i}"} for i in range(rows)], epochs=epochs, shuffle=True)
    with store.transaction():
        (held,) = store.lease("server", "request", 1)
    source(tmp_path / "rows.jsonl", [{"question": f"of another length {i}"} for i in range(rows)])
    empty, again = taken(store, 100)
    assert (empty, again) == (100, False), "nothing is read and dropped for ever"
    with store.transaction():
        store.give_up(held.lease_id, "too_long", requeue=False)
        assert store.batch(0) is None, "nor is it data that was used up"
    status = store.status()
    assert status["hopeless"]
    assert status["unreadable"] == status["dropped"]["bad_row"] < MOST_FRUITLESS + 4
    told = service.fruitless(status)
    assert re.fullmatch(
        r"the last \d+ prompts could not be read \(.*rows\.jsonl:\d+: the file was changed since it was "
        r"opened: not JSON: .*\): the data is not what it was when the run began\. .*",
        told,
    )
    store.close()


def test_rows_that_cannot_be_read_among_others_end_nothing(tmp_path):
    rows = [{"prompt": "a"}, *({"prompt": 3} for _ in range(70))]
    store = opened(tmp_path, rows, epochs=None, shuffle=True, on_bad_row="skip")
    empty, _ = taken(store, 100)
    assert 0 < empty < 100
    assert store.status()["gone"] is None
    assert not store.status()["hopeless"]
    store.close()


def test_a_file_that_is_put_in_the_place_of_another_costs_nothing(tmp_path):
    store = opened(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    source(tmp_path / "new.jsonl", [])
    (tmp_path / "new.jsonl").replace(tmp_path / "rows.jsonl")
    with store.transaction():
        leases = store.lease("server", "request", 2)
    assert [lease.prompt.row["prompt"] for lease in leases] == ["a", "b"]
    store.close()


def test_a_restart_goes_on_with_the_same_rows(tmp_path):
    rows = [{"prompt": f"p{i}"} for i in range(6)]
    store = opened(tmp_path, rows, shuffle=True)
    with store.transaction():
        first = [lease.prompt.row["prompt"] for lease in store.lease("server", "one", 2)]
    store.close()
    store = opened(tmp_path, rows, shuffle=True)
    with store.transaction():
        rest = [lease.prompt.row["prompt"] for lease in store.lease("server", "two", 9)]
    assert sorted(first + rest) == [f"p{i}" for i in range(6)]
    store.close()
    with pytest.raises(ValueError, match="the training rows changed"):
        opened(tmp_path, [*rows[:5], {"prompt": "other"}], shuffle=True)


def test_every_draw_of_a_blend_is_a_prompt_of_its_own(tmp_path):
    parts = [
        {"source": source(tmp_path / "a.jsonl", [{"prompt": f"a{i}"} for i in range(8)]), "weight": 1},
        {"source": source(tmp_path / "b.jsonl", [{"prompt": f"b{i}"} for i in range(2)]), "weight": 1},
    ]
    store = opened(tmp_path, [], train={"kind": "blend", "parts": parts})
    with store.transaction():
        leases = store.lease("server", "request", 99)
    assert len({lease.prompt.prompt_id for lease in leases}) == 10
    prompts = [lease.prompt.row["prompt"] for lease in leases]
    seen = Counter(prompts)
    assert [sum(seen[f"a{i}"] for i in range(8)), seen["b0"] + seen["b1"]] == [5, 5]
    assert abs(seen["b0"] - seen["b1"]) == 1
    store.close()
