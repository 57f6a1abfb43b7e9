"""The loop stays on one screen, and the verbs say what they wait for."""

import inspect

from learner import loop
from learner.flow import Flow


def test_the_main_loop_fits_one_screen():
    assert len(inspect.getsource(loop.train).splitlines()) <= 50
    assert "try" not in inspect.getsource(loop.train)


def test_its_docstring_says_what_it_waits_for():
    for function in (loop.train, Flow.finish):
        for word in ("Consumes:", "Waits for:", "Unblocked by:"):
            assert word in (function.__doc__ or "")
