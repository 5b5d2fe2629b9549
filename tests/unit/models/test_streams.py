"""Joint attention: the queries of two streams, as of an image and a text, lie one behind the other."""

import math

import pytest
import torch
from torch import nn

import betahook

HEADS, HEAD_DIM, WIDTH = 4, 8, 32
SIZES = {"nothing": {}, "heads": {"num_heads": HEADS}, "both": {"num_heads": HEADS, "head_dim": HEAD_DIM}}


class JointAttention(nn.Module):
    """Heads lie in the batch or before the tokens; rotary positions turn the queries and keys of the image alone."""

    def __init__(self, heads_in_batch, rotary):
        super().__init__()
        self.image, self.text = (nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.heads_in_batch, self.rotary = heads_in_batch, rotary

    def queries_and_keys(self, image, text):
        """`[batch, tokens, heads, d_k]` each, and the values."""
        projected = self.image(image), self.text(text)
        of_image, of_text = (x.unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2) for x in projected)
        if self.rotary:
            of_image = [turned(of_image[0]), turned(of_image[1]), of_image[2]]
        return [torch.cat(pair, 1) for pair in zip(of_image, of_text, strict=True)]

    def forward(self, image, text):
        q, k, v = (x.transpose(1, 2) for x in self.queries_and_keys(image, text))
        if self.heads_in_batch:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        values = (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1) @ v
        return values.view(len(image), HEADS, -1, HEAD_DIM).transpose(1, 2).flatten(2)


def turned(x):
    angles = torch.arange(x.shape[1])[:, None, None] * torch.linspace(1, 0.1, HEAD_DIM // 2)
    one, other = x[..., ::2], x[..., 1::2]
    turned = one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()
    return torch.stack(turned, -1).flatten(-2).to(x.dtype)


@pytest.mark.parametrize("stated", SIZES)
@pytest.mark.parametrize("heads_in_batch", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("batch", [2, 3])
def test_heads_are_neither_streams_nor_samples(stated, heads_in_batch, rotary, batch):
    torch.manual_seed(0)
    model = JointAttention(heads_in_batch, rotary).double()
    vars(model).update(SIZES[stated])
    image, text = torch.randn(batch, 5, WIDTH).double(), torch.randn(batch, 3, WIDTH).double()
    gains = torch.tensor([1.0, 2.0, 0.5, 3.0])
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model(image, text)
        (layer,) = hook.layers.values()
        assert (layer.heads, layer.head_dim, layer.refusal) == (HEADS, HEAD_DIM, None)
        q, k, v = (x.transpose(1, 2) for x in model.queries_and_keys(image, text))
        scores = q @ k.mT
        expected = scores.transpose(0, 1).flatten(1).std(1, correction=0)
        torch.testing.assert_close(layer.head_statistics.std.double(), expected, rtol=1e-5, atol=0)
        layer.head_beta = gains / math.sqrt(HEAD_DIM)
        weights = (scores * (gains.double() / math.sqrt(HEAD_DIM))[:, None, None]).softmax(-1)
        torch.testing.assert_close(model(image, text), (weights @ v).transpose(1, 2).flatten(2), rtol=1e-6, atol=1e-7)
