"""Controllers explain themselves: phase, last move and reason, as they are after an update."""

import math
from dataclasses import dataclass

import pytest
import torch

import betahook
from betahook import Cap, Clip, Gradient, Monitor, Search, Variance
from betahook.control.base import apply
from betahook.control.notes import Note, checked, combine_controller_notes, combine_head_notes
from betahook.control.opening import Phase
from support.models import build
from support.observations import observe
from support.training import LAYER, train

QUICK = dict(window=1, warmup=0, rise=False, opening=0.5, largest=1.0)


def explained(controller, *observations, beta=1.0, units=1):
    """The notes after some updates."""
    beta, memories = torch.full((units,), beta, dtype=torch.float64), [{}]
    for step, observation in enumerate(observations):
        beta, memories = apply([controller], beta, observe(units=units, step=step, **observation), memories)
    return controller.explain(beta, observe(units=units, **observations[-1]), memories[0])


@pytest.mark.parametrize("said", [Note(), ["low"], [Note()]])
def test_notes_that_are_not_one_for_each_beta(said):
    with pytest.raises(TypeError, match=r"explain\(\) of Cap\(\) must return 2 notes, one for each beta, or none; got"):
        checked(Cap(), said, 2)
    assert checked(Cap(), (), 2) == ()
    assert len(checked(Cap(), [Note(), Note()], 2)) == 2


def test_search_says_where_it_went_and_why():
    up, down = explained(Search(**QUICK), dict(sensitivity=torch.tensor([-1.0, 2.0])), units=2)
    assert up == Note(Phase.SEARCH, 0.5, "a larger beta lowers the loss")
    assert down == Note(Phase.SEARCH, -0.5, "a smaller beta lowers the loss")
    (turned,) = explained(Search(**QUICK), dict(sensitivity=-1.0), dict(sensitivity=1.0))
    assert turned.move == -0.25
    (waits,) = explained(Search(**{**QUICK, "window": 3}), dict(sensitivity=-1.0))
    assert waits == Note(Phase.SEARCH, reason="waits for the end of its first window")


def test_search_says_what_keeps_it_from_a_move():
    (without,) = explained(Search(**QUICK), dict(sensitivity=0.0))
    assert without.reason == (
        "no gradient reaches beta: a frozen layer, rows of one key, or no backward() before hook.step()"
    )
    (frozen,) = explained(Search(**QUICK), dict(sensitivity=1.0), dict(sensitivity=0.0))
    assert frozen.reason == without.reason
    assert explained(Search(**QUICK), dict(sensitivity=1.0, max_score=600.0))[0].move == -0.5
    (note,) = explained(Search(**QUICK), dict(sensitivity=-1.0, max_score=60.0))
    assert note == Note(
        Phase.SEARCH, reason="no move beyond a largest logit of 88, though a larger beta lowers the loss"
    )


@pytest.mark.parametrize(
    ("changes", "ratio", "std", "phase", "words"),
    [
        (dict(warmup=5), 1.2, 1.0, Phase.WAIT, "trained weights wait for the search, 4 batches left"),
        (dict(warmup=5, rise=False), 0.9, 1.0, Phase.UNSEEN, "waits for the search, 4 batches left"),
        (dict(warmup=5), 0.9, 1.0, Phase.WARM_UP, "beta is low while the weights are fresh, 4 batches left"),
        (dict(warmup=2), 0.9, 1.0, Phase.WARM_UP, "beta is low while the weights are fresh, 1 batch left"),
        (dict(warmup=0), 0.9, 1.0, Phase.PLATEAU, "beta is very low while W_q and W_k have not begun to learn"),
        (dict(warmup=0, plateau_batches=0), 0.9, 1e-3, Phase.CLIMB, "beta rises whatever the sensitivity, 9 batches"),
        (dict(warmup=0, plateau_batches=0), 0.9, 9e3, Phase.CLIMB, "holds the std of the logits at 3, 9 batches left"),
    ],
)
def test_the_phases_before_the_search(changes, ratio, std, phase, words):
    controller = Search(**{"rise_batches": 10, "plateau_batches": 3, **changes})
    (note,) = explained(controller, dict(spectral_ratio=ratio, std=std, sensitivity=0.0, max_score=1.0))
    assert note.phase is phase
    assert note.reason.startswith(words)


def test_the_other_controllers():
    assert [note.reason for note in explained(Cap(30.0), dict(max_score=torch.tensor([60.0, 2.0])), units=2)] == [
        "Cap holds the largest logit at 30",
        "",
    ]
    for options, does in (({}, "scales"), ({"log_only": True}, "would scale")):
        clip = Clip(30.0, **options)
        assert [note.reason for note in explained(clip, dict(max_score=torch.tensor([60.0, 2.0])), units=2)] == [
            f"Clip {does} the weights of heads with a logit above 30",
            "",
        ]
    assert explained(Gradient(), dict(sensitivity=3.0)) == [Note(reason="a smaller beta lowers the loss")]
    assert explained(Gradient(), dict(sensitivity=0.0)) == [Note(reason="the loss does not depend on beta")]
    assert explained(Variance(2.0), dict(std=1.0)) == [Note(reason="moves the measured std of the logits to 2")]
    by_weights = [Note(reason="keeps the std that W_q and W_k predict of the logits at 1")]
    assert explained(Variance(source="weights"), dict(std=1.0, predicted_std=2.0)) == by_weights
    (unknown,) = explained(Variance(source="weights"), dict(std=1.0))
    assert unknown.reason == "leaves beta alone: W_q, W_k or their input is out of reach, so that they predict no std"
    assert list(explained(Monitor(), dict(std=1.0))) == []


def test_notes_are_put_together():
    up, down = Note(Phase.SEARCH, 0.1, "up"), Note(Phase.SEARCH, -0.2, "down")
    assert combine_controller_notes([Note(reason="held"), up, Note(reason="Cap")]) == Note(
        Phase.SEARCH, 0.1, "held; up; Cap"
    )
    assert combine_controller_notes([]) == Note()
    steeper = Note(Phase.SEARCH, 0.4, "up")
    assert combine_head_notes([down, up, steeper]) == Note(Phase.SEARCH, pytest.approx(0.1), "up (2 of 3 heads)")
    assert combine_head_notes([down, up, down]) == Note(Phase.SEARCH, pytest.approx(-0.1), "down (2 of 3 heads)")
    assert str(Note(Phase.WARM_UP, 0.0, "low")) == "warm-up: low"
    assert str(Note()) == ""


@pytest.mark.parametrize("per_head", [False, True])
def test_a_hook_passes_on_what_its_controllers_say(per_head):
    model = build("llama")
    chain = [Search(**QUICK), Cap(1e-3)]
    with betahook.attach(model, controller=chain, per_head=per_head) as hook:
        assert all(finding.note == Note() for finding in hook.findings())
        assert f"phase/{LAYER}" not in hook.metrics()
        train(model, hook, 2)
        note, metrics = hook.findings()[0].note, hook.metrics()
        assert note.phase is Phase.SEARCH
        assert "Cap holds the largest logit at 0.001" in note.reason
        assert metrics[f"phase/{LAYER}"] == 5
        assert metrics[f"last_move/{LAYER}"] == note.move != 0
        hook.layers[LAYER].module.q_proj.weight.data.fill_(math.nan)
        model(torch.ones(1, 4, dtype=torch.long))
        hook.step()
        assert hook.findings()[0].note.reason.startswith("held by a NaN")


def test_a_search_that_has_not_moved_yet_has_a_phase_and_no_last_move():
    model = build("llama")
    with betahook.attach(model, controller=Search(**{**QUICK, "window": 9})) as hook:
        train(model, hook, 1)
        metrics = hook.metrics()
    assert metrics[f"phase/{LAYER}"] == Phase.SEARCH
    assert f"last_move/{LAYER}" not in metrics


def test_a_move_without_a_phase_is_no_metric():
    @dataclass(frozen=True)
    class Moving(Monitor):
        def explain(self, beta, observation, state):
            return [Note(move=0.5)] * len(beta)

    model = build("llama")
    with betahook.attach(model, controller=Moving()) as hook:
        train(model, hook, 1)
        assert hook.findings()[0].note.move == 0.5
        assert f"last_move/{LAYER}" not in hook.metrics()


def test_a_bound_is_a_reason():
    model = build("llama")
    with betahook.attach(model, controller=Gradient()) as hook:
        train(model, hook, 1)
        hook.layers[LAYER].beta = 1e3 * hook.layers[LAYER].beta_default
        assert hook.findings()[0].note.reason.startswith("held at its upper bound, 1000 times the")
        hook.layers[LAYER].beta = 1e-3 * hook.layers[LAYER].beta_default
        assert hook.findings()[0].note.reason.startswith("held at its lower bound, 0.001 times the")
    with betahook.attach(model, controller="monitor") as hook:
        train(model, hook, 1)
        hook.layers[LAYER].beta = 1e3 * hook.layers[LAYER].beta_default
        assert hook.findings()[0].note.reason == ""
