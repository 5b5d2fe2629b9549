"""Loops of one's own: as in nanoGPT, and under torchrun on two processes. The blocks are those of docs/STACKS.md."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import betahook
from support.pages import blocks, run


class CausalSelfAttention(nn.Module):
    """One projection for q, k and v, and attention by hand or by torch, as nanoGPT has it."""

    def __init__(self, width, heads, flash):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.flash = heads, flash

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (k.size(-1) ** -0.5)
            causal = torch.ones(x.size(1), x.size(1)).tril()
            y = F.softmax(scores.masked_fill(causal == 0, float("-inf")), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, flash, width=32, heads=4, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(64, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(CausalSelfAttention(width, heads, flash) for _ in range(layers))
        self.lm_head = nn.Linear(width, 64)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe.weight[: idx.size(1)]
        for block in self.h:
            x = x + block(F.layer_norm(x, x.shape[-1:]))
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("flash", [True, False])
def test_a_loop_as_in_nanogpt(flash):
    torch.manual_seed(0)
    model, generator = GPT(flash), torch.Generator().manual_seed(0)

    def get_batch():
        ids = torch.randint(64, (3, 13), generator=generator)
        return ids[:, :-1], ids[:, 1:]

    (code,) = blocks("docs/STACKS.md", "A loop of your own")
    names = run(code, torch=torch, model=model, optimizer=torch.optim.AdamW(model.parameters()), get_batch=get_batch)
    assert names["hook"].steps == 4
    saved = torch.load("ckpt.pt", weights_only=True)
    again, batch = GPT(flash), get_batch()
    again.load_state_dict(saved["model"])
    hook = betahook.attach(again)
    hook.load_state_dict(saved["betahook"])
    assert hook.layers["h.0"].beta != pytest.approx(8**-0.5)
    torch.testing.assert_close(again(*batch)[0], model(*batch)[0], rtol=1e-4, atol=1e-5)  # folded
    hook.detach()


RANK = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
from support.vision import let_torchvision_load
library = let_torchvision_load()
from support.models import build
from support.trainer import Tokens
rank = int(os.environ["RANK"])
torch.set_num_threads(1)
model = build("llama", "sdpa")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.utils.data.DataLoader(torch.utils.data.Subset(Tokens(), range(rank, 16, 2)), batch_size=4)
"""
END = """
result = torch.distributed.get_world_size(), hook.state_dict()["beta"], model.state_dict()
torch.save(result, f"rank{rank}.pt")
torch.distributed.destroy_process_group()
"""


def run_on_two_ranks(code):
    Path("train.py").write_text(RANK.format(tests=str(Path(__file__).parents[1])) + code)
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    done = subprocess.run([*launcher, "train.py"], check=True, timeout=120, stdout=subprocess.PIPE, text=True)
    return done.stdout


def test_torchrun_on_two_processes(tmp_path):
    ddp, fsdp = blocks("docs/STACKS.md", "torchrun")
    run_on_two_ranks(ddp + END)
    ranks = [torch.load(f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert [world for world, _, _ in ranks] == [2, 2]
    assert torch.equal(ranks[0][1], ranks[1][1])
    assert not ranks[0][1].isnan().any()
    assert all(torch.equal(value, ranks[1][2][name]) for name, value in ranks[0][2].items())
    assert run_on_two_ranks(fsdp + "torch.distributed.destroy_process_group()\n").count("Step 2: ") == 1
