"""The balance loss of experts against a loop, and what one process does with a layer of experts."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from learner import parallel
from learner.config import ParallelConfig
from learner.layout import Row, lay_out
from learner.model import build_model
from learner.optimizer import prepare_schedule
from learner.passes import run_schedule

EXPERTS, CHOSEN, LAYERS = 4, 2, 2
BALANCE = 0.3


@pytest.fixture
def one_process():
    parallel.initialize(ParallelConfig())
    yield
    parallel.shutdown()


def balance_loss(logits):
    """E · Σ_e f_e · P_e, as in the paper: f_e the share of the routings that expert e gets, P_e the mean of
    its probability."""
    probabilities = logits.softmax(-1)
    total = torch.zeros(())
    for expert in range(EXPERTS):
        routed = sum(expert in row.topk(CHOSEN).indices.tolist() for row in probabilities)
        share = routed / (CHOSEN * len(probabilities))
        total = total + EXPERTS * share * probabilities[:, expert].mean()
    return total


def test_the_balance_loss_is_the_papers_and_its_mean_over_micro_batches_is_added(one_process, tmp_path):
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    reference = AutoModelForCausalLM.from_config(config)
    reference.save_pretrained(tmp_path)
    texts = [torch.randint(0, 67, (length,)) for length in (9, 30)]
    for ids in texts:
        logits = reference(ids[None], output_router_logits=True).router_logits
        (sum(map(balance_loss, logits)) * BALANCE / len(texts)).backward()

    model = build_model(tmp_path, ParallelConfig(), torch.float32)
    prepare_schedule(model.config)
    prompts = [(ids[:3].int().numpy(), ids[3:].int().numpy()) for ids in texts]
    batches = [lay_out([[Row(0, p, c, torch.arange(len(c)).numpy())]]) for p, c in prompts]

    def nothing(batch, output):
        return 0.0 * output[0].sum(), None

    run_schedule(model, batches, nothing, False, balance=BALANCE)
    for layer in range(LAYERS):
        expected = reference.model.layers[layer].mlp.gate.weight.grad
        found = model.decoder.layers[layer].mlp.router.weight.grad
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    expected = reference.model.embed_tokens.weight.grad
    torch.testing.assert_close(model.embedding.word_embeddings.weight.grad, expected, atol=1e-6, rtol=1e-3)
