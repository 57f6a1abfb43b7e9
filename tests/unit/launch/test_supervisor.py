"""Real child processes under the real guard."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.services import torchrun
from launch.supervisor import LONGEST_LINE, Service, Supervisor, last_error, last_lines

DEADLINES_S = {"first": 1.0, "second": 1.0}
PATIENCE_S = 20.0

OBEDIENT = """
    import signal, sys, time
    def end(*_):
        print("ends well", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    print("up", flush=True)
    time.sleep(600)
"""
PLAIN = """
    import time
    print("up", flush=True)
    time.sleep(600)
"""

DEAF = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    time.sleep(600)
"""
WITH_GRANDCHILD = """
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"], start_new_session=True)
    print("grandchild", child.pid, flush=True)
    time.sleep(600)
"""
SHARES_MEMORY = """
    import time
    from multiprocessing.shared_memory import SharedMemory
    shared = SharedMemory(create=True, size=1 << 20)
    print("shared", shared.name, flush=True)
    time.sleep(600)
"""
LEAVES_GRANDCHILD = WITH_GRANDCHILD.replace("time.sleep(600)\n", "sys.exit(0)\n")


def scripted(name: str, role: str, code: str, **options: Any) -> Service:
    return Service(name, role, [sys.executable, "-c", textwrap.dedent(code)], **options)


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def said(logs: Path, name: str, text: str) -> bool:
    log = logs / f"{name}.log"
    return log.exists() and text in log.read_text()


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def grandchild(logs: Path, name: str) -> int:
    wait_for(lambda: said(logs, name, "grandchild"))
    return int((logs / f"{name}.log").read_text().split("grandchild")[1].split()[0])


def test_the_first_failure_is_told_with_its_last_lines_and_the_rest_is_ended(tmp_path):
    failing = scripted("broken", "first", "print('about to fail'); raise SystemExit(3)")
    with Supervisor([failing, scripted("good", "second", OBEDIENT)], tmp_path, DEADLINES_S) as supervisor:
        wait_for(lambda: said(tmp_path, "good", "up"))
        wait_for(lambda: supervisor.states()["broken"] != "running")
        failure = supervisor.check()
        assert failure is not None
        assert (failure.service, failure.reason) == ("broken", "ended with code 3")
        assert failure.lines == ["about to fail"]
        assert supervisor.check() is None  # once
        assert supervisor.stop(lambda: None) == []
        assert supervisor.states() == {"broken": "lost", "good": "ended"}
    assert said(tmp_path, "good", "ends well")


def test_a_service_whose_folder_was_removed_under_it_fails_with_that_reason(tmp_path):
    logs = tmp_path / "run/logs"
    removing = scripted("broken", "first", f"import shutil; shutil.rmtree({str(logs.parent)!r}); exit(3)")
    with Supervisor([removing], logs, DEADLINES_S) as supervisor:
        wait_for(lambda: not supervisor.running)
        failure = supervisor.check()
    assert failure is not None
    assert "run/logs/ is not there any more" in failure.reason
    assert failure.lines == []


def test_a_signal_names_itself_in_the_failure(tmp_path):
    with Supervisor([scripted("killed", "first", OBEDIENT)], tmp_path, DEADLINES_S) as supervisor:
        wait_for(lambda: said(tmp_path, "killed", "up"))
        (guard,) = (c.process.pid for c in supervisor.children)
        (service,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        os.kill(int(service), signal.SIGKILL)
        wait_for(lambda: not supervisor.running)
        failure = supervisor.check()
    assert failure is not None
    assert failure.reason.startswith("was ended by SIGKILL")


def test_a_service_that_dies_of_the_sigterm_it_was_sent_has_ended(tmp_path):
    with Supervisor([scripted("plain", "first", PLAIN)], tmp_path, DEADLINES_S) as supervisor:
        wait_for(lambda: said(tmp_path, "plain", "up"))
        assert supervisor.stop(lambda: None) == []
        assert supervisor.states() == {"plain": "ended"}


def test_a_service_that_ignores_sigterm_is_killed_after_its_deadline(tmp_path):
    services = [scripted("deaf", "first", DEAF), scripted("good", "second", OBEDIENT)]
    with Supervisor(services, tmp_path, DEADLINES_S) as supervisor:
        wait_for(lambda: said(tmp_path, "deaf", "up") and said(tmp_path, "good", "up"))
        ticks: list[float] = []
        assert supervisor.stop(lambda: ticks.append(time.monotonic())) == ["deaf"]
        assert ticks[-1] - ticks[0] >= DEADLINES_S["first"] * 0.8
        assert supervisor.states() == {"deaf": "lost", "good": "ended"}


def test_the_shared_memory_of_a_service_goes_with_it_when_all_is_killed_at_once(tmp_path):
    with Supervisor([scripted("sharing", "first", SHARES_MEMORY)], tmp_path, DEADLINES_S):
        wait_for(lambda: said(tmp_path, "sharing", "shared"))
        shared = Path("/dev/shm", (tmp_path / "sharing.log").read_text().split()[1])
        assert shared.exists()
    assert not shared.exists()


def test_roles_stop_one_after_the_other(tmp_path):
    slow = OBEDIENT.replace(
        "sys.exit(0)", "time.sleep(0.5); open(__import__('os').environ['MARK'], 'w'); sys.exit(0)"
    )
    check = OBEDIENT.replace('"ends well"', "__import__('os').path.exists(__import__('os').environ['MARK'])")
    mark = {"MARK": str(tmp_path / "mark")}
    services = [
        scripted("b", "second", check, environment=mark),
        scripted("a", "first", slow, environment=mark),
    ]
    with Supervisor(services, tmp_path, DEADLINES_S) as supervisor:
        wait_for(lambda: said(tmp_path, "a", "up") and said(tmp_path, "b", "up"))
        supervisor.stop(lambda: None)
    assert said(tmp_path, "b", "True"), "the second role was told to stop before the first one had ended"


def test_a_lost_service_costs_the_run_nothing_while_another_of_its_role_lives(tmp_path):
    services = [scripted("one", "first", "raise SystemExit(1)"), scripted("two", "first", OBEDIENT)]
    with Supervisor(services, tmp_path, DEADLINES_S) as supervisor:
        wait_for(lambda: said(tmp_path, "two", "up") and len(supervisor.running) == 1)
        assert supervisor.check() is None
        assert [lost.service for lost in supervisor.lost] == ["one"]
        supervisor.children[1].kill()
        wait_for(lambda: not supervisor.running)
        failure = supervisor.check()
        assert failure is not None
        assert failure.service == "two"


def test_leaving_ends_grandchildren_in_sessions_of_their_own(tmp_path):
    with Supervisor([scripted("family", "first", WITH_GRANDCHILD)], tmp_path, DEADLINES_S):
        pid = grandchild(tmp_path, "family")
        assert alive(pid)
    wait_for(lambda: not alive(pid))


def test_what_a_service_leaves_behind_is_ended_with_it(tmp_path):
    with Supervisor([scripted("parent", "first", LEAVES_GRANDCHILD)], tmp_path, DEADLINES_S) as supervisor:
        pid = grandchild(tmp_path, "parent")
        wait_for(lambda: not supervisor.running)
        assert supervisor.states() == {"parent": "ended"}
    assert not alive(pid)


def test_sigterm_for_the_children_leaves_the_service_to_see_them_end(tmp_path):
    """As torchrun: its ranks take the signal, it waits for them and ends well."""
    code = f"""
    import subprocess, sys
    rank = subprocess.Popen([sys.executable, "-c", {textwrap.dedent(OBEDIENT)!r}])
    print("rank ended with", rank.wait(), flush=True)
    """
    service = scripted("launcher", "first", code, stop_signal_to="children")
    with Supervisor([service], tmp_path, {"first": 10.0}) as supervisor:
        wait_for(lambda: said(tmp_path, "launcher", "up"))
        assert supervisor.stop(lambda: None) == []
        assert supervisor.states() == {"launcher": "ended"}
    assert said(tmp_path, "launcher", "rank ended with 0")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphan_when_the_supervisor_dies(tmp_path, number):
    script = f"""
    import sys, time
    from pathlib import Path
    from launch.supervisor import Service, Supervisor
    service = Service("family", "first", [sys.executable, "-c", {textwrap.dedent(WITH_GRANDCHILD)!r}])
    with Supervisor([service], Path({str(tmp_path)!r}), {{"first": 1.0}}) as supervisor:
        while not supervisor.interrupts:
            time.sleep(0.05)
        supervisor.stop(lambda: None)
    """
    home = Path(__file__).parents[3]
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=home)
    pid = grandchild(tmp_path, "family")
    os.kill(process.pid, number)
    process.wait(PATIENCE_S)
    wait_for(lambda: not alive(pid))
    assert process.returncode in (-number, 0)


def test_the_second_interrupt_ends_everything_at_once(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with Supervisor([scripted("deaf", "first", DEAF)], tmp_path, {"first": 600.0}) as supervisor:
        wait_for(lambda: said(tmp_path, "deaf", "up"))
        signal.raise_signal(signal.SIGINT)
        assert supervisor.interrupts == 1
        assert supervisor.running
        pressed: list[int] = []

        def press_again() -> None:
            if not pressed:
                pressed.append(1)
                signal.raise_signal(signal.SIGINT)

        started = time.monotonic()
        supervisor.stop(press_again)
        assert time.monotonic() - started < PATIENCE_S
    assert signal.getsignal(signal.SIGINT) is before


def test_last_lines_leave_out_torchruns_own_account(tmp_path):
    log = tmp_path / "learner.log"
    log.write_text(
        "old run\nW1129 14:59:00.332000 17 torch/distributed/run.py:874] Setting OMP_NUM_THREADS\n"
        "valueless\nValueError: the reason\n"
        "E1129 15:00:00 17 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1)\n"
        "rank 1 ended with code 1\n"
    )
    told = ["valueless", "ValueError: the reason", "rank 1 ended with code 1"]
    assert last_lines(log, offset=len("old run\n")) == told
    assert last_lines(log, count=1) == told[-1:]


def test_a_rank_that_is_killed_is_told_by_name(tmp_path):
    (tmp_path / "ranks.py").write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    service = Service("value", "value", [*torchrun(2)[:-1], str(tmp_path / "ranks.py")])
    with Supervisor([service], tmp_path, DEADLINES_S) as supervisor:
        supervisor.children[0].process.wait(120)  # it imports torch
        failure = supervisor.check()
    assert failure is not None
    assert failure.lines == ["rank 1 was ended by SIGKILL (by hand, or by the kernel when memory ran out)"]


def test_a_long_line_is_cut(tmp_path):
    log = tmp_path / "server-0.log"
    log.write_text("short\n" + "x" * 100_000 + "\n")
    short, long = last_lines(log)
    assert short == "short"
    assert long == "x" * LONGEST_LINE + "… (100000 characters)"


VLLM_DIES = """old: ValueError: of the start before
(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1] ValueError: no room for the cache
(EngineCore pid=7) Process EngineCore:
Traceback (most recent call last):
  File "core_client.py", line 1, in make_client
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
2026-11-30 10:00:01,000 ERROR rollout.service: rollout server server-0 stops: vLLM does not start
"""


def test_the_cause_that_a_log_names_is_found(tmp_path):
    log = tmp_path / "server-0.log"
    log.write_text(VLLM_DIES)
    assert last_error(log) == "ValueError: no room for the cache"
    assert last_error(log, VLLM_DIES.index("Process EngineCore")) is None
    log.write_text("00:00:01 WARNING rollout.loop: gave up prompt 0/1: ValueError: passed\n")
    assert last_error(log) is None
    log.write_text("nothing\ntorch.cuda.OutOfMemoryError: 3 GiB\n")
    assert last_error(log) == "torch.cuda.OutOfMemoryError: 3 GiB"


@pytest.mark.parametrize(("lines", "told"), [(30, "ValueError: deep down"), (3, None)])
def test_a_failure_tells_the_cause_that_its_last_lines_do_not_have(tmp_path, lines, told):
    code = f"print('ValueError: deep down'); [print('line') for _ in range({lines})]; raise SystemExit(1)"
    with Supervisor([scripted("deep", "first", code)], tmp_path, DEADLINES_S) as supervisor:
        wait_for(lambda: not supervisor.running)
        failure = supervisor.check()
    assert failure is not None
    assert failure.cause == told


def test_a_full_disk_is_told_with_the_failure_that_it_may_have_caused(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.supervisor.FULL_BYTES", 1 << 62)
    with Supervisor([scripted("dies", "first", "raise SystemExit(1)")], tmp_path, DEADLINES_S) as supervisor:
        wait_for(lambda: not supervisor.running)
        failure = supervisor.check()
    assert failure is not None
    assert failure.reason == "ended with code 1; the disk of its log is full, which may be why"
