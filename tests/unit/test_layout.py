"""The house rules that a machine can check."""

import ast
import gc
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from buffer.experiment import Experiment, ModelConfig, load
from launch.demo_model import MODEL_DIR
from launch.experiment import WholeExperiment, addresses
from launch.pipeline import PipelineConfig
from learner.layout_config import ReferenceConfig, ValueRanksConfig
from learner.offline.config import OfflineExperiment

HOME = Path(__file__).parents[2]
HOUSES = ("buffer", "sync", "learner", "rollout", "launch")
HEAVY = ("torch", "vllm", "megatron", "transformers", "matplotlib")
LIGHT = [
    ".".join(path.relative_to(HOME).with_suffix("").parts)
    for house in HOUSES
    for path in sorted((HOME / house).rglob("*.py"))
    if path.stem != "__main__" and (path.parent.name == "buffer" or path.stem in ("wire", "config"))
]
LOOPS = {
    "rollout/loop.py",
    "learner/loop.py",
    "learner/flow.py",
    "learner/offline/loop.py",
    "buffer/server.py",
    "launch/local.py",
    "launch/offline.py",
}
LONGEST_LOOP = 50
LONGEST_FUNCTION = 60
FORBIDDEN_NAMES = ("utils", "helpers", "common", "misc")
PICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
PICKLING_CALLS = {
    *("broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list"),
    *("all_gather_object", "gather_object", "send_pyobj", "recv_pyobj", "read_pickle", "unsafe_load"),
}
"""By another library's hand: torch.distributed's, ZeroMQ's, pandas', yaml's."""


def sources() -> list[Path]:
    return sorted(path for house in HOUSES for path in (HOME / house).rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    """Its tree, made with the collector off.

    Python 3.11.7 has one count of depth for all trees of a process: where the collector runs in the midst and
    an object that another test left, or its thread, makes a tree too, it raises `SystemError: AST constructor
    recursion depth mismatch` (python/cpython issue 106905).
    """
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


ENTRIES = ("launch.cli", "launch.local", "launch.screen", "launch.offline")
PLANNING = (
    "launch.plan",
    "launch.plan_changes",
    "launch.plan_screen",
    "launch.plan_stages",
    "launch.tuning_screen",
)


@pytest.mark.parametrize("module", [*LIGHT, *ENTRIES, *PLANNING])
def test_what_must_be_light_imports_nothing_heavy(module):
    script = f"import sys, {module}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=HOME, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


@pytest.mark.parametrize("house", HOUSES)
def test_our_packages_are_the_ones_that_python_finds(house):
    """From elsewhere too: the names are short, and another distribution's would be found instead."""
    script = f"import {house}; print({house}.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd="/", capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).parent == HOME / house


def test_no_other_distribution_claims_our_names():
    for house in HOUSES:
        claimed = importlib.metadata.packages_distributions().get(house, ["slipstream-rl"])
        assert set(claimed) == {"slipstream-rl"}, house
    spec = importlib.util.find_spec("buffer")
    assert spec is not None
    assert spec.origin == str(HOME / "buffer" / "__init__.py")


class WithModel(Experiment):
    model: ModelConfig


CONFIGS = sorted((HOME / "configs").glob("**/*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_is_an_experiment(path):
    text = path.read_text()
    if "\nstages:" in text:
        assert load(path, [], PipelineConfig, tuple(PipelineConfig.model_fields)).name == path.stem
        return
    schema = OfflineExperiment if "\nstage:" in text else WholeExperiment
    assert load(path, [], schema).name == path.stem


@pytest.mark.parametrize(
    "path", [p for p in CONFIGS if "\nstages:" not in p.read_text()], ids=lambda p: p.stem
)
def test_the_model_of_a_config_is_one_that_a_page_makes_or_the_repository_has(path, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_MODEL", raising=False)
    model = HOME / load(path, [], WithModel).model.path
    assert model in (HOME / MODEL_DIR, *(HOME / "configs/shapes").iterdir())


@pytest.mark.parametrize("path", [p for p in CONFIGS if "\nstage" not in p.read_text()], ids=lambda p: p.stem)
def test_no_two_services_of_a_config_listen_at_one_address(path):
    """Nor does one listen where a job does that an override adds."""
    added = {
        f"{of.KEY}.address": of.model_fields["address"].default for of in (ReferenceConfig, ValueRanksConfig)
    }
    found = (added | addresses(load(path, [], WholeExperiment))).values()
    fixed = [address for address in found if not address.endswith(":0")]
    assert len(set(fixed)) == len(fixed), fixed


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_main_loops_fit_one_screen(loop):
    functions = functions_of(HOME / loop)
    loops = [
        f for f in functions if any(isinstance(n, ast.While | ast.For | ast.AsyncFor) for n in ast.walk(f))
    ]
    assert loops, f"{loop} has no loop"
    for function in loops:
        assert length(function) <= LONGEST_LOOP, f"{loop}: {function.name} has {length(function)} lines"


def test_functions_fit_one_screen():
    long = [
        f"{path.relative_to(HOME)}: {f.name} has {length(f)} lines"
        for path in sources()
        for f in functions_of(path)
        if length(f) > LONGEST_FUNCTION
    ]
    assert long == []


def test_files_are_nouns():
    named = [str(p.relative_to(HOME)) for p in sources() if p.stem in FORBIDDEN_NAMES]
    assert named == []


def test_nothing_is_unpickled():
    """Not even by a default: torch.load says weights_only itself."""
    found: list[str] = []
    for path in sources():
        for node in ast.walk(parsed(path)):
            names = imported(node)
            if names & PICKLERS:
                found.append(f"{path.relative_to(HOME)}:{getattr(node, 'lineno', 0)}: {names}")
            if isinstance(node, ast.Attribute | ast.Name | ast.alias | ast.keyword):
                word = next(getattr(node, f) for f in ("attr", "id", "name", "arg") if hasattr(node, f))
                if word in PICKLING_CALLS or (word == "allow_pickle" and ast.unparse(node.value) != "False"):
                    found.append(f"{path.relative_to(HOME)}:{node.lineno}: {word}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                if not safe:
                    found.append(
                        f"{path.relative_to(HOME)}:{node.lineno}: torch.load without weights_only=True"
                    )
    assert found == []


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {(node.module or "").partition(".")[0]}
    return set()


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = parsed(path)
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body; the signature and the docstring are not what has to be understood at a glance."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0
