"""Attention modules of which others call the parts, and never the forward."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import betahook
from support.attention import HEADS, WIDTH, ByHandAttention, make


class WithAList(ByHandAttention):
    """As in DINOv3, whose attention has a second method for crops of several sizes."""

    def forward_list(self, xs):
        return [ByHandAttention.forward(self, x) for x in xs]


class ListBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = WithAList()

    def forward(self, x):
        return self.attn.forward_list([x])[0] if self.training else self.attn(x)


class JointBlock(nn.Module):
    """As in Flux, where an image attends to a text."""

    def __init__(self):
        super().__init__()
        self.image, self.text = ByHandAttention(), ByHandAttention()

    def forward(self, x):
        q, k, v = (
            torch.cat([part.split(getattr(part, name)(x)) for part in (self.image, self.text)], 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        return ((q @ k.mT / 3).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("kind", "file"), [(ListBlock, "attention.py"), (JointBlock, "test_bypassed.py")])
def test_a_module_whose_parts_are_called_past_its_forward_is_left_alone(x, kind, file):
    model = make(kind)
    expected = model(x)
    with betahook.attach(model, controller="monitor") as hook:
        assert torch.equal(model(x), expected)
        for layer in hook.layers.values():
            assert layer.refusal.startswith(f"its query projection is called at {file}:")
            with pytest.raises(RuntimeError, match="the layer is left alone: "):
                layer.beta = 1.0
        hook.step()


def test_beta_does_not_stay_in_evaluation_alone(x):
    model = make(ListBlock)
    expected = model.eval()(x)
    with betahook.attach(model, when="always") as hook:
        model(x)
        layer = hook.layers["1.attn"]
        assert layer.refusal is None
        layer.beta = 2 * layer.beta_default
        assert not torch.equal(model(x), expected)
        model.train()(x)
        assert layer.refusal is not None
        assert torch.equal(model.eval()(x), expected)


class JointInTraining(JointBlock):
    def forward(self, x):
        return super().forward(x) if self.training else self.image(x) + self.text(x)


def test_a_forward_in_evaluation_shows_nothing_about_training(x):
    model = make(JointInTraining)
    with betahook.attach(model, controller="monitor") as hook:
        model.eval()(x)
        assert [layer.refusal for layer in hook.layers.values()] == [None, None]
        model.train()(x)
        assert None not in [layer.refusal for layer in hook.layers.values()]


def test_a_parent_may_use_the_projection_beside_the_forward(x):
    class Regularised(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = ByHandAttention()

        def forward(self, x):
            return self.attn(x) + self.attn.q_proj(x)

    model = make(Regularised)
    with betahook.attach(model, controller="monitor") as hook:
        model(x).sum().backward()
        hook.step()
        model.eval()(x)
        assert hook.layers["1.attn"].refusal is None


class WithATest(ByHandAttention):
    """As in MixFormer, which tracks by further methods."""

    def queries(self, x):
        return self.split(self.q_proj(x))

    def keys_and_values(self, x):
        return [self.split(part(x)) for part in (self.k_proj, self.v_proj)]

    def attend(self, x):
        q, (k, v) = self.queries(x), self.keys_and_values(x)
        return (q @ k.mT / 3).softmax(-1) @ v

    def attend_by_kernel(self, x):
        return torch.nn.functional.scaled_dot_product_attention(self.queries(x), *self.keys_and_values(x))

    def attend_elsewhere(self, x):
        return self.weighted(self.split(self.q_proj(x)), *self.keys_and_values(x))

    def weighted(self, q, k, v):
        return (q @ k.mT / 3).softmax(-1) @ v

    def penalty(self, x):
        return self.queries(x).square().mean()

    def output_and_penalty(self, x):
        return self.forward(x), self.queries(x).square().mean()


@pytest.mark.parametrize("method", ["attend", "attend_by_kernel", "attend_elsewhere"])
def test_a_method_that_attends_beside_the_forward_leaves_the_module_alone(x, method):
    model = make(WithATest)
    with betahook.attach(model, controller="monitor") as hook:
        layer = hook.layers["1"]
        for each in (model.train(), model.eval()):
            each(x)
        getattr(model[1], method)(x)
        assert layer.refusal is None  # in evaluation nothing is measured, and its beta is the model's own
        layer.beta = 2 * layer.beta_default
        getattr(model[1], method)(x)
        assert layer.refusal.startswith("its query projection is called at test_bypassed.py:")


@pytest.mark.parametrize("method", ["penalty", "output_and_penalty"])
def test_a_method_that_does_not_attend_may_use_the_projection(x, method):
    model = make(WithATest)
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        getattr(model[1], method)(x)
        assert hook.layers["1"].refusal is None


def look(module, x):
    return module.q_proj(x[0])


@pytest.mark.parametrize("way", ["from outside", "in a hook"])
def test_the_projection_may_be_looked_at(x, way):
    model = make(ByHandAttention)
    with betahook.attach(model, controller="monitor") as hook:
        if way == "in a hook":
            model[1].register_forward_pre_hook(look)
        model(x)
        look(model[1], [torch.randn(3, WIDTH)])
        assert hook.layers["1"].refusal is None


def test_a_projection_may_be_shared(x):
    outer = type("Outer", (nn.Sequential,), {"forward": lambda self, x: self[1](self[0](x))})
    model = outer(ByHandAttention(), ByHandAttention())
    model[1].q_proj = model[0].q_proj
    with betahook.attach(model, controller="monitor") as hook:
        model(x)
        assert [layer.refusal for layer in hook.layers.values()] == [None, None]


def test_a_module_that_was_replaced_is_not_left_alone(x):
    """BigBird-Pegasus replaces its attention in the first forward with a short text."""
    model = make(ByHandAttention)
    with betahook.attach(model, controller="monitor") as hook:
        other = ByHandAttention()
        other.q_proj, model[1] = model[1].q_proj, other
        outer = type("Outer", (nn.Sequential,), {"forward": lambda self, x: self[1](self[0](x))})
        model.__class__ = outer
        model(x)
        assert hook.layers["1"].refusal is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_projection_may_run_again_in_the_backward(x, reentrant):
    class Checkpointed(ByHandAttention):
        def forward(self, x):
            q = torch.utils.checkpoint.checkpoint(self.q_proj, x, use_reentrant=reentrant)
            return self.mix(self.split(q), *(self.split(part(x)) for part in (self.k_proj, self.v_proj)))

        def train_on(self, x):
            self(x).sum().backward()

    model = make(Checkpointed)
    with betahook.attach(model[1], controller="monitor") as hook:
        model[1].train_on(model[0](x))
        assert hook.layers[""].refusal is None


def out_of_sight(q, k, v):
    """A kernel that torch shows to no mode."""
    with torch._C.DisableTorchFunction():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


class FastInEvaluation(ByHandAttention):
    def mix(self, q, k, v):
        return super().mix(q, k, v) if self.training else out_of_sight(q, k, v)


class Skipping(ByHandAttention):
    """As with stochastic depth."""

    def forward(self, x):
        return super().forward(x) if self.training else x


def test_a_kernel_out_of_sight_is_named_where_another_branch_is_followed(x):
    model = make(FastInEvaluation)
    expected = model(x)
    with betahook.attach(model, controller="monitor") as hook:
        layer = hook.layers["1"]
        model(x).sum().backward()
        hook.step()
        layer.beta = 2 * layer.beta_default
        model.eval()(x)
        assert layer.refusal == (
            "a forward computed queries, but no attention over them was seen: it may run in a kernel that betahook "
            "cannot see"
        )
        assert torch.equal(model.train()(x), expected)


def test_a_kernel_out_of_sight_in_evaluation_does_not_concern_who_watches_training(x):
    model = make(FastInEvaluation)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        for _ in range(2):
            model.eval()(x)
            model.train()(x).sum().backward()
            hook.step()
        assert hook.layers["1"].refusal is None
        assert hook.layers["1"].statistics.count > 0


def test_a_kernel_out_of_sight_is_named_to_who_watches_it(x):
    model = make(FastInEvaluation)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        model.eval()(x)
        assert "kernel that betahook cannot see" in hook.layers["1"].refusal


def test_a_forward_that_projects_no_queries_may_do_without_attention(x):
    model = make(Skipping)
    with betahook.attach(model, controller="monitor", when="always") as hook:
        for _ in range(2):
            model.train()(x)
            model.eval()(x)
        assert hook.layers["1"].refusal is None


PASSED = "its forward ran, but no attention was seen in it: it may run in a kernel that betahook cannot see"


class Unseen(nn.Module):
    """Attention of a kernel out of sight, if at all, whose projection has a name that nobody knows."""

    is_skipped = False

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.lin = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        if self.is_skipped:
            return x
        q, k, v = (part.transpose(1, 2) for part in self.lin(x).unflatten(-1, (3, HEADS, -1)).unbind(2))
        return self.mix(q, k, v).transpose(1, 2).flatten(2)

    def mix(self, q, k, v):
        return out_of_sight(q, k, v)


class SeenInTraining(Unseen):
    def mix(self, q, k, v):
        return ((q @ k.mT / 3).softmax(-1) @ v) if self.training else out_of_sight(q, k, v)


class AllUnseen(Unseen):
    """One kernel for all of it."""

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            return super().forward(x)


@pytest.mark.parametrize("is_beside_another", [True, False])
def test_a_kernel_out_of_sight_is_named_where_no_projection_is_known(x, caplog, is_beside_another):
    model = make(Unseen)
    if is_beside_another:
        model.append(ByHandAttention())
    expected = model(x)
    with betahook.attach(model, controller="monitor") as hook:
        model.eval()(x)
        layer = hook.layers["1"]
        assert layer.refusal is None  # nothing is measured in evaluation
        for _ in range(2):
            assert torch.equal(model.train()(x), expected)
            hook.step()
        assert layer.refusal == PASSED
        assert f"1: left alone, {PASSED}" in repr(hook)
        assert "not reached" not in repr(hook)
    assert [record.message.partition(". ")[0] for record in caplog.records] == [f"1 is left alone: {PASSED}"]


@pytest.mark.parametrize("is_seen_first", [True, False])
def test_a_forward_without_attention_may_project_where_another_shows_one(x, is_seen_first):
    model = make(SeenInTraining).eval()  # in which a trial shows no projection either
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        assert hook.layers["1"].projections is None
        if is_seen_first:
            model.train()(x)
        model.eval()(x)
        model.train()(x)
        hook.step()
        model[1].is_skipped = True
        model(x)
        hook.step()
        assert hook.layers["1"].refusal is None
        assert hook.layers["1"].beta_default == pytest.approx(1 / 3)


@pytest.mark.parametrize("kind", [AllUnseen, Unseen])
def test_a_forward_that_shows_nothing_says_so(x, caplog, kind):
    model = make(kind)
    model[1].is_skipped = kind is Unseen
    with betahook.attach(model, controller="monitor") as hook:
        model(x).sum().backward()
        hook.step()
        assert hook.layers["1"].refusal is None
        assert f"not reached: 1, {PASSED}" in repr(hook)
        hook.metrics()
    assert [record.message for record in caplog.records] == [f"not measured, hence not in the metrics: 1 ({PASSED})"]


class Gated(ByHandAttention):
    is_skipped = False

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.gate(x) if self.is_skipped else self.gate(x) * super().forward(x)


def test_a_forward_without_attention_may_project_what_are_no_queries(x):
    model = make(Gated)
    with betahook.attach(model, controller="monitor", interval=1) as hook:
        model[1].is_skipped = True
        model(x).sum().backward()
        hook.step()
        model[1].is_skipped = False
        model(x).sum().backward()
        hook.step()
        assert hook.layers["1"].refusal is None
        assert hook.layers["1"].statistics.count > 0
