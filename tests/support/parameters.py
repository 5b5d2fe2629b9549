"""Attention whose W_q and W_k are parameters of its own, or of a linear module that a user wrote, in many forms."""

import torch
from torch import nn
from torch.nn import functional as F

HEADS, D, WIDTH = 4, 6, 24


def parameter(*shape):
    return nn.Parameter(torch.randn(shape) * 0.2)


def by_head(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class OwnAttention(nn.Module):
    def forward(self, x):
        return self.attend(*self.project(x))

    def attend(self, q, k, v):
        q, k, v = by_head(q), by_head(k), by_head(v)
        return ((q @ k.mT * D**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Fused(OwnAttention):
    """One weight and one bias, as in open_clip."""

    def __init__(self):
        super().__init__()
        self.in_proj_weight, self.in_proj_bias = parameter(3 * WIDTH, WIDTH), parameter(3 * WIDTH)

    def project(self, x):
        return F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)

    def weights(self):
        return self.in_proj_weight.chunk(3)[:2]


class Stating(Fused):
    """The same in a module with numbers that linear ones have."""

    in_features, out_features = 3 * WIDTH, WIDTH // 2


class InParts(Fused):
    """The same weight part by part on inputs of their own, as in copies of `nn.MultiheadAttention`."""

    def forward(self, query, key, value):
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.split(WIDTH)
        return self.attend(*map(F.linear, (query, key, value), weights, biases))


class InByOut(OwnAttention):
    """Matrices that an input is multiplied by, as in attention written from scratch."""

    def __init__(self):
        super().__init__()
        self.W_query, self.W_key, self.W_value = (parameter(WIDTH, WIDTH) for _ in range(3))

    def project(self, x):
        return x @ self.W_query, torch.matmul(x, self.W_key), x @ self.W_value

    def weights(self):
        return self.W_query.T, self.W_key.T


class WithBiases(InByOut):
    def __init__(self):
        super().__init__()
        self.b_query, self.b_key = parameter(WIDTH), parameter(WIDTH)

    def project(self, x):
        q, k, v = super().project(x)
        k += self.b_key
        return q + self.b_query, k, v


class OneBias(InByOut):
    """One bias beside two weights."""

    def __init__(self):
        super().__init__()
        self.biases = parameter(2 * WIDTH)

    def project(self, x):
        q, k, v = super().project(x)
        return q + self.biases[:WIDTH], k + self.biases[WIDTH:], v


class OtherOrder(Fused):
    """A bias in which the part of the key comes first."""

    def project(self, x):
        key, query, value = self.in_proj_bias.chunk(3)
        return map(F.linear, (x, x, x), self.in_proj_weight.chunk(3), (query, key, value))


class Turned(InByOut):
    """Matrices `[in, out]` that a linear map gets turned, in one parameter."""

    def __init__(self):
        super().__init__()
        del self.W_query, self.W_key
        self.register_buffer("bias", torch.ones(9, 9).tril())  # a mask, as GPT-2 calls it
        self.mixed = parameter(WIDTH, 2 * WIDTH)

    def project(self, x):
        q, k = (F.linear(x, part.t()) for part in self.mixed.split(WIDTH, 1))
        return q, k, x @ self.W_value

    def weights(self):
        return self.mixed.T.chunk(2)


class TurnedInMemory(InByOut):
    """A parameter that was a matrix the other way around."""

    def __init__(self):
        super().__init__()
        self.W_query = nn.Parameter(self.W_query.detach().T)

    def project(self, x):
        return F.linear(x, self.W_query.T), *super().project(x)[1:]


class Multiply(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = parameter(WIDTH, WIDTH), parameter(WIDTH)

    def forward(self, x):
        return x @ self.weight + self.bias


class OwnLinear(OwnAttention):
    """Linear modules of a user's own."""

    def __init__(self):
        super().__init__()
        self.ask, self.answer, self.tell = (Multiply() for _ in range(3))

    def project(self, x):
        x = F.layer_norm(x, (WIDTH,))
        return self.ask(x), self.answer(2 * x), self.tell(x)

    def weights(self):
        return self.ask.weight.T, self.answer.weight.T


class Calling(OwnAttention):
    """Linear modules that are not called: their weights are passed on."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def project(self, x):
        return [F.linear(x, linear.weight, linear.bias) for linear in self.maps]

    def weights(self):
        return self.maps[0].weight, self.maps[1].weight


class BiasApart(Calling):
    """A linear module without a bias, and a bias that is the attention's."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.q_bias = parameter(WIDTH)

    def project(self, x):
        q, k, v = (linear(x) for linear in self.maps)
        return q + self.q_bias, k, v


class MatrixPerHead(OwnAttention):
    """A matrix for each head, `[heads, d_x, d_k]`, and biases `[heads, d_k]`, as in attention by einsum."""

    def __init__(self):
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (parameter(HEADS, WIDTH, D) for _ in range(3))
        self.b_Q, self.b_K = parameter(HEADS, D), parameter(HEADS, D)

    def project(self, x):
        q, k, v = (torch.einsum("bsd,ndh->bsnh", x, weight).flatten(2) for weight in (self.W_Q, self.W_K, self.W_V))
        return q + self.b_Q.flatten(), k + self.b_K.flatten(), v

    def weights(self):
        return (weight.mT.flatten(0, 1) for weight in (self.W_Q, self.W_K))


class HeadsInTheMiddle(MatrixPerHead):
    """One parameter `[d_x, heads, d_k]`, as in ports from JAX, and scores by einsum."""

    def __init__(self):
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (parameter(WIDTH, HEADS, D) for _ in range(3))

    def forward(self, x):
        q = torch.einsum("...d,dnh->...nh", x, self.W_Q) + self.b_Q
        k = torch.einsum("...d,dnh->...nh", (x, self.W_K)) + self.b_K
        v = torch.einsum("...d,dnh->...nh", x, self.W_V)
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) / D**0.5
        return torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), v).flatten(2)

    def weights(self):
        return (weight.flatten(1).T for weight in (self.W_Q, self.W_K))


class HeadsLast(MatrixPerHead):
    """The same with the heads behind their components."""

    def __init__(self):
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (parameter(WIDTH, D, HEADS) for _ in range(3))

    def project(self, x):
        return (torch.einsum("bsd,dhn->bsnh", x, weight).flatten(2) for weight in (self.W_Q, self.W_K, self.W_V))

    def weights(self):
        return (weight.permute(2, 1, 0).flatten(0, 1) for weight in (self.W_Q, self.W_K))


class MatrixPerHeadTimes(MatrixPerHead):
    """A matrix for each head, with which the input is multiplied head by head."""

    def __init__(self):
        super().__init__()
        self.b_Q, self.b_K = parameter(HEADS, 1, D), parameter(1, HEADS, 1, D)

    def forward(self, x):
        x = x[:, None]
        q, k, v = x @ self.W_Q + self.b_Q, torch.matmul(x, self.W_K) + self.b_K, x @ self.W_V
        return ((q @ k.mT * D**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Stacked(MatrixPerHead):
    """All matrices and biases in one parameter each, `[3, heads, d_x, d_k]` and `[3, heads, d_k]`."""

    def __init__(self):
        super().__init__()
        self.W, self.b = parameter(3, HEADS, WIDTH, D), parameter(3, HEADS, D)

    def project(self, x):
        pairs = zip(self.W, self.b, strict=True)
        return [torch.einsum("bsd,ndh->bsnh", x, weight).flatten(2) + bias.flatten() for weight, bias in pairs]

    def weights(self):
        return self.W[:2].mT.flatten(1, 2)


class Flat(HeadsInTheMiddle):
    """Parameters `[d_x, heads, d_k]` and `[heads, d_k, d_x]` that are multiplied as matrices."""

    def __init__(self):
        super().__init__()
        self.W_K = parameter(HEADS, D, WIDTH)

    def forward(self, x):
        q = x @ self.W_Q.flatten(1) + self.b_Q.flatten()
        return self.attend(q, F.linear(x, self.W_K.view(WIDTH, WIDTH)), x @ self.W_V.flatten(1))

    def weights(self):
        return self.W_Q.flatten(1).T, self.W_K.flatten(0, 1)


class Model(nn.Module):
    """An attention behind a norm, in a model."""

    def __init__(self, kind):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), kind()

    def forward(self, x):
        x = self.norm(x)
        several = isinstance(self.layer, InParts | nn.MultiheadAttention)
        return self.layer(x, x.cos(), x) if several else self.layer(x)
