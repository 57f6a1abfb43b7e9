import socket
import subprocess
import sys

import pytest

from launch.placement import free_port, port_is_free, settle_address, split_cores, split_gpus


@pytest.fixture
def busy_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


def test_two_cores_are_shared_not_split():
    cores = split_cores([0, 1], [1], processes=1)
    assert cores.engines == (None,)
    assert cores.learner_threads == 2


def test_ranks_on_two_cores_get_one_thread_each_and_never_none():
    assert split_cores([0, 1], [1], processes=2).learner_threads == 1
    assert split_cores([0, 1], [1], processes=4).learner_threads == 1


def test_many_cores_are_halved_between_engines_and_learner():
    cores = split_cores(list(range(16)), [1, 1], processes=2)
    assert cores.engines == ("0-3", "4-7")
    assert cores.learner_threads == 4


def test_ranks_of_one_server_get_cores_of_their_own():
    assert split_cores(list(range(8)), [2], processes=1).engines == ("0-1|2-3",)


def test_a_scorer_has_as_many_ranks_as_it_likes():
    cores = split_cores(list(range(16)), [1, 2, 1], processes=1)
    assert cores.engines == ("0-1", "2-3|4-5", "6-7")
    assert cores.learner_threads == 8


def test_cores_with_gaps_are_listed():
    assert split_cores([0, 2, 4, 6], [1], 1).engines == ("0,2",)


def test_more_servers_than_half_the_cores_share_all():
    assert split_cores(list(range(4)), [1] * 3, processes=1).engines == (None,) * 3


def test_gpus_go_to_the_engines_first_then_to_the_learner():
    assert split_gpus(["0", "1", "2", "3", "4"], [2, 1, 2]) == ["0,1", "2", "3,4"]
    assert split_gpus(["0"], [1, 1]) is None


def test_a_free_port_stays(busy_port):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{free}"
    taken: set[str] = set()
    assert settle_address("buffer.address", address, taken) == address
    assert taken == {address}


def test_a_taken_port_on_loopback_is_replaced_by_a_free_one(busy_port):
    found = settle_address("buffer.address", f"tcp://127.0.0.1:{busy_port}", set())
    port = int(found.rpartition(":")[2])
    assert port != busy_port
    assert port_is_free("127.0.0.1", port)


def test_a_port_that_another_run_was_given_is_taken_before_its_service_listens(busy_port):
    port = free_port("127.0.0.1")
    give = (
        "import sys; from launch.placement import settle_address as s; "
        "print(s('sync.address', sys.argv[1], set()), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", give, f"tcp://127.0.0.1:{port}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin
        assert other.stdout
        assert other.stdout.readline().strip() == command[-1]
        assert settle_address("sync.address", command[-1], set()) != command[-1]
        other.stdin.close()
    assert settle_address("sync.address", command[-1], set()) == command[-1]
    assert settle_address("sync.address", command[-1], set()) == command[-1], "its own it may have again"


def test_two_services_never_get_the_same_address():
    taken: set[str] = set()
    first = settle_address("buffer.address", "tcp://127.0.0.1:0", taken)
    assert settle_address("sync.address", first, taken) != first


def test_a_taken_port_that_other_hosts_know_is_refused(busy_port):
    told = rf"buffer.address=tcp://0.0.0.0:{busy_port}: cannot listen there: .* port {busy_port} is taken"
    with pytest.raises(ValueError, match=told):
        settle_address("buffer.address", f"tcp://0.0.0.0:{busy_port}", set())


@pytest.mark.parametrize(
    "address", ["127.0.0.1:5701", "tcp://localhost", "tcp://localhost:99999", "tcp://:1"]
)
def test_a_malformed_address_says_what_was_expected(address):
    with pytest.raises(ValueError, match="expected tcp://HOST:PORT"):
        settle_address("sync.address", address, set())
