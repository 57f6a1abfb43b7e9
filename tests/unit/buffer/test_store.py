import json
from contextlib import suppress
from dataclasses import replace

import pytest

from buffer import service
from buffer.errors import BadMessage, BatchForgotten, DataExhausted, RunFinished
from buffer.groups import decode_delivery, encode_group
from buffer.stacks import ACHIEVED


def sampled_tokens(group) -> int:
    return sum(int(t.loss_mask.sum()) for t in group.trajectories)


def test_nothing_is_leased_before_a_version_is_published(bench):
    b = bench()
    assert b.lease(4) == []
    b.do(lambda s: s.published(0))
    assert len(b.lease(4)) == 4


def test_admission_paces_by_versions_and_batches(bench, group):
    b = bench(rows=40)
    b.do(lambda s: s.published(0))
    leases = b.lease(100)
    assert len(leases) == (1 + 0 + 1) * 2
    assert b.lease(100) == []
    for lease in leases:
        assert b.deliver(group(lease))
    assert b.lease(100) == [], "delivered groups count like leased ones"
    assert b.batch(0) is not None
    assert b.lease(100) == [], "a batch taken is still a batch counted, until its version is published"
    b.do(lambda s: s.published(1))
    assert len(b.lease(100)) == 2


def test_admission_counts_trained_batches_after_a_restart_at_a_high_version(bench, group):
    b = bench(rows=1000, epochs=None)
    b.do(lambda s: s.published(0))
    for index in range(100):
        for lease in b.lease(2):
            b.deliver(group(lease))
        assert b.batch(index) is not None
        b.do(lambda s, v=index + 1: s.published(v))
    b.reopen()
    assert len(b.lease(1000)) == (1 + 1) * 2


def test_a_learner_ahead_of_a_lost_store_does_not_open_the_gates(bench):
    b = bench(rows=1000, epochs=None)
    b.do(lambda s: s.published(100))
    assert len(b.lease(1000)) == (1 + 1) * 2


def test_capacity_bounds_leases(bench):
    b = bench(rows=100, capacity=4, max_staleness=1)
    b.do(lambda s: s.published(50))
    assert len(b.lease(100)) == 4


def test_the_same_request_is_granted_once(bench):
    b = bench()
    b.do(lambda s: s.published(0))
    first = b.lease(2, request_id="r")
    b.reopen()
    assert b.lease(2, request_id="r") == first
    assert b.store.stock().leased == 2


def test_a_lease_that_runs_out_returns_its_prompt_first(bench, group):
    b = bench(lease_timeout_s=10.0)
    b.do(lambda s: s.published(0))
    first, second = b.lease(2)
    b.now = 9.0
    assert b.do(lambda s: s.renew([second.lease_id, "unknown"])) == {"unknown"}
    b.now = 10.5
    assert b.do(lambda s: s.expire()) == 1
    assert b.do(lambda s: s.renew([first.lease_id, second.lease_id])) == {first.lease_id}
    (again,) = b.lease(1)
    assert again.prompt == first.prompt
    assert again.lease_id != first.lease_id


def test_a_restart_gives_leases_their_full_time_again(bench):
    b = bench(lease_timeout_s=10.0)
    b.do(lambda s: s.published(0))
    (lease,) = b.lease(1)
    b.now = 9.0
    b.reopen()
    b.now = 18.0
    assert b.do(lambda s: s.renew([lease.lease_id])) == set()
    b.now = 28.5
    assert b.do(lambda s: s.expire()) == 1


def test_a_transaction_is_on_the_disk_when_it_returns(bench):
    """Not in the kernel's cache alone, which kill -9 leaves and a power cut does not."""
    ask = bench().store.database.one
    assert (ask("PRAGMA journal_mode"), ask("PRAGMA synchronous")) == ("wal", 2)


def test_a_group_delivered_twice_is_stored_once(bench, group):
    b = bench()
    b.do(lambda s: s.published(0))
    (lease,) = b.lease(1)
    assert b.deliver(group(lease))
    assert not b.deliver(group(lease))
    b.reopen()
    assert not b.deliver(group(lease))
    assert not b.deliver(group(lease, group_id="another content for the same prompt"))
    assert b.store.stock().stored == 1
    assert b.store.status()["duplicates"] == 3


def test_a_late_group_is_kept_and_the_second_lease_taken_back(bench, group):
    b = bench(lease_timeout_s=10.0)
    b.do(lambda s: s.published(0))
    (slow,) = b.lease(1)
    b.now = 11.0
    b.do(lambda s: s.expire())
    (other,) = b.lease(1)
    assert other.prompt == slow.prompt
    assert b.deliver(group(slow))
    assert b.do(lambda s: s.renew([other.lease_id])) == {other.lease_id}
    assert not b.deliver(group(other)), "done by the first"
    assert b.store.stock().stored == 1


def test_a_duplicate_of_an_evicted_group_does_not_come_back(bench, group):
    b = bench(max_staleness=0, groups_per_batch=1)
    b.do(lambda s: s.published(0))
    (lease,) = b.lease(1)
    stale = group(lease)
    assert b.deliver(stale)
    b.do(lambda s: s.published(1))
    assert b.batch(1) is None
    assert b.store.status()["evicted"] == 1
    assert b.store.status()["wasted_tokens"] == sampled_tokens(stale)
    assert not b.deliver(stale)
    (again,) = b.lease(1)
    assert again.prompt == lease.prompt
    assert b.deliver(group(again))
    assert b.batch(1) is not None


def test_the_oldest_trained_token_decides_on_eviction(bench, group):
    b = bench(max_staleness=1, groups_per_batch=1, rows=8)
    b.do(lambda s: s.published(0))
    mixed, fresh = b.lease(2)
    b.do(lambda s: s.published(2))
    b.deliver(group(mixed, versions=(0, 1, 2, 2)))
    b.deliver(group(fresh, versions=(1, 1, 2, 2)))
    found = b.batch(2)
    assert found is not None
    assert b.prompts_of(2) == [fresh.prompt.prompt_id]
    assert b.ledger()[mixed.prompt.prompt_id] == "queued"


def test_a_failed_group_is_requeued_three_times_then_dropped(bench):
    b = bench(rows=1)
    b.do(lambda s: s.published(0))
    for _ in range(4):
        (lease,) = b.lease(1)
        b.do(lambda s, i=lease.lease_id: s.give_up(i, "reward", True))
        b.do(lambda s, i=lease.lease_id: s.give_up(i, "reward", True))
    assert b.lease(1) == []
    status = b.store.status()
    assert status["dropped"] == {"failed": 1}
    assert status["failed"] == {"reward": 4}
    assert status["requeued"] == {"failed": 3}


def test_a_server_that_stops_says_nothing_about_its_prompts(bench):
    b = bench(rows=1)
    b.do(lambda s: s.published(0))
    for _ in range(6):
        (lease,) = b.lease(1)
        b.do(lambda s, i=lease.lease_id: s.give_up(i, "server_stopped", True))
    assert len(b.lease(1)) == 1
    status = b.store.status()
    assert status["dropped"] == status["failed"] == {}
    assert status["requeued"] == {"server_stopped": 6}


def test_a_silent_engine_or_scorer_says_nothing_about_a_prompt_but_one_that_meets_many_is_told_of(
    bench, caplog
):
    caplog.set_level("WARNING", "buffer.ledger")
    b = bench(rows=1)
    b.do(lambda s: s.published(0))
    for times in range(9):
        for reason in ("server_silent", ("engine_silent", "scorer_silent")[times % 2]):
            (lease,) = b.lease(1)
            b.do(lambda s, i=lease.lease_id, r=reason: s.give_up(i, r, True))
    assert len(b.lease(1)) == 1
    status = b.store.status()
    assert status["dropped"] == status["failed"] == {}
    assert [m.partition(" with servers")[0] for m in caplog.messages] == [
        "prompt 0/0 was 4 times",
        "prompt 0/0 was 8 times",
    ]


def test_a_batch_is_the_same_whenever_it_is_asked_for(bench, group):
    b = bench(rows=40, max_staleness=3)
    b.do(lambda s: s.published(0))
    for lease in reversed(b.lease(6)):
        b.deliver(group(lease))
    first = b.batch(0)
    assert b.prompts_of(0) == ["0/0", "0/1"], "fifo: the oldest lease first, whenever it was delivered"
    assert list(first.sequences) == sorted(first.sequences, reverse=True), "handed out in that order too"
    second = b.batch(1)
    b.reopen()
    assert (b.batch(0), b.batch(1)) == (first, second)


def test_fifo_trains_a_straggler_next(bench, group):
    b = bench(rows=40, groups_per_batch=2, max_staleness=3)
    b.do(lambda s: s.published(0))
    straggler, *others = b.lease(6)
    for lease in others:
        b.deliver(group(lease))
    b.batch(0)
    b.deliver(group(straggler))
    b.batch(1)
    assert straggler.prompt.prompt_id in b.prompts_of(1)


def test_a_token_of_a_version_that_cannot_be_yet_is_refused(bench, group):
    """It would never be too old. A server may have the next version before the learner tells of it."""
    b = bench(rows=8)
    b.do(lambda s: s.published(3))
    early, next_, *_ = b.lease(2)
    with pytest.raises(BadMessage, match="versions: 5, and a server has 4"):
        b.deliver(group(early, versions=(3, 5)))
    assert b.deliver(group(next_, versions=(3, 4)))
    assert b.deliver(group(early)), "the lease is still its own"


def test_freshest_takes_the_newest_versions(bench, group):
    b = bench(rows=40, policy="freshest", max_staleness=5)
    b.do(lambda s: s.published(0))
    leases = b.lease(4)
    b.do(lambda s: s.published(1))
    for lease, version in zip(leases, (0, 2, 1, 2), strict=True):
        b.deliver(group(lease, versions=(version,)))
    b.batch(1)
    assert b.prompts_of(1) == [leases[1].prompt.prompt_id, leases[3].prompt.prompt_id]


def test_groups_without_contrast_are_dropped_counted_and_refilled(bench, group):
    b = bench(rows=40, dynamic_sampling=True)
    b.do(lambda s: s.published(0))
    leases = b.lease(4)
    assert b.lease(4) == []
    alike = group(leases[0], rewards=(1.0, 1.0))
    assert b.deliver(alike)
    assert b.deliver(group(leases[1], rewards=(1.0, 0.0)))
    assert b.store.status()["dropped"] == {"zero_variance": 1}
    assert b.store.status()["wasted_tokens"] == sampled_tokens(alike)
    assert len(b.lease(4)) == 1, "its place is free for another prompt"
    assert not b.deliver(group(leases[0], rewards=(1.0, 1.0)))


def test_committed_batches_are_forgotten_and_their_prompts_trained(bench, group):
    b = bench(rows=40, max_staleness=3)
    b.do(lambda s: s.published(0))
    for lease in b.lease(6):
        b.deliver(group(lease))
    b.batch(0)
    kept = b.batch(1)
    b.do(lambda s: s.committed(1))
    with pytest.raises(BatchForgotten, match="batch 0 "):
        b.batch(0)
    assert b.batch(1) == kept
    assert b.store.database.one("SELECT count(*) FROM payloads") == 4
    assert [b.ledger()[f"0/{i}"] for i in range(6)] == ["trained"] * 2 + ["batched"] * 2 + ["stored"] * 2
    b.do(lambda s: s.committed(1))
    assert b.store.status()["trained"] == 2


def test_used_up_epochs_drop_the_remainder_by_name(bench, group):
    b = bench(rows=3, epochs=1)
    b.do(lambda s: s.published(0))
    for lease in b.lease(4):
        b.deliver(group(lease))
    assert b.batch(0) is not None
    with b.store.transaction(), suppress(DataExhausted):  # a refusal is an answer: what it did is kept
        b.store.batch(1)
    with pytest.raises(DataExhausted):
        b.batch(1)
    assert b.store.status()["dropped"] == {"remainder": 1}


def test_data_that_ends_before_the_first_batch_ends_the_buffer_and_not_the_run(bench, group):
    """A run of no step would be one that was finished, with the model that it began with."""
    b = bench(rows=3, epochs=1)
    b.do(lambda s: s.published(0))
    first, *others = b.lease(3)
    b.deliver(group(first))
    assert b.batch(0) is None
    assert not b.store.status()["hopeless"], "two are still on lease"
    for lease in others:
        b.do(lambda s, lease=lease: s.give_up(lease.lease_id, "too_long", False))
    assert b.batch(0) is None
    status = b.store.status()
    assert status["hopeless"]
    assert not status["finished"]
    told = service.fruitless(status)
    assert "the first batch: 1 came of the buffer.groups_per_batch=2 groups that one takes;" in told
    assert "dropped prompts: too_long 2; failures: too_long 2" in told
    assert "raise data.epochs, or use another run_dir" in told


def test_data_is_not_exhausted_while_a_lease_may_still_fill_the_batch(bench, group):
    b = bench(rows=2, epochs=1)
    b.do(lambda s: s.published(0))
    first, second = b.lease(2)
    b.deliver(group(first))
    assert b.batch(0) is None
    b.do(lambda s: s.give_up(second.lease_id, "timeout", True))
    assert b.batch(0) is None


def test_what_a_server_held_before_it_was_started_anew_is_lent_again_at_once(bench, group):
    b = bench(rows=8)
    b.do(lambda s: s.published(0))
    theirs = b.lease(1, name="other")
    lost = b.lease(3)
    assert b.lease(1) == [], "they have all the room"
    b.reopen()
    assert b.do(lambda s: s.start("server-0")) == 3
    again = b.lease(3)
    assert [x.prompt.prompt_id for x in again] == [x.prompt.prompt_id for x in lost]
    assert b.do(lambda s: s.renew([x.lease_id for x in lost + theirs + again])) == {x.lease_id for x in lost}
    assert all(b.deliver(group(lease)) for lease in theirs + again)
    assert b.do(lambda s: s.start("server-0")) == 0
    assert b.store.status()["requeued"] == {"server_started": 3}


def test_evaluation_goes_first_and_is_never_trained(bench, group, caplog):
    caplog.set_level("INFO")
    b = bench(rows=40, eval_rows=2)
    b.do(lambda s: s.published(0))
    leases = b.lease(3)
    assert [x.kind for x in leases] == ["eval", "eval", "train"]
    assert [x.prompt.row["prompt"] for x in leases] == ["e0", "e1", "p0"]
    assert len(b.lease(100)) == 3, "evaluation is outside admission"
    b.deliver(group(leases[0], rewards=(1.0, 1.0)))
    b.deliver(group(leases[1], rewards=(0.0, 1.0)))
    assert not b.deliver(group(leases[1]))
    results = {
        "prompts": 2, "completions": 4, "score": 0.75, "stderr": 0.25, "pass@1": 0.75, "pass@2": 1.0,
    }  # fmt: skip
    assert b.store.status()["evaluations"] == {"0": results}
    assert b.store.stock().stored == 0
    lines = (b.folder / "eval.jsonl").read_text().splitlines()
    assert len(lines) == 5
    assert json.loads(lines[-1]) == {"kind": "score", "version": 0, "final": False, **results}
    assert '"completion": "completion 1"' in lines[1]
    assert "evaluation of version 0: score 0.750" in caplog.text, "whoever started the services reads logs"


def test_an_evaluation_whose_prompts_were_all_dropped_has_no_score(bench, caplog):
    caplog.set_level("INFO")
    b = bench(rows=40, eval_rows=1)
    b.do(lambda s: s.published(0))
    (lease,) = b.lease(1)
    b.do(lambda s: s.give_up(lease.lease_id, "too_long", False))
    told = json.loads((b.folder / "eval.jsonl").read_text())
    assert told == {
        "kind": "score", "version": 0, "final": False, "score": None, "prompts": 1, "completions": 0,
    }  # fmt: skip
    assert "evaluation of version 0: no prompt was scored" in caplog.text


def test_an_evaluated_version_stays_the_newest_until_it_is_evaluated(bench, group):
    """Servers go on with whatever weights come: were a batch trained meanwhile, the evaluation's later tokens
    would be of the version that it made."""
    b = bench(rows=40, eval_rows=2, eval_every=1)
    b.do(lambda s: s.published(0))
    one, other, *train = b.lease(6)
    for lease in train:
        b.deliver(group(lease))
    b.store.take_changes()
    assert b.batch(0) is None
    assert b.store.status()["eval_left"] == 2
    b.deliver(group(one))
    assert b.batch(0) is None
    b.store.take_changes()
    b.do(lambda s: s.give_up(other.lease_id, "reward", False))
    _, batch_may_come = b.store.take_changes()
    assert batch_may_come
    assert b.store.status()["eval_left"] == 0
    assert b.batch(0) is not None
    assert b.batch(1) is None, "its version is not out yet, and will be evaluated"
    b.do(lambda s: s.published(1))
    assert b.batch(1) is None
    assert b.batch(0) is not None, "a learner that resumes trains again what it trained"
    for lease in b.lease(2):
        assert lease.prompt.prompt_id.startswith("eval/1/")
        b.store.take_changes()
        b.deliver(group(lease))
    assert b.store.take_changes()[1]
    assert b.batch(1) is not None


def test_eval_lines_survive_a_crash_between_file_and_store_once(bench, group):
    b = bench(rows=40, eval_rows=1)
    b.do(lambda s: s.published(0))
    (lease,) = b.lease(1)
    delivery = decode_delivery(*encode_group(group(lease)))

    def lose_power():
        with b.store.transaction():
            assert b.store.deliver(delivery)
            b.store.evaluations.write()
            raise InterruptedError("the file is written, and the commit is not")

    with pytest.raises(InterruptedError):
        lose_power()
    whole = (b.folder / "eval.jsonl").read_text()
    assert whole.count("\n") == 3
    b.reopen()
    assert b.deliver(group(lease))
    assert (b.folder / "eval.jsonl").read_text() == whole


@pytest.mark.parametrize("left", [0, 7, None])
def test_a_file_of_evaluations_that_was_cut_by_others_goes_on_with_whole_lines(bench, group, caplog, left):
    b = bench(rows=40, eval_rows=1, eval_every=1)
    path = b.folder / "eval.jsonl"

    def evaluate(version):
        b.do(lambda s: s.published(version))
        (lease,) = b.lease(1)
        assert b.deliver(group(lease))

    evaluate(0)
    before = path.read_bytes()
    assert caplog.text == ""
    path.write_bytes(before[:left]) if left is not None else path.unlink()
    evaluate(1)
    kept, *added = path.read_text().splitlines() if left else ("", *path.read_text().splitlines())
    assert kept.encode() == before[: left or 0]
    assert [json.loads(line)["version"] for line in added] == [1, 1, 1]
    assert f"eval.jsonl: {left or 0} bytes of the {len(before)} that were written to it" in caplog.text
    cut = path.read_bytes()
    caplog.clear()
    evaluate(2)
    assert path.read_bytes().startswith(cut)
    assert caplog.text == ""


def test_evaluation_is_due_by_version_also_when_one_is_skipped(bench, group):
    b = bench(rows=40, eval_rows=1, eval_every=10)
    opened = []
    for version in (0, 3, 9, 11, 12, 20):
        b.do(lambda s, v=version: s.published(v))
        opened.append([v for (v,) in b.store.database.run("SELECT version FROM evals ORDER BY version")])
    assert opened == [[0], [0], [0], [0, 11], [0, 11], [0, 11, 20]]


def test_the_run_ends_with_the_final_evaluation_alone(bench, group, caplog):
    caplog.set_level("INFO")
    b = bench(rows=40, eval_rows=2)
    b.do(lambda s: s.published(0))
    train = [x for x in b.lease(4) if x.kind == "train"]
    for lease in b.lease(4):
        assert lease.kind == "train"
    for row in (0, 1):
        holder = b.store.database.one("SELECT lease_id FROM leases WHERE prompt_id = ?", f"eval/0/{row}")
        b.do(lambda s, i=holder: s.give_up(i, "reward", False))
    b.do(lambda s: s.published(1))
    b.do(lambda s: s.finish(1))
    b.do(lambda s: s.finish(1))
    ends = [r for r in caplog.records if "leases are taken back" in r.message]
    assert [(r.levelname, r.message) for r in ends] == [
        ("INFO", "version 1 is the last: 4 training leases are taken back")
    ]
    assert b.do(lambda s: s.renew([x.lease_id for x in train])) == {x.lease_id for x in train}
    final = b.lease(10)
    assert [x.kind for x in final] == ["eval", "eval"]
    assert b.lease(10) == []
    for lease in final:
        assert b.deliver(group(lease))
    with pytest.raises(RunFinished):
        b.lease(1)
    b.reopen()
    with pytest.raises(RunFinished):
        b.lease(1)
    b.store.reopen(steps=1)
    with pytest.raises(RunFinished):
        b.lease(1)
    b.store.reopen(steps=2)
    assert [x.kind for x in b.lease(1)] == ["train"]


def test_evaluations_added_to_a_finished_run_are_made_of_its_last_version(bench, group):
    b = bench()
    b.do(lambda s: s.published(0))
    b.do(lambda s: s.published(1))
    b.do(lambda s: s.finish(1))
    b.store.reopen(steps=1)
    with pytest.raises(RunFinished):
        b.lease(1)
    b.sources = replace(b.sources, eval_rows=[{"prompt": "e0"}, {"prompt": "e1"}])
    b.reopen()
    b.store.reopen(steps=1)
    leases = b.lease(10)
    assert {x.kind for x in leases} == {"eval"}
    assert b.store.database.run("SELECT version, final FROM evals").fetchall() == [(1, 1)]
    for lease in leases:
        assert b.deliver(group(lease))
    b.store.reopen(steps=1)
    with pytest.raises(RunFinished):
        b.lease(1)


def test_a_run_whose_data_ended_goes_on_with_more_epochs_only(bench, group):
    b = bench(rows=1, epochs=1)
    b.do(lambda s: s.published(0))
    (lease,) = b.lease(1)
    b.do(lambda s: s.give_up(lease.lease_id, "refused", False))
    b.do(lambda s: s.finish(0))
    b.store.reopen(steps=5)
    with pytest.raises(RunFinished):
        b.lease(1)


def test_a_group_that_contradicts_its_lease_is_refused(bench, group):
    b = bench()
    b.do(lambda s: s.published(0))
    first, second = b.lease(2)
    crossed = group(first)
    object.__setattr__(crossed, "prompt_id", second.prompt.prompt_id)
    with pytest.raises(BadMessage, match="prompt_id"):
        b.deliver(crossed)


def test_another_run_or_other_data_is_refused(bench):
    b = bench(rows=4)
    b.sources.queue.rows[0]["prompt"] = "changed"
    with pytest.raises(ValueError, match="rows changed"):
        b.reopen()


@pytest.mark.parametrize("rules", [{"eval_rows": 1}, {"policy": "priority", "max_staleness": 2}], ids=str)
def test_the_largest_rewards_can_be_added_up(bench, group, rules):
    """They go into sums of squares: what does not fit is no refusal, but the end of the store's thread."""
    b = bench(rows=40, **rules)
    b.do(lambda s: s.published(0))
    first, second = b.lease(2)
    assert b.deliver(group(first, rewards=(-1e30, 1e30, 1e30, 1e30)))
    assert b.deliver(group(second, rewards=(1e30, -1e30)))
    with pytest.raises(BadMessage, match="reward"):
        b.deliver(group(second, rewards=(1e200, 0.0)))


def test_whatever_comes_of_a_run_changes_a_number_that_tells_it_from_a_standstill(bench, group):
    b = bench(rows=40, eval_rows=2)
    seen = [None]

    def achieved():
        status = b.store.status()
        seen.append([status[key] for key in ACHIEVED])
        return seen[-1] != seen[-2]

    assert achieved()
    b.do(lambda s: s.published(0))
    assert achieved()
    leases = b.lease(4)
    for lease in leases:
        assert not achieved(), "what is lent may come to nothing"
        b.deliver(group(lease))
        assert achieved(), lease.kind
    assert b.batch(0)
    assert achieved()
    b.do(lambda s: s.committed(1))
    assert achieved()
