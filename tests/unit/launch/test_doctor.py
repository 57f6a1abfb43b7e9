"""What `slipstream doctor` asks of a machine."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import doctor

README = (Path(__file__).parents[3] / "README.md").read_text()


def test_it_asks_for_what_the_readme_does():
    asked = re.search(
        r"(\d+) GiB of free memory, (\d+) GB of disk \(half of it for the installation\)", README
    )
    assert asked is not None
    assert int(asked[1]) == doctor.DEMO_MEMORY_GIB
    assert int(asked[2]) / 2 == doctor.DEMO_DISK_GB


def test_too_little_for_the_demo_is_told_with_what_it_takes(monkeypatch):
    def with_free(size_gb: float) -> doctor.Finding:
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=size_gb * 1e9))
        return doctor._disk()

    assert with_free(5.2) == doctor.Finding("ok", "disk", "5 GB free here")
    assert with_free(3.4) == doctor.Finding(
        "note", "disk", "3 GB free here; a run of the demo writes up to 5"
    )


def test_a_torch_that_is_slow_to_import_keeps_no_run_from_starting(monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.001)
    assert doctor._torch().level == "note"


def test_each_finding_is_told_before_the_next_is_looked_for(monkeypatch):
    monkeypatch.setattr(doctor, "_torch", lambda: pytest.fail("looked for"))
    findings = doctor.diagnose()
    assert [next(findings).what for _ in range(4)] == ["python", "cores", "memory", "disk"]


@pytest.mark.parametrize(
    ("file", "ports"),
    [("sft", []), ("demo", ["buffer", "sync"]), ("tutorial", ["buffer", "sync", "rollout.rewards.helpful"])],
)
def test_every_kind_of_file_is_read_and_its_memory_and_ports_told(monkeypatch, file, ports):
    monkeypatch.setattr(doctor, "visible_gpus", list)
    found = {each.what: each for each in doctor.diagnose(Path(f"configs/{file}.yaml"))}
    assert re.search(r"by `slipstream plan --cpu` this takes \d+\.\d$", found["memory"].told)
    assert f"configs/{file}.yaml: no mistakes found" in found["experiment"].told
    assert [what.removesuffix(" port") for what in found if what.endswith(" port")] == ports


def test_more_memory_than_is_free_is_noted(monkeypatch):
    monkeypatch.setattr(doctor, "visible_gpus", list)
    config, changes = Path("configs/demo.yaml"), ["rollout.engine.kv_cache_gib=2000"]
    (found,) = (each for each in doctor.diagnose(config, changes) if each.what == "memory")
    assert found.level == "note"
