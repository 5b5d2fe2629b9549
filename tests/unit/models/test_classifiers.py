import pytest
from torch import nn
from torch.nn.parameter import UninitializedParameter

from betahook.models import classifiers
from betahook.models.classifiers import Verdict
from betahook.models.families import FACTS, Facts


def bypassing(answer):
    return Facts(bypasses_interface=lambda module: answer)


CLASSIFIERS = {
    "listed": (classifiers.rule_out_listed, dict(facts=Facts(not_attention="no")), Verdict(obstacle="no")),
    "not listed": (classifiers.rule_out_listed, {}, None),
    "the interface": (classifiers.accept_interface, dict(used={"get_interface", "softmax", "@"}), Verdict("interface")),
    "past it": (classifiers.accept_interface, dict(used={"get_interface"}, facts=bypassing(True)), Verdict("by hand")),
    "through it": (
        classifiers.accept_interface,
        dict(used={"get_interface"}, facts=bypassing(False)),
        Verdict("interface"),
    ),
    "no interface": (classifiers.accept_interface, dict(used={"softmax"}, facts=bypassing(True)), None),
    "torch": (classifiers.accept_torch, dict(used={"scaled_dot_product_attention", "@"}), Verdict("torch")),
    "or by hand": (
        classifiers.accept_torch,
        dict(used={"scaled_dot_product_attention", "softmax"}),
        Verdict("by hand"),
    ),
    "all of torch's": (classifiers.accept_torch, dict(used={"multi_head_attention_forward"}), Verdict("by hand")),
    "no torch": (classifiers.accept_torch, dict(used={"softmax", "bmm"}), None),
    "a packed kernel": (
        classifiers.refuse_other_kernel,
        dict(used={"flash_attn_varlen_kvpacked_func"}),
        Verdict(
            obstacle="it calls flash_attn_varlen_kvpacked_func, which is not followed: call flash_attn_varlen_func "
            "with q, k and v apart"
        ),
    ),
    "a kernel or by hand": (classifiers.refuse_other_kernel, dict(used={"sageattn", "bmm", "softmax"}), None),
    "a kernel in a part": (classifiers.refuse_other_kernel, dict(below={"sageattn"}), None),
    "no name": (classifiers.doubt_unnamed, dict(name="Mixer"), classifiers.NO_ATTENTION),
    "a short name": (classifiers.doubt_unnamed, dict(name="SelfAttnBlock"), None),
    "a product and a softmax": (classifiers.accept_by_hand, dict(used={"bmm", "Softmax"}), Verdict("by hand")),
    "a softmax in a part": (classifiers.accept_by_hand, dict(used={"einsum"}, below={"softmax"}), Verdict("by hand")),
    "the registry": (classifiers.accept_by_hand, dict(used={"ALL_ATTENTION_FUNCTIONS"}), Verdict("by hand")),
    "the registry in a part": (classifiers.accept_by_hand, dict(below={"ALL_ATTENTION_FUNCTIONS"}), None),
    "a product": (classifiers.accept_by_hand, dict(used={"bmm"}), None),
    "a name only": (classifiers.doubt_name_only, dict(name="LinearAttention2"), classifiers.UNKNOWN_CODE),
    "the name of a part": (classifiers.doubt_name_only, dict(name="AttentionOutput"), None),
    "a softmax in it": (
        classifiers.doubt_name_only,
        dict(name="AttentionLayer", used={"edge_softmax"}),
        classifiers.UNKNOWN_CODE,
    ),
}


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_a_classifier_judges_what_it_knows(case, monkeypatch):
    classifier, signs, expected = CLASSIFIERS[case]
    name, used = signs.get("name", "Made"), signs.get("used", set())
    monkeypatch.setitem(FACTS, name, signs.get("facts", Facts()))
    module = type(name, (nn.Module,), {})()
    suspect = classifiers.Suspect(module, used, used | signs.get("below", set()))
    assert classifier(suspect) == expected


class LazyNorm(nn.Module):
    """Its weight gets its shape in the first forward."""

    def __init__(self):
        super().__init__()
        self.weight = UninitializedParameter()


def test_a_parameter_without_a_shape_may_be_a_matrix():
    assert classifiers.has_matrix(LazyNorm())
    assert classifiers.has_matrix(nn.Linear(2, 2))
    assert not classifiers.has_matrix(nn.LayerNorm(2))
