"""`slipstream chat`: a conversation with a model on the terminal."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from buffer.experiment import ModelConfig
from launch import model_folder
from launch.experiment import engine_reasons
from rollout.config import EngineConfig
from rollout.engine_log import engine_log

if TYPE_CHECKING:
    from rollout.conversation import Conversation

HELP = "Ctrl-C stops an answer; /clear begins anew; /quit or Ctrl-D ends."
DEFAULT_LENGTH = 4096
"""Tokens of a conversation, where the model takes as many."""


def check(model: Path, max_length: int | None, engine: EngineConfig) -> ModelConfig:
    """What is to be served, if it can be.

    Args:
        max_length: None for what the model takes, up to `DEFAULT_LENGTH`.

    Raises:
        ValueError: The folder is no model's, or its engine cannot run here; one line a reason.
    """
    length = max_length or min(DEFAULT_LENGTH, model_folder.longest(str(model)) or DEFAULT_LENGTH)
    faults = model_folder.served("MODEL", str(model), length)
    if faults := faults or engine_reasons("engine", engine, str(model)):
        raise ValueError("\n".join(faults))
    return ModelConfig(path=str(model), max_length=length)


def chat(
    model: ModelConfig,
    config: EngineConfig,
    system: str | None,
    temperature: float,
    top_p: float,
    max_tokens: int,
    seed: int,
) -> None:
    """Read what is said from standard input until it ends, and answer on standard output.

    Raises:
        ValueError: The tokenizer has no chat template.
        EngineFailed: The engine does not start, or died; its log stays.
    """
    # Only now: a mistake in the arguments is told at once.
    from buffer.rendering import Renderer
    from rollout.conversation import Conversation
    from rollout.groups import SamplingPlan
    from rollout.tokenizers import load_tokenizer
    from rollout.vllm_engine import VLLMEngine

    tokenizer = load_tokenizer("MODEL", model.path)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{model.path}: its tokenizer has no chat template, which a conversation needs; `slipstream "
            "generate` completes text as it stands"
        )
    engine = VLLMEngine(model, config, seed=seed)
    folder = Path(tempfile.mkdtemp(prefix="slipstream-chat-"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        try:
            with engine_log(folder / "engine.log") as terminal:
                print(f"loading {model.path}: half a minute or so", file=terminal)
                loop.run(engine.start())
                loop.run(engine.freeze())
            plan = SamplingPlan(1, temperature, max_tokens, top_p)
            renderer = Renderer(tokenizer, model.max_length, system)
            _converse(Conversation(engine, renderer, plan), loop)
            shutil.rmtree(folder)
        finally:
            loop.run(engine.close())


def _converse(conversation: "Conversation", loop: asyncio.Runner) -> None:
    print(HELP)
    while (said := _said()) not in (None, "/quit"):
        if said == "/clear":
            conversation.messages.clear()
        elif said:
            _answer(conversation, said, loop)


def _answer(conversation: "Conversation", said: str, loop: asyncio.Runner) -> None:
    from buffer.rendering import PromptRefused
    from rollout.engine import CompletionFailed

    print("model: ", end="", flush=True)
    try:
        loop.run(conversation.answer(said, lambda piece: print(piece, end="", flush=True)))
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except PromptRefused as refused:
        print(f"[{refused}; /clear begins anew]", end="")
    except CompletionFailed as failed:
        print(f"[{failed}]", end="")
    print()


def _said() -> str | None:
    """The next line; None at the end of them."""
    try:
        return input("\nyou: ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
