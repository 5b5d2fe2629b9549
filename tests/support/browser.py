"""A run to be looked at in a browser, and what the tests in tests/browser share.

Screenshots are kept in the folder that BETAHOOK_SCREENSHOTS names, if it names one.
"""

import os
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import betahook
from betahook.integrations.tensorboard import TensorBoardWriter

LIMIT = 60


def write_run(folder, layers):
    """A run of some logs and two checkpoints, with a layer that becomes sharp."""
    torch.manual_seed(0)
    sizes = dict(n_layer=layers, n_head=8, n_embd=32, n_positions=32, vocab_size=64)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    ids = torch.randint(64, (4, 32))
    with betahook.attach(model) as hook, TensorBoardWriter(str(folder)) as writer:
        for step in range(1, 13):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            hook.step()
            if step == 6:
                with torch.no_grad():
                    model.transformer.h[2].attn.c_attn.weight.mul_(30)
            writer.write(hook, step, loss=loss.item())
            if step in (8, 12):
                model.save_pretrained(folder / f"checkpoint-{step}")


def wait_for(found, what):
    """Return what `found()` returns, as soon as it is true."""
    deadline = time.monotonic() + LIMIT
    while not (result := found()):
        assert time.monotonic() < deadline, f"no {what} after {LIMIT} s"
        time.sleep(0.3)
    return result


def keep(browser, name):
    if folder := os.environ.get("BETAHOOK_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(Path(folder, f"{name}.png")))


def errors(browser):
    """What the console of the browser has for errors."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
