"""Bytes for one reader, made by libFuzzer: what reaches a branch that none reached before is kept and varied.

    python tests/fuzz/coverage_guided.py groups -runs=100000 -seed=1 FOLDER     beginning with what lies in it
    python tests/fuzz/coverage_guided.py groups FILE                            what was found, once more

`test_coverage_guided.py` runs it, a process for each reader: libFuzzer ends the one that it is in.
"""

import random
import sys
from contextlib import suppress
from typing import Any

import atheris
import msgpack
from mutations import OF_EACH_KIND, packed

with atheris.instrument_imports(include=["buffer", "learner", "rollout", "sync"]):
    from readers import READERS, SEAM


def varied(raw: bytes, longest: int, seed: int) -> bytes:
    """Mostly in a value, so that the rest of a header stays one; else wherever libFuzzer will."""
    rng = random.Random(seed)
    if rng.random() < 0.8:
        frames = raw.split(SEAM)
        place = rng.randrange(len(frames))
        with suppress(ValueError, msgpack.UnpackException, RecursionError):
            frames[place] = packed(changed(msgpack.unpackb(frames[place]), rng))
            if len(other := SEAM.join(frames)) <= longest:
                return other
    return atheris.Mutate(raw, longest)


def changed(tree: Any, rng: random.Random) -> Any:
    """With another value in one place."""
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.1:
        return rng.choice(OF_EACH_KIND)
    place = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
    tree[place] = changed(tree[place], rng)
    return tree


if __name__ == "__main__":
    reader = READERS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, reader.check, custom_mutator=varied)
    atheris.Fuzz()
