"""`RUN_DIR/report/`: plots, completions before and after, and the summary for people and for programs."""

from collections.abc import Iterable
from pathlib import Path

from launch.history import History, Record
from launch.offline_report import StageSummary, write_stage_report
from launch.plots import draw_all
from launch.summary import Summary, read_config, summarize

PROMPTS_SHOWN = 12
LONGEST_TEXT = 600
"""Characters of a completion that are shown."""


def write_report(run_dir: Path) -> Summary | StageSummary:
    """Write or rewrite the report of a run or of an offline stage, finished or not.

    Raises:
        ValueError: The folder holds no run.
    """
    config = read_config(run_dir)
    if "stage" in config:
        return write_stage_report(run_dir, config)
    history = History(run_dir)
    history.refresh()
    summary = summarize(run_dir, history)
    folder = run_dir / "report"
    folder.mkdir(exist_ok=True)
    target = (config.get("eval") or {}).get("target")
    pictures = draw_all(history, folder, target, config["buffer"]["max_staleness"])
    samples = samples_page(history)
    if samples:
        (folder / "samples.md").write_text(samples)
    shown = "\n".join(f"![{p.stem}]({p.name})\n" for p in pictures)
    link = "\nThe same prompts [before and after](samples.md).\n" if samples else ""
    (folder / "summary.md").write_text(f"{summary.markdown()}\n{shown}{link}")
    (folder / "summary.json").write_text(summary.json())
    return summary


def samples_page(history: History) -> str:
    """The same evaluation prompts' first completions by the first and by the last version, side by side.

    Empty when fewer than two versions were evaluated.
    """
    versions = [v for v in sorted(history.completions) if v in history.scores]
    if len(versions) < 2:
        return ""
    first, last = versions[0], versions[-1]
    before, after = (by_prompt(history.completions[v].values()) for v in (first, last))
    both = [key for key in before if key in after][:PROMPTS_SHOWN]
    head = (
        f"# Before and after\n\nThe same held-out prompts, answered by version {first} and "
        f"by version {last}: the first completion of each, whatever it is.\n\n"
        f"| prompt | version {first} | version {last} |\n| --- | --- | --- |\n"
    )
    return head + "".join(
        f"| {_cell(key)} | {_answer(before[key])} | {_answer(after[key])} |\n" for key in both
    )


def by_prompt(completions: Iterable[Record]) -> dict[str, Record]:
    """The first completion of each prompt."""
    found: dict[str, Record] = {}
    for record in completions:
        found.setdefault(prompt_text(record.get("prompt")), record)
    return dict(sorted(found.items()))


def prompt_text(prompt: object) -> str:
    """The last message of a chat, or the text itself."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        return str(prompt[-1].get("content", ""))
    return str(prompt)


def _answer(record: Record) -> str:
    return f"{_cell(str(record.get('completion', '')))} <br> **reward {float(record.get('reward', 0)):g}**"


def _cell(text: str) -> str:
    """Text that a Markdown table shows as it is."""
    shown = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} …"
    for sign, safe in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("*", "\\*"), ("_", "\\_"), ("`", "\\`")):
        shown = shown.replace(sign, safe)
    return "<br>".join(shown.strip().splitlines())
