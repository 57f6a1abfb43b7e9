"""Sums of what servers count, over servers that come, go and start again."""

from sync.tally import Tally
from sync.wire import COUNTED


def test_the_sums_are_of_all_servers_from_their_first_word_on():
    tally = Tally()
    tally.hear("a", {"tokens": 1000, "waiting_s/leases": 60.0})  # before anybody listened
    assert tally.sums() == dict.fromkeys(COUNTED, 0)
    tally.hear("a", {"tokens": 1100, "waiting_s/leases": 61.5})
    tally.hear("b", {"tokens": 7})
    tally.hear("b", {"tokens": 27})
    assert tally.sums() == dict.fromkeys(COUNTED, 0) | {"tokens": 120, "waiting_s/leases": 1.5}


def test_a_server_that_started_again_takes_nothing_away():
    tally = Tally()
    tally.hear("a", {"tokens": 0, "wasted_tokens": 0})
    tally.hear("a", {"tokens": 500, "wasted_tokens": 40})
    tally.hear("a", {"tokens": 3, "wasted_tokens": 0})
    assert (tally.sums()["tokens"], tally.sums()["wasted_tokens"]) == (500, 40)
    tally.hear("a", {"tokens": 13, "wasted_tokens": 2})
    assert (tally.sums()["tokens"], tally.sums()["wasted_tokens"]) == (510, 42)


def test_what_a_server_counts_while_it_is_no_member_is_added_when_it_is_back():
    tally = Tally()
    tally.hear("a", {"wasted_tokens": 10})
    tally.hear("a", {"wasted_tokens": 90})
    assert tally.sums()["wasted_tokens"] == 80
