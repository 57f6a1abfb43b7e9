import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from launch.experiment import WholeExperiment
from launch.plan import (
    GIB,
    Target,
    engine_ranks,
    kv_bytes_per_token,
    machine_of,
    micro_batch_of,
    of,
    plan,
    server_parameters,
)
from launch.plan_changes import changes
from launch.plan_screen import as_json, print_plan, print_plans
from learner import budget, families
from rollout.config import EngineConfig

HOME = Path(__file__).parents[3]
PRESETS = {
    "policy-7b": 8, "policy-8x7b": 24, "policy-70b": 32, "policy-175b": 256,
    "ppo-7b": 8, "grpo-70b": 32, "ppo-175b": 256,
}  # fmt: skip


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    """The presets name their shapes relative to it."""
    monkeypatch.chdir(HOME)


def planned(name="policy-7b", *overrides, **target):
    return plan(Path(f"configs/plan/{name}.yaml"), list(overrides), Target(**target))


@pytest.mark.parametrize(("name", "devices"), PRESETS.items())
def test_a_preset_fits_its_devices(name, devices):
    made = planned(name, devices=devices, device_gib=80)
    assert made.devices == devices
    assert made.reasons() == []
    assert changes(made) == []


@pytest.mark.parametrize(
    ("shape", "billions"),
    [("llama-2-7b", 6.738), ("mixtral-8x7b", 46.703), ("llama-2-70b", 68.977), ("gpt-175b", 175.2)],
)
def test_shapes_have_the_published_numbers_of_parameters(shape, billions):
    found = budget.whole_parameters(families.read(HOME / "configs/shapes" / shape))
    assert found / 1e9 == pytest.approx(billions, abs=0.05)


def test_every_byte_of_a_weight_is_counted_once():
    """A 7B model on one rank: 2 + 4 + 12 bytes a weight, and of the optimizer's a half on each of two."""
    count = budget.whole_parameters(families.read("configs/shapes/llama-2-7b"))
    one, *_ = planned("policy-7b", "learner.processes=1", "learner.parallel.tensor=1").kinds
    assert (one.held["weights"], one.held["gradients"], one.held["optimizer"]) == (
        2 * count,
        4 * count,
        12 * count,
    )
    two, *_ = planned("policy-7b", "learner.processes=2", "learner.parallel.tensor=1").kinds
    assert two.held["optimizer"] == 6 * count
    apart, *_ = planned(
        "policy-7b", "learner.parallel.distributed_optimizer=false", "learner.parallel.tensor=1"
    ).kinds
    assert apart.held["optimizer"] == 12 * count


def test_an_experts_optimizer_is_shared_by_the_ranks_that_hold_it():
    """Of 32 ranks all hold the same dense weights, and 4 the same expert of every layer."""
    experts = 32 * 3 * 4096 * 14336
    whole = budget.whole_parameters(families.read("configs/shapes/mixtral-8x7b"))
    settings = ("learner.processes=32", "learner.parallel.tensor=1", "learner.parallel.pipeline=1")
    made = planned("policy-8x7b", *settings, "learner.parallel.distributed_optimizer=true")
    (one, *_) = made.kinds
    dense = whole - 8 * experts
    assert one.held["weights"] == 2 * (dense + experts)
    assert one.held["optimizer"] == 12 * (dense / 32 + experts / 4)
    assert server_parameters(made.family, EngineConfig()) == whole


def test_a_reference_model_is_held_beside_the_policy():
    plain, *_ = planned().kinds
    (beside, *_) = planned("policy-7b", "learner.algorithm.kl.coefficient=0.1").kinds
    assert beside.total - plain.total == beside.held["reference model"] == plain.held["weights"]


def test_a_reference_on_ranks_of_its_own_is_held_there_and_not_beside_the_policy():
    alone = ("learner.algorithm.kl.coefficient=0.1", "learner.parallel.tensor=1", "learner.processes=1")
    apart = (
        "learner.reference.processes=4",
        "learner.reference.parallel.tensor=2",
        "learner.reference.parallel.pipeline=2",
    )
    beside, placed = planned("policy-7b", *alone), planned("policy-7b", *alone, *apart)
    (first, last) = (kind for kind in placed.kinds if kind.name.startswith("reference stage"))
    assert (first.ranks, last.ranks, placed.devices - beside.devices) == (2, 2, 4)
    assert "reference model" in beside.kinds[0].held
    assert "reference model" not in placed.kinds[0].held
    whole = beside.kinds[0].held["reference model"]
    held = 2 * (first.held["weights"] + last.held["weights"])
    assert held == pytest.approx(whole, rel=1e-4), "norms lie on both tensor ranks"
    assert all(kind.total < beside.kinds[0].total / 8 for kind in (first, last)), "nothing is trained there"
    assert placed.kinds[-1].name == "rollout server rank"
    few = planned("policy-7b", *alone, *apart, devices=4)
    (told,) = [line for line in changes(few) if line.startswith("devices")]
    assert "4 for the reference" in told
    with pytest.raises(ValueError, match=r"learner.reference.parallel.tensor=3 does not divide"):
        planned("policy-7b", *alone, "learner.reference.processes=3", "learner.reference.parallel.tensor=3")


def test_adapters_are_trained_and_their_base_only_held():
    alone = ["learner.processes=1", "learner.parallel.tensor=1", "learner.algorithm.kl.coefficient=0.1"]
    plain, *_ = planned("policy-7b", *alone).kinds
    kind, *_ = planned("policy-7b", *alone, "learner.lora.rank=8").kinds
    # In each of 32 layers q, k, v and o are 4096 both ways, gate, up and down 4096 and 11008.
    count = 32 * 8 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert (kind.held["adapters"], kind.held["gradients"], kind.held["optimizer"]) == (
        2 * count,
        4 * count,
        12 * count,
    )
    assert kind.held["weights"] == plain.held["weights"]
    assert "reference model" not in kind.held, "it is the policy without adapters"
    assert kind.total < plain.total / 4
    attention, *_ = planned("policy-7b", *alone, "learner.lora.modules=[q_proj,o_proj]").kinds
    assert attention.held["adapters"] == 2 * 32 * 16 * 2 * 2 * 4096


def test_scorers_have_ranks_of_their_own():
    reward = {
        "helpful": {
            "model": "configs/shapes/llama-2-7b",
            "dtype": "bfloat16",
            "engine": {"tensor_parallel": 2},
        }
    }
    alone = planned("policy-7b")
    experiment = alone.experiment.model_dump()
    experiment["rollout"]["rewards"] |= reward
    made = of(WholeExperiment.model_validate(experiment), alone.family, alone.target)
    (scorer,) = (kind for kind in made.kinds if kind.name == "scorer helpful rank")
    assert (scorer.ranks, made.devices - alone.devices) == (2, 2)
    family = families.read("configs/shapes/llama-2-7b")
    table = family.vocab * family.hidden
    half = (budget.whole_parameters(family) - table) / 2
    assert scorer.held["weights"] / 2 == pytest.approx(half, rel=1e-4), "without an output layer"
    assert not scorer.host, "nothing is published to it"
    assert made.server_host_bytes == alone.server_host_bytes


def test_a_value_model_is_held_and_trained_beside_the_policy():
    shape = "configs/shapes/llama-2-7b"
    settings = ["learner.algorithm.advantage=gae", f"learner.value.path={shape}"]
    alone = ["learner.processes=1", "learner.parallel.tensor=1"]
    with_value, *_ = planned("policy-7b", *settings, *alone).kinds
    family = families.read(shape)
    # A row of scores in the place of the output layer.
    count = budget.whole_parameters(family) - (family.vocab - 1) * family.hidden
    assert with_value.held["value model"] == (2 + 4 + 12) * count
    assert with_value.moments["training of the value model"]


def test_adapters_of_a_value_model_are_trained_and_its_base_only_held():
    shape = "configs/shapes/llama-2-7b"
    settings = ["learner.algorithm.advantage=gae", f"learner.value.path={shape}", "learner.processes=1"]
    settings += ["learner.parallel.tensor=1", "learner.parallel.distributed_optimizer=false"]
    whole, *_ = planned("policy-7b", *settings).kinds
    adapted, *_ = planned("policy-7b", *settings, "learner.value.lora.rank=16").kinds
    family = families.read(shape)
    count = budget.whole_parameters(family) - (family.vocab - 1) * family.hidden
    trained = 16 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert adapted.held["value model"] == 2 * count + (2 + 4 + 12) * trained
    assert adapted.held["weights"] == whole.held["weights"], "the policy's are as before"
    assert adapted.held["optimizer"] == whole.held["optimizer"]
    apart = planned("policy-7b", *settings, "learner.value.lora.rank=16", "learner.value.ranks.processes=1")
    (kind,) = (kind for kind in apart.kinds if kind.name == "value model")
    assert kind.held["weights"] + kind.held["adapters"] == 2 * (count + trained)


def test_a_value_model_on_ranks_of_its_own_is_held_there_and_not_beside_the_policy():
    shape = "configs/shapes/llama-2-7b"
    settings = ["learner.algorithm.advantage=gae", f"learner.value.path={shape}", "learner.processes=1"]
    settings += ["learner.parallel.tensor=1", "learner.parallel.distributed_optimizer=false"]
    ranks = ["processes=4", "parallel.tensor=2", "parallel.pipeline=2"]
    beside, without = planned("policy-7b", *settings), planned("policy-7b", *settings[2:])
    placed = planned("policy-7b", *settings, *(f"learner.value.ranks.{setting}" for setting in ranks))
    (first, last) = (kind for kind in placed.kinds if kind.name.startswith("value model stage"))
    assert (first.ranks, last.ranks, placed.devices - beside.devices) == (2, 2, 4)
    assert placed.kinds[0].held == without.kinds[0].held, "as if there were none"
    assert placed.kinds[0].moments == without.kinds[0].moments
    there = [sum(kind.held[item] for item in ("weights", "gradients", "optimizer")) for kind in (first, last)]
    assert 2 * sum(there) == pytest.approx(beside.kinds[0].held["value model"], rel=1e-4)
    assert all(kind.moments["training"] for kind in (first, last))
    (told,) = [
        line for line in changes(planned(*placed_with(settings, ranks), devices=4)) if "devices" in line
    ]
    assert "4 for the value model" in told
    with pytest.raises(ValueError, match=r"learner.value.ranks.parallel.tensor=3 does not divide"):
        planned(*placed_with(settings, ["processes=3", "parallel.tensor=3"]))
    shared = planned(*placed_with(settings, ["processes=2", "parallel.distributed_optimizer=true"]))
    (kind,) = (kind for kind in shared.kinds if kind.name == "value model")
    assert kind.held["optimizer"] == pytest.approx(2 * first.held["optimizer"], rel=0.1)
    assert kind.moments["checkpoint"]


def placed_with(settings, ranks):
    return ("policy-7b", *settings, *(f"learner.value.ranks.{setting}" for setting in ranks))


def test_online_dpo_has_a_reference_and_whole_groups():
    settings = ("rollout.group_size=8", "rollout.sampling.max_tokens=512", "model.max_length=1024")
    plain, pairs = (planned("policy-7b", *settings, *more) for more in ((), ("learner.algorithm.loss=dpo",)))
    assert pairs.kinds[0].held["reference model"] == pairs.kinds[0].held["weights"]
    assert "reference model" not in plain.kinds[0].held
    tight = ("learner.algorithm.loss=dpo", "learner.tokens_per_microbatch=1024")
    small = planned("policy-7b", *settings, *tight)
    assert micro_batch_of(small.experiment).tokens == 512 + 8 * 512


def test_an_average_of_the_weights_is_shared_as_the_optimizer_is():
    (kind, *_), (plain, *_) = planned("policy-7b", "learner.ema.decay=0.99").kinds, planned().kinds
    assert kind.held["average (EMA)"] == plain.held["optimizer"] / 12 * 4
    assert kind.total - plain.total == kind.held["average (EMA)"]


def test_a_micro_batch_of_text_counts_where_it_takes_more():
    """One completion behind a long prompt has few targets, and a text is nothing but targets."""
    alone = ("rollout.group_size=1", "rollout.sampling.max_tokens=64", "learner.recompute=false")
    whole = (*alone, "learner.algorithm.advantage=reinforce_plus_plus")
    text = ("learner.ptx.data.kind=jsonl", "learner.ptx.data.path=x")
    mixed, plain = (planned("policy-7b", *whole, *more).kinds[0].moments for more in (text, ()))
    assert sum(mixed["training"].values()) > sum(plain["training"].values())


def test_a_value_model_computes_no_logits():
    experiment = planned("policy-7b", "learner.recompute=false").experiment
    batch, machine = micro_batch_of(experiment), machine_of(experiment, gpu=True)
    # Its layers take less than an output layer would.
    narrow = replace(families.read("configs/shapes/llama-2-7b", "score"), ffn=64)
    for head, expected in (("vocabulary", True), ("score", False)):
        taken = budget.stage_activations(replace(narrow, head=head), experiment.learner, 0, batch, machine)
        assert ("logits and output layer" in taken) == expected


def test_recompute_and_smaller_micro_batches_take_less():
    found = []
    for recompute, tokens in (("false", 8192), ("true", 8192), ("true", 4096)):
        settings = (f"learner.recompute={recompute}", f"learner.tokens_per_microbatch={tokens}")
        found.append(sum(planned("policy-7b", *settings).kinds[0].moments["training"].values()))
    assert found == sorted(set(found), reverse=True)


def test_on_one_machine_without_gpus_a_version_lies_in_memory_and_a_checkpoint_copies_what_is_joined():
    """As benchmarks/plan_engines.py and plan_memory.py measured."""
    plain = ("learner.parallel.distributed_optimizer=false", "model.dtype=float32")
    there = planned("policy-7b", *plain, gpu=False)
    first, second = there.kinds[:2]
    assert first.held["published version"] == there.model_bytes
    assert "publish buckets" not in first.moments["publishing"]
    assert "published version" not in second.held, "of another rank"
    family, layout = there.family, there.experiment.learner.parallel
    joined = 2 * family.hidden * family.ffn // layout.tensor * family.layers // layout.pipeline
    for kind in (first, second):
        assert kind.moments["checkpoint"] == {"copies of gate and up": joined * (4 + 4 + 4)}
    sent = planned("policy-7b", *plain, "sync.shared_memory=false", gpu=False).kinds[0]
    assert "published version" not in sent.held
    assert sent.moments["publishing"]["publish buckets"] == 2 * 64 << 20
    adapters = planned("policy-7b", *plain, "learner.lora.rank=8", gpu=False).kinds[0]
    assert adapters.moments["checkpoint"] == {"copies of gate and up": 0.0}


def test_only_the_fullest_moment_counts():
    (kind, *_) = planned().kinds
    assert set(kind.moments) == {"training", "publishing", "checkpoint"}
    assert kind.peak == "checkpoint"
    assert kind.total == sum(kind.held.values()) + sum(kind.moments["checkpoint"].values())
    (whole, *_) = planned("policy-7b", "learner.parallel.distributed_optimizer=false").kinds
    assert whole.peak == "training"


def test_all_ranks_are_counted_whatever_the_pipeline():
    for pipeline in (1, 2, 4, 8):
        made = planned("policy-175b", f"learner.parallel.pipeline={pipeline}")
        ranks = sum(kind.ranks for kind in made.kinds if kind.name.startswith("learner"))
        assert ranks == 192, pipeline


def test_stages_with_unequally_many_layers_are_told_apart():
    """32 layers on five stages: 6, 6, 7, 7 and 6."""
    settings = ("learner.processes=10", "learner.parallel.pipeline=5", "learner.parallel.tensor=1")
    *learner, _ = planned("policy-7b", *settings, "learner.recompute=false").kinds
    assert [(kind.name, kind.ranks) for kind in learner] == [
        ("learner stage 1 of 5, rank 0", 1),
        ("learner stage 1 of 5", 1),
        ("learner stage 2 of 5", 2),
        ("learner stages 3 to 4", 4),
        ("learner stage 5 of 5", 2),
    ]
    _, first, six, seven, last = learner
    layer = budget.layer_parameters(families.read("configs/shapes/llama-2-7b"), 1)
    assert seven.held["weights"] - six.held["weights"] == 2 * layer
    whole = budget.whole_parameters(families.read("configs/shapes/llama-2-7b"))
    assert sum(kind.held["weights"] * kind.ranks for kind in learner) == 2 * 2 * whole
    kept = [kind.moments["training"]["activations"] for kind in (first, six, seven, last)]
    each = kept[-1] / 6
    assert kept == [5 * 6 * each, 4 * 6 * each, 3 * 7 * each, 6 * each], (
        "layers times micro-batches in flight"
    )


def test_a_server_cannot_cut_key_value_heads_unevenly():
    family = replace(families.read("configs/shapes/llama-2-7b"), heads=12, kv_heads=4)

    def impossible(tensor):
        return engine_ranks("x", 1, family, EngineConfig(tensor_parallel=tensor), 2, 128, Target()).impossible

    assert impossible(6) == "6 ranks neither divide its 4 key-value heads nor are a multiple of them"
    assert [impossible(tensor) for tensor in (1, 2, 4, 12)] == [None] * 4


@pytest.mark.parametrize(
    "overrides",
    [
        ("learner.recompute=false", "learner.tokens_per_microbatch=65536"),
        ("learner.parallel.tensor=1", "learner.parallel.distributed_optimizer=false"),
        ("learner.processes=1", "learner.parallel.tensor=1"),
        ("rollout.engine.gpu_memory_utilization=0.15",),
        ("rollout.servers=9",),
    ],
)
def test_what_is_proposed_fits(overrides):
    made = planned("policy-7b", *overrides, devices=12, device_gib=80)
    assert made.reasons()
    proposed = changes(made)
    settings = [word for line in proposed for word in line.replace(",", "").split() if "=" in word]
    assert settings, proposed
    changed = planned("policy-7b", *overrides, *(s.rstrip(";") for s in settings), devices=12, device_gib=80)
    assert changed.reasons() == []


def test_a_layout_that_the_value_model_refuses_is_not_proposed(tmp_path):
    shape = json.loads((HOME / "configs/shapes/llama-2-7b/config.json").read_text())
    shape |= {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 384, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    settings = ("learner.algorithm.advantage=gae", f"learner.value.path={tmp_path}", "learner.processes=2")
    settings += ("learner.parallel.tensor=1", "learner.parallel.distributed_optimizer=false")
    made = planned("policy-7b", *settings, device_gib=80)
    assert made.reasons()
    proposed = " ".join(changes(made))
    assert "parallel.tensor" not in proposed, "three heads are cut by no power of two"
    assert "learner.parallel.pipeline=2" in proposed


def test_a_model_that_no_layout_saves_is_told_so():
    made = planned("policy-70b", device_gib=1)
    assert changes(made)[0] == (
        "learner: no layout tried fits; take devices of more memory or a smaller model"
    )


def test_a_machine_of_cpus_holds_all_ranks_together():
    overrides = ("model.dtype=float32", "learner.processes=2", "rollout.engine.kv_cache_gib=4")
    made = planned("policy-7b", *overrides, gpu=False, device_gib=10)
    total = sum(kind.total * kind.ranks for kind in made.kinds) / GIB
    assert f"all ranks take {total:.1f} GiB of the machine's 10" in made.reasons()
    assert planned("policy-7b", *overrides, gpu=False, device_gib=total + 1).reasons() == []
    starved = planned("policy-7b", *overrides[:2], gpu=False, device_gib=total + 1)
    assert changes(starved)[0].startswith("rollout server: set rollout.engine.kv_cache_gib=2.0;")


def test_a_server_on_cpus_has_heads_of_a_size_that_vllm_computes_there():
    odd, engine = (
        replace(families.read("configs/shapes/llama-2-7b"), head_dim=72),
        EngineConfig(kv_cache_gib=4),
    )
    found = [engine_ranks("rank", 1, odd, engine, 2, 64, Target(gpu)).impossible for gpu in (False, True)]
    assert str(found[0]).startswith("vLLM on CPU computes no attention heads of 72, only those of 32, 64")
    assert found[1] is None


def test_a_server_on_cpus_has_no_pipeline_stages_unless_it_compiles():
    overrides = ("model.dtype=float32", "rollout.engine.kv_cache_gib=4", "rollout.engine.pipeline_parallel=2")
    made = planned("policy-7b", *overrides, gpu=False, device_gib=1000)
    assert made.reasons() == [
        "rollout server rank: vLLM's CPU build cannot serve with pipeline_parallel above 1 and enforce_eager"
    ]
    assert changes(made)[0].startswith("rollout server: set rollout.engine.pipeline_parallel=1;")
    assert planned("policy-7b", *overrides, devices=99).reasons() == []
    compiled = "rollout.engine.enforce_eager=false"
    assert planned("policy-7b", *overrides, compiled, gpu=False, device_gib=1000).reasons() == []


def test_a_server_keeps_whole_key_value_heads():
    family = families.read("configs/shapes/llama-2-70b")
    assert kv_bytes_per_token(family, EngineConfig(tensor_parallel=4), 2) == 2 * 80 * 2 * 128 * 2
    assert kv_bytes_per_token(family, EngineConfig(tensor_parallel=16), 2) == 2 * 80 * 1 * 128 * 2
    assert server_parameters(family, EngineConfig()) == budget.whole_parameters(family)


def test_publish_seconds_are_the_models_bits_over_the_links():
    made = planned()
    assert made.publish_seconds()[100] == pytest.approx(6.738e9 * 16 / 100e9, rel=1e-3)


def test_json_says_what_the_table_says():
    made = planned(devices=6)
    told = json.loads(as_json([made]))
    assert told["fits"] is False
    assert told["reasons"] == ["8 devices are needed, 6 are there"]
    assert told["changes"] == ["devices: set rollout.servers=2, or take 8 devices"]
    assert [rank["total_bytes"] for rank in told["ranks"]] == [kind.total for kind in made.kinds]


@pytest.mark.parametrize("columns", [40, 58, 80, 200])
def test_no_number_is_cut_however_narrow_the_terminal(columns):
    made, written = planned("ppo-7b", "rollout.servers=1"), StringIO()
    print_plan(made, Console(file=written, width=columns))
    told = written.getvalue()
    for kind in made.kinds:
        for size in (*kind.held.values(), kind.total):
            assert f"{size / GIB:.2f}" in told
        assert kind.name.split()[-1] in told
    assert "…" not in told
    assert "learner of 4 ranks" in told
    assert "1 server of 1 rank\n" in told


def shown(*plans):
    written = StringIO()
    return print_plans(plans, Console(file=written, width=200)), written.getvalue()


def test_one_device_is_no_plural():
    alone = planned("policy-7b", "learner.processes=1", "learner.parallel.tensor=1", device_gib=200)
    code, told = shown(replace(alone, kinds=alone.kinds[:1]))
    assert code == 0
    assert "FITS: 1 device; " in told
    assert "FITS: 8 devices; " in shown(planned())[1]
    assert "FITS: 8 of 9 devices; " in shown(planned(devices=9))[1]


def test_several_plans_end_with_one_verdict():
    fits, does_not = planned(), planned("policy-70b")
    does_not = replace(does_not, target=Target(devices=9))
    assert shown(fits)[1].count("FIT") == 1
    code, told = shown(fits, fits)
    assert (code, told.splitlines()[-1]) == (0, "the pipeline FITS: each of its 2 stages does")
    code, told = shown(fits, does_not)
    assert (code, told.splitlines()[-1]) == (1, "the pipeline DOES NOT FIT, by its stage policy-70b")
    told = json.loads(as_json([fits, does_not]))
    assert (told["fits"], [stage["fits"] for stage in told["stages"]]) == (False, [True, False])


def test_a_layout_that_does_not_fit_the_model_is_one_line():
    with pytest.raises(ValueError, match=r"pipeline=33 is more than the model's 32 layers; use 32 or less$"):
        planned("policy-7b", "learner.processes=66", "learner.parallel.pipeline=33")


def test_the_plan_needs_the_models_shape_and_nothing_else(tmp_path):
    with pytest.raises(ValueError, match="expected a Hugging Face folder"):
        planned("policy-7b", f"model.path={tmp_path}")
    assert isinstance(planned().experiment, WholeExperiment)
