"""Which processes make up a run on one machine, and what each of them gets of it."""

import sys
from dataclasses import dataclass
from pathlib import Path

from buffer.processor import COMPUTING_ENVIRONMENT
from launch.experiment import WholeExperiment, apart, reward_models
from launch.placement import split_cores, split_gpus, usable_cores, visible_gpus
from launch.supervisor import Service
from learner.config import LearnerConfig, OwnRanks
from rollout.config import EngineConfig

JOBS = {
    "reference": ("learner.reference", "learner.reference"),
    "value": ("learner.value", "learner.value.ranks"),
    "learner": ("learner", "learner"),
}
"""Service → its module and its section, of those that torchrun starts."""
SHUTDOWN_S = 600
"""After Ctrl-C torchrun kills the ranks when this is over; its own 30 s are less than many a step."""


def plan_services(e: WholeExperiment, config: Path) -> list[Service]:
    """The processes to start, with their shares of cores and GPUs."""
    engines = _engines(e)
    jobs = training_jobs(e)
    ranks = sum(job.processes for job in jobs.values())
    cores = split_cores(usable_cores(), [engine.ranks for engine in engines], ranks)
    shares = gpu_shares(e)
    visible = [{"CUDA_VISIBLE_DEVICES": s} for s in shares or []] or [{}] * (len(engines) + len(jobs))
    nowhere = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    services = [Service("buffer", "buffer", _python("buffer", config), nowhere)]
    for engine, bind, environment in zip(engines, cores.engines, visible, strict=False):
        command = _python(engine.module, config, "--name", engine.name)
        if bind and engine.config.cores is None and not visible_gpus():
            command.append(f"{engine.key}.cores={bind}")
        services.append(Service(engine.service, engine.role, command, environment))
    for (name, job), environment in zip(jobs.items(), visible[len(engines) :], strict=True):
        threads = job.threads or cores.learner_threads
        services.append(_job(name, config, job.processes, threads, environment))
    return services


@dataclass(frozen=True)
class Engine:
    """A server or a scorer: one vLLM with ranks of its own."""

    module: str
    name: str
    service: str
    role: str
    key: str
    """Of its section."""
    config: EngineConfig

    @property
    def ranks(self) -> int:
        return self.config.tensor_parallel * self.config.pipeline_parallel


def _engines(e: WholeExperiment) -> list[Engine]:
    """The servers, then the scorers."""
    names = [f"server-{i}" for i in range(e.rollout.servers)]
    servers = [Engine("rollout", name, name, "rollout", "rollout.engine", e.rollout.engine) for name in names]
    scorers: list[Engine] = []
    for name, reward in reward_models(e).items():
        # A role of its own: no other reward's scorer can stand in for it.
        service, key = f"scorer-{name}", f"rollout.rewards.{name}.engine"
        scorers.append(Engine("rollout.scorer", name, service, service, key, reward.engine))
    return servers + scorers


def training_jobs(e: WholeExperiment) -> dict[str, OwnRanks | LearnerConfig]:
    """The section of each torchrun job here, the learner last."""
    return {**apart(e.learner), "learner": e.learner}


def gpu_shares(e: WholeExperiment) -> list[str] | None:
    """CUDA_VISIBLE_DEVICES of each engine, then of each torchrun job; None when there are too few GPUs for
    that."""
    jobs = (job.processes for job in training_jobs(e).values())
    return split_gpus(visible_gpus(), [*(engine.ranks for engine in _engines(e)), *jobs])


def _job(name: str, config: Path, processes: int, threads: int, environment: dict[str, str]) -> Service:
    """A torchrun job of the learner's code."""
    module, section = JOBS[name]
    overrides: list[str] = []
    if not visible_gpus():
        overrides = [f"{section}.threads={threads}"]
        environment = environment | COMPUTING_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    command = [*torchrun(processes), module, str(config), *overrides]
    return Service(name, name, command, environment, stop_signal_to="children")


def torchrun(processes: int) -> list[str]:
    """The command that runs a module as the ranks of one job here; the module's name comes next."""
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(processes)]
    options += ["--shutdown-timeout", str(SHUTDOWN_S)]
    return [sys.executable, "-m", "learner.torchrun", *options, "-m"]


def _python(module: str, config: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", module, str(config), *more]
