"""A plan for people, one table, and for programs, one JSON object."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from launch.experiment import WholeExperiment
from launch.overview import many
from launch.plan import GIB, Plan, RankKind
from launch.plan_changes import changes
from rollout.config import PredictionExperiment

NUMBER = 8
"""Columns of a number, in brackets."""


def print_plans(plans: Sequence[Plan], console: Console) -> int:
    """Of one experiment, or of a pipeline's stages.

    Returns: the exit code, 1 when one does not fit.
    """
    code = max(print_plan(plan, console) for plan in plans)
    if len(plans) > 1:
        wanting = [plan.experiment.name for plan in plans if plan.reasons()]
        told = (
            f"DOES NOT FIT, by its {'stages' if len(wanting) > 1 else 'stage'} {' and '.join(wanting)}"
            if wanting
            else f"FITS: each of its {len(plans)} stages does"
        )
        _quiet(console)(f"[bold {'red' if wanting else 'green'}]the pipeline {told}[/]")
    return code


def print_plan(plan: Plan, console: Console) -> int:
    """Returns: the exit code, 1 when it does not fit."""
    say = _quiet(console)
    say(
        f"[bold]{plan.experiment.name}[/]: {plan.model_bytes / _per_element(plan) / 1e9:.2f} B parameters in "
        f"{plan.experiment.model.dtype}, {plan.family.architecture}"
    )
    of = f"{plan.target.device_gib:g} GiB"
    say(f"on GPUs of {of} (--cpu: on this machine)" if plan.target.gpu else f"on one machine of {of}, no GPU")
    if ranks := "; ".join(_layouts(plan)):
        say(ranks)
    table = _table(plan)
    unlimited = console.options.update(max_width=10_000)
    if Measurement.get(console, unlimited, table).minimum <= console.width:
        console.print(table)
    else:
        for line in _lines(plan):
            say(line)
    for kind in plan.kinds:
        for note in kind.notes:
            say(f"{kind.name}: {note}")
    if seconds := ", ".join(f"{s:.1f} s at {gbit}" for gbit, s in plan.publish_seconds().items()):
        say(f"publish {plan.model_bytes / GIB:.1f} GiB a version: {seconds} Gbit/s")
    verdict, fits = _verdict(plan), not plan.reasons()
    say(f"[bold {'green' if fits else 'red'}]{verdict}[/]")
    for line in changes(plan):
        say(f"  → {line}")
    return 0 if fits else 1


def _layouts(plan: Plan) -> Iterator[str]:
    """Of the learner's ranks, and of the servers'."""
    experiment = plan.experiment
    if not isinstance(experiment, PredictionExperiment):
        learner, layout = experiment.learner, experiment.learner.parallel
        data = learner.processes // (layout.tensor * layout.pipeline)
        experts = f", expert {layout.expert}" if plan.family.mixture else ""
        yield (
            f"learner of {_ranks(learner.processes)} (tensor {layout.tensor}, pipeline {layout.pipeline}, "
            f"data {data}{experts}), micro-batches of {learner.tokens_per_microbatch} tokens"
        )
    if isinstance(experiment, WholeExperiment):
        engine, servers = experiment.rollout.engine, experiment.rollout.servers
        each = engine.tensor_parallel * engine.pipeline_parallel
        yield f"{many(servers, 'server')} of {_ranks(each)}"


def as_json(plans: Sequence[Plan]) -> str:
    """One object: the plan's, or with several `stages`, a list of them, and whether all fit."""
    told = [_fields(plan) for plan in plans]
    several = {"fits": all(each["fits"] for each in told), "stages": told}
    return json.dumps(told[0] if len(told) == 1 else several, indent=2)


def _fields(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.experiment.name,
        "parameters": plan.model_bytes // _per_element(plan),
        "devices": plan.devices,
        "fits": not plan.reasons(),
        "reasons": plan.reasons(),
        "changes": changes(plan),
        "server_host_bytes": plan.server_host_bytes,
        "published_bytes": plan.model_bytes,
        "publish_seconds_by_gbit": plan.publish_seconds(),
        "ranks": [
            {
                "kind": kind.name,
                "ranks": kind.ranks,
                "held_bytes": kind.held,
                "moments_bytes": kind.moments,
                "total_bytes": kind.total,
                "host_bytes": kind.host,
                "notes": kind.notes,
            }
            for kind in plan.kinds
        ],
    }


def _per_element(plan: Plan) -> int:
    return {"bfloat16": 2, "float32": 4}[plan.experiment.model.dtype]


def _table(plan: Plan) -> Table:
    """One column a rank kind, one row an item; the moment that takes most is in the total."""
    table = Table(title="GiB on each rank", title_justify="left", header_style="bold")
    held = dict.fromkeys(item for kind in plan.kinds for item in kind.held)
    moments = dict.fromkeys(
        (moment, item) for kind in plan.kinds for moment, items in kind.moments.items() for item in items
    )
    longest = max(map(len, (*held, *map(": ".join, moments))))
    table.add_column("", no_wrap=True, min_width=longest)
    for kind in plan.kinds:
        table.add_column(f"{kind.name}\n× {kind.ranks}", justify="right", min_width=NUMBER)
    for item in held:
        table.add_row(item, *(_gib(kind.held.get(item)) for kind in plan.kinds))
    for moment, item in moments:
        table.add_row(f"{moment}: {item}", *(_moment(kind, moment, item) for kind in plan.kinds))
    table.add_section()
    table.add_row("total, at its fullest", *(_gib(kind.total) for kind in plan.kinds), style="bold")
    if any(kind.host for kind in plan.kinds):
        hosts = (_gib(sum(kind.host.values()) or None) for kind in plan.kinds)
        table.add_row("on the host beside it", *hosts, style="dim")
    return table


def _lines(plan: Plan) -> Iterator[str]:
    """What the table says, a rank kind below the other: for a terminal that is too narrow for its columns."""
    yield "GiB on each rank"
    for kind in plan.kinds:
        yield f"[bold]{kind.name}[/] × {kind.ranks}"
        numbers = {item: _gib(size) for item, size in kind.held.items()}
        for moment, items in kind.moments.items():
            numbers |= {f"{moment}: {item}": _moment(kind, moment, item) for item in items}
        numbers["total, at its fullest"] = _gib(kind.total)
        if kind.host:
            numbers["on the host beside it"] = _gib(sum(kind.host.values()))
        for item, number in numbers.items():
            yield f"{number:>{NUMBER}} {item}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _moment(kind: RankKind, moment: str, item: str) -> str:
    """In brackets where another moment takes more, so that it is not in the total."""
    size = kind.moments.get(moment, {}).get(item)
    return _gib(size) if size is None or moment == kind.peak else f"({_gib(size)})"


def _gib(size: float | None) -> str:
    return "–" if size is None else f"{size / GIB:.2f}"


def _verdict(plan: Plan) -> str:
    reasons = plan.reasons()
    if reasons:
        return f"DOES NOT FIT: {'; '.join(reasons)}"
    if not plan.target.gpu:
        return f"FITS: all ranks take {plan.total / GIB:.1f} of {plan.target.device_gib:g} GiB"
    fullest = max(plan.kinds, key=lambda kind: kind.total)
    there = plan.target.devices
    counted = f"{plan.devices}{f' of {there}' if there else ''} device{'s' * ((there or plan.devices) != 1)}"
    gib = plan.server_host_bytes / GIB
    host = (
        f"; the host of a server must have {gib:.0f} GiB to stage a version on each of its ranks"
        if gib
        else ""
    )
    return (
        f"FITS: {counted}; {fullest.name} is the fullest with "
        f"{fullest.total / GIB:.1f} of {plan.target.device_gib:g} GiB{host}"
    )


def _quiet(console: Console) -> Any:
    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    return say
