"""Layers that share caches, have none, or return more than their rows train in every way, with plain gradients.

scripts/families tries all model types; these have unusual layers.
"""

import warnings

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from deltatune.layers import describe
from deltatune.models.layer_caches import carries
from families import weekly_but
from other_towers import from_families

# The test replaces it for the reference, which runs upstream's code alone.
pytestmark = pytest.mark.filterwarnings("ignore:mlx.core.argpartition stays as it is")
PACKS = {"gemma2", "gemma4_text", "gemma3n", "nemotron_h"}
# The unusual layers of the others are of a kind that one of these has as well, or test_state_space.py.
TYPES = weekly_but(("gemma3n", "afm7", "nemotron_h", "gemma2", "gemma4_text", "hunyuan"), "gemma3n")


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_trains_in_every_way_or_is_refused(kind, monkeypatch):
    """one_type.py gives a sentence in the place of a number where an error is above its bound."""
    one_type = from_families("one_type")
    one_type.with_fixed_choices(lambda name, function: monkeypatch.setattr(mx, name, function))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = one_type.main(kind)
    columns = ("full", "checkpoints", "long rows", "merged", *(() if kind == "afm7" else ("4 bits",)))
    assert [type(found[column]) for column in columns] == [float] * len(columns), found
    assert (found["lora"], found["resumed"]) == (True, True), found
    fp32, bf16 = found["packed fp32"], found["packed bf16"]
    if kind in PACKS:
        assert (type(fp32), bf16) == (float, True), (fp32, bf16)
    else:
        assert [text.startswith("refused: packing") for text in (fp32, bf16)] == [True, True], (fp32, bf16)


def test_layers_that_share_a_cache_run_on_whole_rows(tiny_model, monkeypatch):
    model = tiny_model("qwen3")
    first, _, *others = make_prompt_cache(model)
    monkeypatch.setattr("deltatune.models.layer_caches.make_prompt_cache", lambda _: [first, first, *others])
    assert [carry is not None for carry in carries(model, describe(model))] == [False, False, True, True]


def test_layers_that_decode_without_a_cache_carry_nothing(other_model, tiny_model):
    for model, expected in ((other_model("nemotron_h"), [(2, 0), (0, 1), (0, 0)]), (tiny_model("qwen3"), [(0, 1)] * 4)):
        assert [(carry.states, carry.attends) for carry in carries(model, describe(model))] == expected
