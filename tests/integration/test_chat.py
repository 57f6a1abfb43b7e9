"""`slipstream chat` on the real vLLM."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SLIPSTREAM = str(Path(sys.executable).parent / "slipstream")
TEMPLATE = "{% for m in messages %}t{{ 3 + m.role|length }} {{ m.content }} {% endfor %}"
"""The length of a role's name says whose turn it is. What was said last is what the made model answers."""

IN_FRONT = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def talking_model(made_model, tmp_path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(made_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def chat(folder: Path, typed: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [SLIPSTREAM, "chat", str(folder), *options]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=200)


def test_every_answer_is_the_models_own_behind_all_that_was_said(talking_model):
    typed = "t20 t21\nt30\n/clear\nt20 t21\n" + "t5 " * 120 + "\n"
    run = chat(talking_model, typed, "--temperature", "0", "--max-tokens", "6", "--system", "t40")
    assert run.returncode == 0, run.stderr
    first, second, again, refused = re.findall("model: (.*)", run.stdout)
    assert len({first, second}) == 2
    assert first == expected(talking_model, [("system", "t40"), ("user", "t20 t21")])
    turns = [("system", "t40"), ("user", "t20 t21"), ("assistant", first), ("user", "t30")]
    assert second == expected(talking_model, turns)
    assert again == first, "what was cleared is forgotten"
    assert re.fullmatch(r"\[too_long: the conversation has \d+ tokens .*; /clear begins anew\]", refused)


def expected(folder: Path, turns: list[tuple[str, str]]) -> str:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": role, "content": content} for role, content in turns]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    with torch.no_grad():
        made = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    return tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)


def test_a_model_that_nobody_can_talk_with_is_told_in_a_line(made_model, tmp_path):
    plain = chat(made_model, "t5\n")
    assert plain.returncode == 2
    assert plain.stderr.startswith(f"error: {made_model}: its tokenizer has no chat template")
    nothing = chat(tmp_path, "t5\n")
    assert nothing.stderr.startswith(f"error: MODEL={tmp_path}: no config.json in it")
    assert (nothing.returncode, nothing.stderr.count("\n")) == (2, 1)


def test_ctrl_c_ends_an_answer_and_the_conversation_goes_on(talking_model):
    config = json.loads((talking_model / "config.json").read_text())
    (talking_model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    command = [SLIPSTREAM, "chat", str(talking_model), "--temperature", "0", "--max-tokens", "4000"]
    ours, theirs = pty.openpty()
    # In a session of its own, and in front of its terminal: Ctrl-C reaches the engine's processes too.
    program = [sys.executable, "-c", IN_FRONT, *command]
    chat = subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    heard = ""

    def until(pattern: str) -> None:
        nonlocal heard
        while not re.search(pattern, heard, re.DOTALL):
            heard += os.read(ours, 4096).decode()

    until("you: $")
    for _ in range(2):
        heard = ""
        os.write(ours, b"t20 t21\n")
        until("model: (t21 ){5}")
        os.write(ours, b"\x03")
        until(r"\[stopped\].*you: $")
    os.write(ours, b"/quit\n")
    assert chat.wait(30) == 0
    os.close(ours)
