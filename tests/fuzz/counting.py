"""How many examples each target gets and has had: its share of FUZZ_EXAMPLES behind faults of its own."""

import os
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, given, settings

TOTAL = int(os.environ.get("FUZZ_EXAMPLES", "400"))
"""Of all targets together, by their shares."""
SHARES: dict[str, float] = {}
COUNTS: Counter[str] = Counter()


def fuzzed(
    share: float, *strategies: Any, faults: Iterable[tuple[Any, ...]] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of so many thousandths of all examples, the same ones in every run of the same number.

    Args:
        faults: Examples that are tried in every run, however short: what chance alone seldom comes upon.
    """

    faults = tuple(faults)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__.removeprefix("test_")
        SHARES[name] = share

        def counted(*values: Any) -> None:
            COUNTS[name] += 1
            function(*values)

        run = settings(
            max_examples=max(3, round(TOTAL * share / 1000)),
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )(given(*strategies)(_of_arity(counted, len(strategies))))

        def all_of_them() -> None:
            for values in faults:
                try:
                    counted(*values)
                except BaseException as error:
                    error.add_note(f"at {values!r:.2000}")
                    raise
            run()

        all_of_them.__name__, all_of_them.__doc__ = function.__name__, function.__doc__
        all_of_them.__module__ = function.__module__
        return all_of_them

    return decorate


def _of_arity(function: Callable[..., None], count: int) -> Callable[..., None]:
    """hypothesis counts the parameters that it is to fill."""
    if count == 1:
        return lambda value: function(value)
    if count == 2:
        return lambda value, other: function(value, other)
    return lambda value, other, third: function(value, other, third)


@contextmanager
def within(kib: int) -> Any:
    """Less memory than that is taken at any time, by Python and numpy."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < kib << 10, f"{peak >> 10} KiB"
