"""What a process does that may open no file any more; whole services are in tests/integration."""

import json
import os
import threading
import time

from no_handles import none_left

from buffer import handles


def test_what_is_left_is_counted_and_waited_for(caplog):
    assert handles.spare(5) == 5
    with none_left(os.getpid()):
        assert handles.spare(5) == 0
        waiting = threading.Thread(target=handles.wait_for_handles, args=("it", 4, 30.0))
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive()
    waiting.join(5)
    assert not waiting.is_alive()
    assert [r.message for r in caplog.records] == ["it waits until 4 file handles are free"]
    with none_left(os.getpid()):
        began = time.monotonic()
        handles.wait_for_handles("it", 4, 0.1)
    assert time.monotonic() - began < 3, "who needs them then says what is wrong"


def test_a_score_is_written_once_there_are_handles_and_the_store_goes_on_meanwhile(bench, group):
    b = bench(rows=40, eval_rows=1)
    b.do(lambda s: s.published(0))
    evaluation, first, second = b.lease(3)
    assert evaluation.kind == "eval"
    with none_left(os.getpid()):
        assert b.deliver(group(evaluation))
        assert b.deliver(group(first))
    written = b.folder / "eval.jsonl"
    assert not written.exists()
    assert b.deliver(group(second))
    assert [json.loads(line)["kind"] for line in written.read_text().splitlines()][-1] == "score"
