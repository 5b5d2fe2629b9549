"""What a model passes to its attention function beside q, k, v and a mask, as the tap reads it."""

import pytest
import torch

import betahook
from betahook.tap.interface import given_mask
from support.models import build, trace


@pytest.mark.parametrize(("name", "shape"), [("s_aux", (4,)), ("sinks", (2, 4, 12, 1))])
def test_sinks_of_each_head_or_of_each_query_take_part_in_the_entropy(name, shape):
    """Beside the logits of the keys, as in gpt-oss and in Inkling 2; Llama passes them on, and uses none."""
    model, ids, sinks = build("llama", "eager"), torch.randint(3, 64, (2, 12)), torch.randn(shape)
    with betahook.attach(model, controller="monitor") as hook, trace() as calls:
        model(input_ids=ids, **{name: sinks})
        measured = next(iter(hook.layers.values())).head_statistics
    of_rows = sinks.view(-1, 4, shape[2] if len(shape) == 4 else 1, 1).expand(2, 4, 12, 1)
    weights = torch.cat([calls[0].softmax_input, of_rows], -1).double().softmax(-1)
    torch.testing.assert_close(measured.entropy, torch.special.entr(weights).sum(-1).mean((0, 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "shape"), [("s_aux", (1, 4)), ("sinks", (2, 4, 12))])
def test_sinks_of_another_shape_leave_the_layer_alone(name, shape):
    """Entropy and sink would be those without them."""
    model = build("llama", "eager")
    with betahook.attach(model, controller="monitor") as hook:
        model(input_ids=torch.randint(3, 64, (2, 12)), **{name: torch.zeros(shape)})
        (refusal,) = {layer.refusal for layer in hook.layers.values()}
        assert refusal == f"its sinks are {[*shape]}, neither [heads] nor [batch, heads, queries, 1]"
        assert not any(layer.statistics.count for layer in hook.layers.values())


@pytest.mark.parametrize("first", [0, 2])
def test_documents_begin_anew_at_the_first_position(first):
    """It is 2 in models that number their padding 1, as RoBERTa."""
    tokens, positions = torch.zeros(1, 4, 5, 8), torch.tensor([[0, 1, 2, 0, 1]]) + first
    given = given_mask("flash_attention_2", torch.nn.Module(), tokens, tokens, None, {"position_ids": positions})
    assert given.tensor.tolist() == [[1, 1, 1, 2, 2]]
