"""Every preference loss and its gradient against its paper's formula, in float64."""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.errors import UserError
from deltatune.options.config import TrainConfig
from deltatune.train.preferences.objectives import OBJECTIVES, Answers, log_complement, objective_of

PRESENT = np.array([1, 1, 1, 1, 0.0])
DESIRABLE = np.array([1, 0, 0, 1, 0.0])
TOKENS = np.array([[3, 4], [1, 9], [7, 2], [5, 5], [1, 1.0]])
NLL, NLL_WITH_PROMPT = 1.75, 2.5


def draws():
    draw = np.random.default_rng(0)
    policy = -np.abs(draw.normal(8, 4, (5, 2)))
    return policy, policy + draw.normal(0, 3, (5, 2))


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def smoothed(m, e):
    return -(1 - e) * log_sigmoid(m) - e * log_sigmoid(-m)


def difference(pairs):
    return pairs[:, 0] - pairs[:, 1]


def dpo(p, r, c):
    m, e = c.beta * difference(p - r), c.label_smoothing
    return {
        "sigmoid": smoothed(m, e),
        "robust": ((1 - e) * -log_sigmoid(m) + e * log_sigmoid(-m)) / (1 - 2 * e),
        "hinge": np.maximum(0, 1 - m),
        "ipo": (difference((p - r) / TOKENS) - 1 / (2 * c.beta)) ** 2,
    }[c.loss_variant]


def orpo(p, r, c):
    mean = p / TOKENS
    odds = mean - np.log1p(-np.exp(mean))
    return NLL_WITH_PROMPT - c.beta * log_sigmoid(difference(odds))


def kto(p, r, c, divergence=None):
    ratio, other = (p - r).T
    z = max(0, (other * PRESENT).sum() / PRESENT.sum()) if divergence is None else divergence
    sign = np.where(DESIRABLE > 0, 1, -1)
    return 1 - 1 / (1 + np.exp(-c.beta * sign * (ratio - z)))


def simpo(p, r, c):
    return smoothed(c.beta * difference(p / TOKENS) - c.gamma, c.label_smoothing)


def cpo(p, r, c):
    m = c.beta * difference(p)
    forms = {
        "sigmoid": smoothed(m, c.label_smoothing),
        "hinge": np.maximum(0, 1 - m),
        "ipo": (difference(p / TOKENS) - 1 / (2 * c.beta)) ** 2,
    }
    return forms[c.loss_variant] + NLL


FORMULAS = {"dpo": dpo, "orpo": orpo, "kto": kto, "simpo": simpo, "cpo": cpo}
CASES = [(loss, variant) for loss, objective in OBJECTIVES.items() for variant in objective.variants]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(("loss", "variant"), CASES)
def test_losses_and_gradients_are_those_of_the_formula(loss, variant, smoothing):
    if smoothing and (loss in ("orpo", "kto") or variant in ("hinge", "ipo")):
        pytest.skip("this form has no label smoothing")
    config = TrainConfig(loss=loss, loss_variant=variant, beta=0.3, gamma=0.7, label_smoothing=smoothing)
    policy, reference = draws()
    fixed = [mx.array(each.astype(np.float32)) for each in (reference, TOKENS, DESIRABLE, PRESENT)]

    def ours(p):
        r, tokens, desirable, present = fixed
        answers = Answers(p, r, tokens, mx.array(NLL), mx.array(NLL_WITH_PROMPT), desirable, present, present.sum())
        losses = objective_of(config).score(answers, config).losses
        return (losses * present).sum(), losses

    (_, losses), gradient = mx.value_and_grad(ours)(mx.array(policy.astype(np.float32)))
    expected = FORMULAS[loss](policy, reference, config)
    np.testing.assert_allclose(np.array(losses)[:4], expected[:4], rtol=3e-6, atol=1e-6)
    # The divergence of KTO is a constant for the gradient.
    other = (policy - reference)[:, 1]
    constant = [max(0, (other * PRESENT).sum() / PRESENT.sum())] if loss == "kto" else []
    numeric = np.zeros_like(policy)
    for index in np.ndindex(*policy.shape):
        step = np.zeros_like(policy)
        step[index] = 1e-5
        up, down = (FORMULAS[loss](policy + sign * step, reference, config, *constant) for sign in (1, -1))
        numeric[index] = ((up - down) * PRESENT).sum() / 2e-5
    np.testing.assert_allclose(np.array(gradient), numeric, rtol=1e-5, atol=1e-6)
    assert np.abs(numeric[:4]).max() > 1e-2
    if loss == "kto":
        assert constant[0] > 0.1


def test_the_odds_are_exact_for_all_probabilities():
    """The logarithm of 1 - exp(x) has a gradient that stays finite, near 0 as well."""
    x = np.array([-1e-6, -1e-3, -0.5, -np.log(2), -0.8, -5, -80])
    (_, values), gradient = mx.value_and_grad(lambda x: (log_complement(x).sum(), log_complement(x)))(
        mx.array(x.astype(np.float32))
    )
    exact = x.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(np.array(values), np.log(-np.expm1(exact)), rtol=2e-6, atol=1e-30)
    np.testing.assert_allclose(np.array(gradient), -1 / np.expm1(-exact), rtol=2e-6, atol=1e-30)
    assert np.isfinite(np.array(mx.grad(lambda x: log_complement(x).sum())(mx.zeros(1)))).all()


WRONG = {
    "a form that the loss lacks": ({"loss": "orpo", "loss_variant": "ipo"}, "orpo has no form 'ipo'; expected sigmoid"),
    "--no-mask-prompt": ({"loss": "dpo", "mask_prompt": False}, "always counts answers only"),
}


@pytest.mark.bad_input("a preference loss with {name}")
@pytest.mark.parametrize("name", WRONG)
def test_options_that_do_not_fit_the_loss_are_refused(name):
    options, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        objective_of(TrainConfig(**options))
