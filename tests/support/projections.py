"""Attention whose projections lie in many ways: one weight for all, head by head, with shared keys, as convolutions."""

import torch
from torch import nn

HEADS, D, WIDTH = 4, 6, 24


def by_head(x, heads=HEADS):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class OwnAttention(nn.Module):
    """The output of attention over what `project` makes of the input."""

    def forward(self, x):
        q, k, v = self.project(x)
        weights = (q @ k.mT * D**-0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Stacked(OwnAttention):
    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)

    def project(self, x):
        return [by_head(part) for part in self.mixed(x).chunk(3, -1)]

    def rows(self):
        every = torch.arange(3 * WIDTH).view(3, HEADS, D)
        return (self.mixed, every[0]), (self.mixed, every[1])


class InPairs(Stacked):
    """Twice as many heads as it states, as differential attention, which counts pairs of them."""

    num_heads, head_dim = HEADS // 2, D


class Rotated(Stacked):
    """Neighbouring components as complex numbers, as in the rotary positions of Llama; `first` is the real one."""

    first = 0

    def project(self, x):
        q, k, v = super().project(x)
        angles = torch.arange(x.shape[1])[:, None].to(x) / torch.arange(1, 1 + D // 2)
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = (t.unflatten(-1, (-1, 2)).roll(-self.first, -1) for t in (q, k))
        return *(torch.view_as_real(torch.view_as_complex(t) * turn).flatten(-2) for t in pairs), v


class RotatedBack(Rotated):
    """The other component is the real one."""

    first = 1


class Moduli(Stacked):
    """The moduli of complex numbers that have two components each."""

    head_dim = D // 2

    def project(self, x):
        q, k, v = super().project(x)
        return *(torch.view_as_complex(t.unflatten(-1, (-1, 2))).abs() for t in (q, k)), v


class HeadByHead(Stacked):
    """All of one head, then all of the next, under a name that stands for another layout."""

    def __init__(self):
        super().__init__()
        self.qkv = self.mixed
        del self.mixed

    def project(self, x):
        return self.qkv(x).unflatten(-1, (HEADS, 3, D)).permute(3, 0, 2, 1, 4)

    def rows(self):
        every = torch.arange(3 * WIDTH).view(HEADS, 3, D)
        return (self.qkv, every[:, 0]), (self.qkv, every[:, 1])


class ByComponent(Stacked):
    """q, k and v of one component, then those of the next."""

    def project(self, x):
        return self.mixed(x).unflatten(-1, (HEADS, D, 3)).permute(4, 0, 2, 1, 3)

    def rows(self):
        every = torch.arange(3 * WIDTH).view(HEADS, D, 3)
        return (self.mixed, every[..., 0]), (self.mixed, every[..., 1])


class KeysFirst(Stacked):
    def project(self, x):
        k, q, v = super().project(x)
        return q, k, v

    def rows(self):
        key, query = super().rows()
        return query, key


class InAList(OwnAttention):
    """Three projections without names."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def project(self, x):
        return [by_head(linear(x)) for linear in self.linears]

    def rows(self):
        every = torch.arange(WIDTH).view(HEADS, D)
        return (self.linears[0], every), (self.linears[1], every)


class SharedKeys(OwnAttention):
    """Two query heads for each key, k and v fused, rotated halves."""

    def __init__(self):
        super().__init__()
        self.ask, self.answer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def project(self, x):
        q, (k, v) = by_head(self.ask(x)), (by_head(part, HEADS // 2) for part in self.answer(x).chunk(2, -1))
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        turned = [part * angle.cos() + torch.cat([-part[..., 3:], part[..., :3]], -1) * angle.sin() for part in (q, k)]
        return *turned, v

    def rows(self):
        every = torch.arange(WIDTH).view(HEADS, D)
        return (self.ask, every), (self.answer, every[:2])


class OneKey(SharedKeys):
    """One key for all heads."""

    def __init__(self):
        super().__init__()
        self.answer = nn.Linear(WIDTH, 2 * D)

    def project(self, x):
        return by_head(self.ask(x)), *(part[:, None] for part in self.answer(x).chunk(2, -1))

    def rows(self):
        return super().rows()[0], (self.answer, torch.arange(D)[None])


class MoreKeys(InAList):
    """Latents as queries, which look at tokens and at themselves, as in the resampler of Flamingo."""

    def project(self, x):
        tokens = torch.cat([x, x], dim=1)
        return [by_head(linear(part)) for linear, part in zip(self.linears, (x, tokens, tokens), strict=True)]


class Latents(InAList):
    """Learned queries, which are no input, as in attention pooling."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, D
        self.latents = nn.Parameter(torch.randn(5, WIDTH))

    def project(self, x):
        latents = self.latents.expand(len(x), -1, -1)
        return [by_head(linear(part)) for linear, part in zip(self.linears, (latents, x, x), strict=True)]


class PositionsFirst(InAList):
    """Scores of learned positions, which no projection of the input made, before those of the keys."""

    def __init__(self):
        super().__init__()
        self.positions, self.relate = nn.Parameter(torch.randn(12, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.project(x)
        r = by_head(self.relate(self.positions[: x.shape[1]].expand(len(x), -1, -1)))
        weights = ((q @ r.mT + q @ k.mT) * D**-0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Folded(InAList):
    """Batch and heads in one axis."""

    def forward(self, x):
        q, k, v = (self.fold(by_head(linear(x))) for linear in self.linears)
        mixed = torch.bmm(torch.bmm(q, k.mT).mul(D**-0.5).softmax(-1), v)
        return self.unfold(mixed, len(x)).transpose(1, 2).flatten(2)

    def fold(self, x):
        return x.flatten(0, 1)

    def unfold(self, x, batch):
        return x.unflatten(0, (batch, HEADS))


class FoldedByHead(Folded):
    """The same, all sequences of one head and then those of the next."""

    def fold(self, x):
        return x.transpose(0, 1).flatten(0, 1)

    def unfold(self, x, batch):
        return x.unflatten(0, (HEADS, batch)).transpose(0, 1)


class AsManyHeadsAsComponents(Folded):
    """Four heads of four, whose axis of components is as long as that of the heads would be."""

    def __init__(self):
        super().__init__()
        self.linears[0], self.linears[1] = (nn.Linear(WIDTH, HEADS**2) for _ in range(2))

    def rows(self):
        every = torch.arange(HEADS**2).view(HEADS, HEADS)
        return (self.linears[0], every), (self.linears[1], every)


class AsManyHeadsAsTokens(OwnAttention):
    """Twelve heads of two behind the tokens, which are as many in the trial."""

    def __init__(self):
        super().__init__()
        self.length = 12
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.positions = nn.Parameter(torch.zeros(self.length, WIDTH))

    def forward(self, x):
        x = x + self.positions
        q, k, v = (part(x).unflatten(-1, (12, 2)) for part in (self.query, self.key, self.value))
        weights = (torch.einsum("bnhd,bmhd->bhnm", q, k) * 2**-0.5).softmax(-1)
        return torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(2)

    def rows(self):
        every = torch.arange(WIDTH).view(12, 2)
        return (self.query, every), (self.key, every)


class Picture(OwnAttention):
    """Convolutions of 1 x 1 on pictures."""

    def __init__(self):
        super().__init__()
        self.make = nn.Conv2d(WIDTH, 3 * WIDTH, 1)

    def project(self, x):
        return [by_head(part.flatten(2).mT) for part in self.make(x).chunk(3, 1)]

    def rows(self):
        every = torch.arange(3 * WIDTH).view(3, HEADS, D)
        return (self.make, every[0]), (self.make, every[1])


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = x.mT.unflatten(-1, (3, 3)) if isinstance(self.layer, Picture) else x
        return self.head(self.layer(x))


class LowRank(Stacked):
    """A projection that another one adds to, which also makes q and k."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, 3 * WIDTH)

    def project(self, x):
        return [by_head(part) for part in (self.mixed(x) + self.up(self.down(x))).chunk(3, -1)]


class Gated(InAList):
    def project(self, x):
        q, k, v = super().project(x)
        return q * by_head(self.linears[2](x)).sigmoid(), k, v


class BatchNormed(InAList):
    """A norm of statistics of its own behind each projection."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), Transposed(WIDTH)) for _ in range(3))


class Transposed(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.mT).mT


class Tiled(SharedKeys):
    """Keys shared by heads that are not neighbours."""

    def project(self, x):
        q, (k, v) = by_head(self.ask(x)), (by_head(part, HEADS // 2) for part in self.answer(x).chunk(2, -1))
        return q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)


class Scaled(nn.Linear):
    """A linear map that does more than to multiply by its weight."""

    def forward(self, x):
        return 2 * super().forward(x)


class OfASubclass(InAList):
    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(Scaled(WIDTH, WIDTH) for _ in range(3))


class Halved(InAList):
    """Half of the heads from one projection, half from another."""

    def project(self, x):
        q, k, v = super().project(x)
        return torch.cat([q[:, :2], v[:, 2:]], 1), k, v


class HeadAfterHead(nn.Module):
    """A loop over the heads, with projections of each."""

    num_heads, head_dim = HEADS, D

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, 3 * D) for _ in range(HEADS))

    def forward(self, x):
        parts = (linear(x).chunk(3, -1) for linear in self.linears)
        return torch.cat([(q @ k.mT * D**-0.5).softmax(-1) @ v for q, k, v in parts], -1)


class OneAfterTheOther(nn.Module):
    """Two attentions in one module, with projections of their own."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))

    def forward(self, x):
        for linear in self.linears:
            q, k, v = (by_head(part) for part in linear(x).chunk(3, -1))
            x = ((q @ k.mT * D**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x


class OfGroups(Picture):
    """Convolutions that see a part of their input each."""

    def __init__(self):
        super().__init__()
        self.make = nn.Conv2d(WIDTH, 3 * WIDTH, 1, groups=2)
