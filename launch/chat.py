"""`slipstream chat`: a conversation with a model on the terminal."""

import asyncio
import shutil
import signal
import sys
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
    if faults := faults or engine_reasons("engine", engine, "MODEL", str(model)):
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
        KeyboardInterrupt: Ctrl-C, while the model was loading.
    """
    # Only now: a mistake in the arguments is told at once.
    from buffer.rendering import Renderer
    from buffer.tokenizers import load_tokenizer
    from rollout.conversation import Conversation
    from rollout.engine import EngineFailed
    from rollout.groups import SamplingPlan
    from rollout.vllm_engine import VLLMEngine

    tokenizer = load_tokenizer("MODEL", model.path)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{model.path}: its tokenizer has no chat template, which a conversation needs; `slipstream "
            "generate` completes text as it stands"
        )
    engine = VLLMEngine(model, config, seed=seed)
    folder = Path(tempfile.mkdtemp(prefix="slipstream-chat-"))
    told = False
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        try:
            signal.signal(signal.SIGINT, _interrupt)
            with engine_log(folder / "engine.log") as terminal:
                print(f"loading {model.path}: half a minute or so", file=terminal)
                loop.run(engine.start())
                loop.run(engine.freeze())
            # From now on the runner's: it ends what is being answered.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            plan = SamplingPlan(1, temperature, max_tokens, top_p)
            renderer = Renderer(tokenizer, model.max_length, system)
            _converse(Conversation(engine, renderer, plan), loop)
        except EngineFailed:
            told = True
            raise
        finally:
            loop.run(engine.close())
            if not told:
                shutil.rmtree(folder, ignore_errors=True)


def _interrupt(*_: object) -> None:
    """At once, also out of vLLM's start, which blocks the loop."""
    raise KeyboardInterrupt


def _converse(conversation: "Conversation", loop: asyncio.Runner) -> None:
    print(HELP)
    # Who reads the answers to a pipe's lines sees there what was said.
    shown = not sys.stdin.isatty()
    while (said := _said()) not in (None, "/quit"):
        if shown:
            print(said)
        if said == "/clear":
            conversation.messages.clear()
            print("begun anew")
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
        said = input("\nyou: ").strip()
        return said.encode(errors="replace").decode()  # what was no UTF-8 would have no tokens either
    except (EOFError, KeyboardInterrupt):
        print()
        return None
