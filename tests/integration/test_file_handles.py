"""Services of a run that may open no file any more: one line says so, they work on, and recover."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from no_handles import none_left
from recorded_run import LONGEST_STEP_S, Faults, make_recorded_run, recorded_run

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(180)]

OUT, AGAIN = "out of file handles: this process may have", "there are file handles again"


def rank_of(torchrun: int) -> int:
    """The learner's process below it."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    (found,) = [int(c) for c in children if b"\0learner\0" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return found


@pytest.fixture(scope="module")
def faults(make_experiment, free_address) -> Iterator[Faults]:
    checkpoint = {"every": 40, "keep": 2, "export": False}
    folder = make_recorded_run(
        make_experiment, free_address, "file-handles", learner={"checkpoint": checkpoint}
    )
    with recorded_run(folder) as made:
        made.start("a")
        yield made


@pytest.mark.parametrize("service", ["buffer", "learner", "a"])
def test_a_service_without_file_handles_says_so_once_works_on_and_has_them_again(faults, service):
    process = faults.running.running[service].pid
    # Not in the middle of a checkpoint, which ends the learner.
    faults.says_again("learner", "checkpoint of step", faults.told("learner", "checkpoint of step"))
    with none_left(rank_of(process) if service == "learner" else process):
        faults.running.says(service, OUT)
        saved = faults.told("learner", "checkpoint of step")
        if service != "learner":
            assert faults.steps(5) < LONGEST_STEP_S
        # Who comes now needs a connection of the buffer and of the learner, and a new group of `a`.
        faults.start_server(f"beside-{service}")
        faults.running.says(f"beside-{service}", "is up")
        if service == "learner":
            faults.running.says("learner", "waits until 32 file handles are free")
    faults.running.says(service, AGAIN)
    faults.takes_the_current_version(f"beside-{service}")
    faults.takes_the_current_version("a")
    faults.running.until(lambda: faults.told("learner", "checkpoint of step") > saved)
    assert faults.told(service, OUT) == 1
    faults.stop(f"beside-{service}")


def test_after_all_that_every_version_was_made_once_and_every_group_trained_once(faults):
    faults.finish()
