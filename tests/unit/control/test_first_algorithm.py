"""The paper's first algorithm to the letter, `Variance(source="weights", smoothing=0)`, against its formula."""

import math

import pytest
import torch

import betahook
from support.models import build, inputs
from support.training import LAYER

FIRST = betahook.Variance(source="weights", smoothing=0)


def test_beta_is_the_reciprocal_of_the_std_that_the_weights_predict_after_every_batch():
    model = build("llama")
    attention = model.get_submodule(LAYER)
    entering = []
    attention.q_proj.register_forward_pre_hook(lambda module, args: entering.append(args[0].detach().double()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with betahook.attach(model, controller=FIRST) as hook:
        path = []
        for _ in range(4):
            model(**inputs("llama", padded=False)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            hook.step()
            x = entering[-1]
            d_x = x.shape[-1]
            # Of the weights as they are after the optimizer's step.
            std_q, std_k = (w.weight.double().std(correction=0) for w in (attention.q_proj, attention.k_proj))
            std = math.sqrt(hook.layers[LAYER].head_dim) * d_x * x.var(correction=0) * std_q * std_k
            path.append(hook.layers[LAYER].beta)
            assert path[-1] == pytest.approx(1 / std.item(), rel=1e-5)
    assert len(set(path)) == 4
