"""The whole experiment: every section at once, and the checks that need more than one of them.

Each service reads its own sections; the command line reads all of them before it starts any, so that a
mistake in the learner's section is told in a second and not after the engine has loaded.
"""

from collections.abc import Collection, Iterable, Mapping
from glob import glob
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import yaml

from buffer.config import BufferConfig, BufferExperiment
from buffer.config_errors import placed, shown
from buffer.dotted import fault, is_dotted
from buffer.experiment import (
    BlendSource,
    ConfigError,
    DataConfig,
    EvalConfig,
    Experiment,
    FilesSource,
    FunctionSource,
    JsonlSource,
    LoggingConfig,
    ModelConfig,
    PromptSource,
    SecurityConfig,
    SingleSource,
    load,
)
from buffer.experiment_file import merged
from buffer.keys import KeysError, check_keys
from buffer.processor import has_gpu
from buffer.router import unguarded
from launch import model_folder
from learner import families
from learner.config import LearnerConfig, LearnerExperiment, OwnRanks, TrainingConfig
from learner.offline.config import OfflineExperiment
from rollout.config import (
    EngineConfig,
    FunctionReward,
    ModelReward,
    PredictionExperiment,
    RolloutConfig,
    RolloutExperiment,
    engine_faults,
)
from rollout.scorer import folder
from rollout.scorer.folder import model_reward
from sync.addresses import host_of
from sync.config import SyncConfig

SERVICES = ("buffer", "rollout", "scorer", "learner", "reference", "value")

ANY_PORT = (
    "port 0 is whichever is free, and the other services could not know which; set a fixed one (only "
    "`slipstream run`, which starts them all, takes 0)"
)

MOVE_IT = "move it away to go on with the run, or take another run_dir"

SCHEMAS = (BufferExperiment, RolloutExperiment, LearnerExperiment)
"""What the services read: each has checks of its own, which then cannot surprise after the start."""


class WholeExperiment(Experiment):
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    buffer: BufferConfig = BufferConfig()
    learner: LearnerConfig = LearnerConfig()
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig | None = None
    security: SecurityConfig = SecurityConfig()
    logging: LoggingConfig = LoggingConfig()


def reward_models(e: WholeExperiment | PredictionExperiment) -> dict[str, ModelReward]:
    """Those that are computed, by name: each has a scorer."""
    rewards = e.rollout.rewards.items()
    return {name: r for name, r in rewards if isinstance(r, ModelReward) and r.weight != 0}


def apart(learner: LearnerConfig) -> dict[str, OwnRanks]:
    """Models with ranks of their own beside the learner's, by the service that holds them."""
    value = learner.value.ranks if learner.value is not None else None
    jobs = {"reference": learner.reference, "value": value}
    return {service: of for service, of in jobs.items() if of is not None}


def _lengths(e: WholeExperiment) -> list[str]:
    limits = {"rollout.sampling.max_tokens": e.rollout.sampling.max_tokens}
    if e.eval and e.eval.max_tokens:
        limits["eval.max_tokens"] = e.eval.max_tokens
    return [
        f"{key}={value} leaves no room for a prompt in model.max_length={e.model.max_length}; "
        f"lower it or raise model.max_length"
        for key, value in limits.items()
        if value >= e.model.max_length
    ]


def _shards(e: WholeExperiment) -> list[str]:
    ranks = e.learner.processes // (e.learner.parallel.tensor * e.learner.parallel.pipeline)
    if e.buffer.groups_per_batch < ranks:
        return [
            f"buffer.groups_per_batch={e.buffer.groups_per_batch} is fewer than the learner's {ranks} "
            "data-parallel ranks; each needs at least one group"
        ]
    return []


def addresses(e: WholeExperiment) -> dict[str, str]:
    """Where each service listens, by the key that says so."""
    scorers = {f"rollout.rewards.{name}.address": r.address for name, r in reward_models(e).items()}
    jobs = {f"{job.KEY}.address": job.address for job in apart(e.learner).values()}
    return {"buffer.address": e.buffer.address, "sync.address": e.sync.address, **scorers, **jobs}


def _addresses(e: WholeExperiment) -> list[str]:
    return [
        f"{first} and {second} are both {address}; give each service a port of its own"
        for (first, address), (second, other) in combinations(addresses(e).items(), 2)
        if address == other and not address.endswith(":0")
    ]


def _is_address(text: str) -> bool:
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    return text.startswith("tcp://") and bool(host) and port.isdecimal() and int(port) <= 65535


def _reach(e: WholeExperiment) -> list[str]:
    """Addresses that nobody may listen at without keys; and keys where they would be passed on."""
    keys = e.security.keys
    if keys is None:
        return [
            told
            for key, address in addresses(e).items()
            if _is_address(address) and (told := unguarded(key, address))
        ]
    if Path(e.run_dir).resolve() in (Path(keys).resolve(), *Path(keys).resolve().parents):
        return [f"security.keys={keys}: lies in run_dir={e.run_dir}, which is for others to read; move it"]
    try:
        host_of(e.sync.address)
    except ValueError as error:
        return [str(error)]
    return []


REACHES = {
    "buffer": ("buffer.",),
    "learner": ("buffer.", "sync.", "learner.reference.", "learner.value."),
    "reference": ("buffer.", "learner.reference."),
    "value": ("buffer.", "learner.value."),
    "rollout": ("buffer.", "sync.", "rollout.rewards."),
    "scorer": ("rollout.rewards.",),
}
"""Whose addresses a service binds or connects to."""


def _ports(e: WholeExperiment, services: Collection[str]) -> list[str]:
    """Addresses that the services which start here could not be told of each other, or that are none."""
    together = set(services) in (set(), set(SERVICES))
    used = tuple(prefix for service in services for prefix in REACHES[service])
    reasons: list[str] = []
    for key, address in addresses(e).items():
        if not _is_address(address):
            reasons.append(f"{key}={address}: expected tcp://HOST:PORT")
        elif address.endswith(":0") and not together and key.startswith(used):
            reasons.append(f"{key}={address}: {ANY_PORT}")
    return reasons


def _prompts(e: WholeExperiment | OfflineExperiment) -> dict[str, SingleSource]:
    return _single({"data.train": e.data.train} | ({"eval.source": e.eval.source} if e.eval else {}))


def _texts(e: WholeExperiment) -> dict[str, SingleSource]:
    return _single({"learner.ptx.data": e.learner.ptx.data} if e.learner.ptx else {})


def _single(sources: Mapping[str, PromptSource]) -> dict[str, SingleSource]:
    """Every source under its key, the parts of blends each by itself."""
    found: dict[str, SingleSource] = {}
    for key, source in sources.items():
        if isinstance(source, BlendSource):
            found |= {f"{key}.parts.{i}.source": part.source for i, part in enumerate(source.parts)}
        else:
            found[key] = source
    return found


def _functions(e: WholeExperiment) -> dict[str, dict[str, str]]:
    """The user's functions under their keys, by the service that calls them."""
    learner, priority = e.learner, e.buffer.priority or ""
    called = {
        "learner.algorithm.loss": learner.algorithm.loss,
        "learner.algorithm.advantage": learner.algorithm.advantage,
        "learner.loop": learner.loop,
    }
    rewards = {
        f"rollout.rewards.{name}.function": reward.function
        for name, reward in e.rollout.rewards.items()
        if isinstance(reward, FunctionReward) and reward.weight != 0
    }
    episode = {"rollout.episode": e.rollout.episode} if e.rollout.episode else {}
    texts = _paths(_texts(e))
    return {
        "buffer": _paths(_prompts(e)) | ({"buffer.priority": priority} if is_dotted(priority) else {}),
        "rollout": rewards | episode,
        "learner": texts | {key: path for key, path in called.items() if path and is_dotted(path)},
    }


def _paths(sources: Mapping[str, SingleSource]) -> dict[str, str]:
    made = {f"{key}.path": s.path for key, s in sources.items() if isinstance(s, FunctionSource)}
    read = {f"{key}.adapter": str(getattr(s, "adapter", "")) for key, s in sources.items()}
    return made | {key: path for key, path in read.items() if ":" in path}


def _sources(e: WholeExperiment) -> list[str]:
    return [
        f"{key}={path}: expected package.module:function"
        for of in _functions(e).values()
        for key, path in of.items()
        if not is_dotted(path)
    ]


def _unknown_functions(e: WholeExperiment, services: Iterable[str]) -> list[str]:
    """Only where the service starts: another machine may lack the module."""
    return _faults({k: p for name, of in _functions(e).items() if name in services for k, p in of.items()})


def unknown_readers(e: OfflineExperiment) -> list[str]:
    """Functions that read a stage's rows, and are none."""
    return _faults(_paths(_prompts(e)))


def _faults(called: Mapping[str, str]) -> list[str]:
    faults = {key: fault(path, key == "rollout.episode") for key, path in called.items() if is_dotted(path)}
    return [f"{key}={called[key]}: {reason}" for key, reason in faults.items() if reason]


def _keys(e: WholeExperiment, services: Iterable[str]) -> list[str]:
    """What is wrong with the keys of the services that start here."""
    absent = set() if reward_models(e) else {"scorer"}
    absent |= {"reference", "value"} - set(apart(e.learner))
    try:
        check_keys(e.security.keys, [s for s in services if s not in absent])
    except KeysError as error:
        return [f"security.keys={e.security.keys}: {error}"]
    return []


def _scored_lengths(e: WholeExperiment) -> list[str]:
    return [
        f"rollout.rewards.{name}.max_length={reward.max_length} is below model.max_length="
        f"{e.model.max_length}: longer completions could not be scored"
        for name, reward in reward_models(e).items()
        if folder.longest(e.model, reward) < e.model.max_length
    ]


def own_models(e: WholeExperiment | OfflineExperiment) -> list[str]:
    """Models to start from that the run would replace by its own."""
    value = e.learner.value if isinstance(e.learner, LearnerConfig) else None
    named = {"model.path": e.model.path} | ({"learner.value.path": value.path} if value is not None else {})
    written = {(Path(e.run_dir) / name).resolve() for name in ("model", "ema_model", "value_model")}
    return [
        f"{key}={path}: where run_dir={e.run_dir} has its own trained model written; take another run_dir to "
        "train on from it"
        for key, path in named.items()
        if Path(path).resolve() in written
    ]


CHECKS = (_lengths, _shards, _addresses, _reach, _sources, _scored_lengths, own_models)


def read(path: str | Path, overrides: list[str], services: Collection[str] = SERVICES) -> WholeExperiment:
    """Read and check everything that can be checked without loading the model.

    Args:
        path: The experiment file.
        overrides: `section.key=value` texts.
        services: Those about to start here; only the files that they read must exist on this machine.

    Raises:
        ConfigError: One line per mistake.
    """
    check_kind(path, overrides, "run")
    experiment = load(path, overrides, WholeExperiment)
    for schema in SCHEMAS:
        load(path, overrides, schema)
    reasons = [reason for check in CHECKS for reason in check(experiment)]
    reasons += _ports(experiment, services) + _unknown_functions(experiment, services)
    reasons += _keys(experiment, services)
    if "buffer" in services:
        reasons += missing_rows(experiment)
    if "rollout" in services:
        reasons += engine_reasons(
            "rollout.engine", experiment.rollout.engine, "model.path", experiment.model.path
        )
    if {"rollout", "learner", "reference", "value"} & set(services):
        reasons += _models(experiment, services)
    if "learner" in services:
        reasons += _missing(_texts(experiment))
    if {"learner", "reference"} & set(services):
        reasons += missing_start(experiment.learner)
    if "scorer" in services:
        for name, reward in reward_models(experiment).items():
            reasons += scorer_faults(experiment, name, reward)
    if reasons:
        raise ConfigError("\n".join(placed(path, overrides, reason) for reason in reasons))
    return experiment


Kind = Literal["run", "stage", "pipeline"]


def kind_of(path: str | Path, overrides: list[str]) -> tuple[Kind, str] | None:
    """What kind of file it is, by what that kind alone has, and a word on it; None where nothing tells.

    Raises:
        ConfigError: It cannot be read.
    """
    found = merged(Path(path), overrides)
    stage = found.get("stage")
    if "stages" in found:
        return "pipeline", "stages: of a pipeline's file, which `slipstream pipeline` runs"
    if isinstance(stage, dict) and stage.get("kind") in ("sft", "reward", "dpo"):
        return "stage", f"stage: of an offline stage's file, which `slipstream {stage['kind']}` runs"
    if "rollout" in found and "stage" not in found:
        return "run", "rollout: of a reinforcement learning file, which `slipstream run` runs"
    return None


def check_kind(path: str | Path, overrides: list[str], wanted: Kind) -> None:
    """Tell other kinds of files by what they alone have.

    Raises:
        ConfigError: It is one, with the command for it.
    """
    found = kind_of(path, overrides)
    if found is not None and found[0] != wanted:
        raise ConfigError(f"{path}: {found[1]}")


def _models(e: WholeExperiment, services: Iterable[str]) -> list[str]:
    """Of the policy, of the value model, and of the reference."""
    path, length, reference, value = e.model.path, e.model.max_length, e.learner.reference, e.learner.value
    layout = e.learner.parallel if "learner" in services else None
    found = model_folder.trained("model.path", path, length, layout)
    if reference is not None and not found and {"learner", "reference"} & set(services):
        try:
            families.read(path).check_layout(reference.parallel, "learner.reference.parallel")
        except ValueError as error:
            found = [f"model.path={path}: {error}"]
    if value is not None and {"learner", "value"} & set(services):
        of, key = (value.ranks, value.ranks.KEY) if value.ranks is not None else (None, "learner")
        found += model_folder.trained(
            "learner.value.path",
            value.path,
            length,
            of.parallel if of is not None else layout,
            head="score",
            tokenizer=False,
            layout_key=f"{key}.parallel",
        )
        found += model_folder.same_words("learner.value.path", value.path, path)
    return found


def scorer_faults(e: WholeExperiment, name: str, reward: ModelReward) -> list[str]:
    """Why the scorer of a reward model could not serve it here."""
    key = f"rollout.rewards.{name}"
    found = folder.faults(f"{key}.model", reward.model, folder.longest(e.model, reward))
    found = found or model_folder.served(f"{key}.model", reward.model, scores=True)
    return found + engine_reasons(f"{key}.engine", reward.engine, f"{key}.model", reward.model)


def engine_reasons(key: str, engine: EngineConfig, model_key: str, model: str) -> list[str]:
    """Why an engine could not serve a model here, one line each.

    Args:
        key: Of the engine's section.
        engine: The section.
        model_key: The setting that names the model's folder.
        model: The folder.
    """
    heads = [] if has_gpu() else model_folder.heads_on_cpu(model_key, model)
    return engine_faults(key, engine) + model_folder.shared(key, engine.tensor_parallel, model) + heads


def check_scorer(path: str | Path, overrides: list[str], name: str) -> None:
    """Read and check what the scorer of one reward model needs here.

    Raises:
        ConfigError: One line per mistake.
    """
    experiment = read(path, overrides, [])
    reward = model_reward(experiment.rollout, experiment.model, name)
    reasons = _ports(experiment, ["scorer"]) + scorer_faults(experiment, name, reward)
    if reasons:
        raise ConfigError("\n".join(placed(path, overrides, reason) for reason in reasons))


def missing_rows(e: WholeExperiment | OfflineExperiment) -> list[str]:
    return _missing(_prompts(e))


def _missing(sources: Mapping[str, SingleSource]) -> list[str]:
    reasons: list[str] = []
    for key, source in sources.items():
        if isinstance(source, JsonlSource | FilesSource):
            for path in [source.path] if isinstance(source.path, str) else source.path:
                if not Path(path).exists() and not glob(path):
                    reasons.append(f"{key}.path={path}: no such file")
                elif isinstance(source, JsonlSource) and Path(path).is_dir():
                    reasons.append(f"{key}.path={path}: a folder; expected a file of one JSON object a line")
    return reasons


def missing_start(learner: TrainingConfig) -> list[str]:
    path = learner.init_from
    if path is None or (Path(path) / "meta.json").is_file():
        return []
    return [f"learner.init_from={path}: no meta.json in it, expected a checkpoint of `slipstream convert`"]


def resolved(path: Path) -> dict[str, Any]:
    """The experiment of a run's folder, as it was written there.

    Raises:
        ValueError: It is not what was written there.
    """
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{path}: cannot be read: {' '.join(str(error).split())}; {MOVE_IT}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not an experiment as `slipstream run` writes it; {MOVE_IT}")
    return found


def differences(old: dict, new: dict, prefix: str = "") -> list[str]:
    """What changed between two resolved experiments, as `key old → new`."""
    found: list[str] = []
    for key in sorted(old.keys() | new.keys(), key=str):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            old_value, new_value = (v if isinstance(v, str) else shown(v) for v in (before, after))
            found.append(f"{prefix}{key} {old_value} → {new_value}")
    return found


def dump(experiment: Experiment) -> str:
    """The resolved experiment as YAML: every key with its value, defaults too."""
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
