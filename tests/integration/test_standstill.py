"""A run that stands still: every service tells by itself where its threads are, and for whom it waits."""

import signal

import pytest
from recorded_run import make_recorded_run, recorded_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STACKS = "Timeout (0:00:03)!\nThread 0x"


def test_every_service_that_achieves_nothing_tells_where_it_stands_and_goes_on(make_experiment, free_address):
    folder = make_recorded_run(make_experiment, free_address, "standstill", logging={"stalled_s": 3})
    with recorded_run(folder) as faults:
        faults.start("a")
        faults.signal("buffer", signal.SIGSTOP)
        for name in ("learner", "a"):
            faults.says_again(name, STACKS, 0)
            faults.says_again(name, "waiting for buffer at", 0)
        faults.signal("buffer", signal.SIGCONT)
        faults.steps(3)
        told = {name: faults.told(name, STACKS) for name in ("buffer", "a")}
        faults.stop("learner")
        for name, before in told.items():
            faults.says_again(name, STACKS, before)


def test_a_learner_that_does_not_get_to_its_model_tells_where_it_stands(make_experiment, free_address):
    source = {"kind": "function", "path": "slow:rows"}
    folder = make_recorded_run(
        make_experiment,
        free_address,
        "unread",
        learner={"ptx": {"data": source, "coefficient": 0.1}},
        logging={"stalled_s": 3},
    )
    (folder / "slow.py").write_text("import time\n\n\ndef rows():\n    time.sleep(20)\n")
    with recorded_run(folder) as faults:
        faults.running.start("learner")
        faults.says_again("learner", STACKS, 0)
        assert "slow.py" in faults.running.log("learner")
