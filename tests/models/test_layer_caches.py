"""Layers that share caches, have none, or return more than their rows train in every way, with plain gradients.

scripts/families tries all model types; these have unusual layers.
"""

import functools
import warnings

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from deltatune.layers import describe
from deltatune.models.layer_caches import carries
from other_towers import from_families

# The fixture replaces it for the reference, which runs upstream's code alone.
pytestmark = pytest.mark.filterwarnings("ignore:mlx.core.argpartition stays as it is")
# Their unusual layers are of a kind that another of these types has as well.
LIKE_OTHERS = ("gemma2", "gemma4_text", "hunyuan")
PACKS = {"gemma2", "gemma4_text", "gemma3n", "nemotron_h"}
TYPES = ("gemma3n", "afm7", "nemotron_h", *(pytest.param(kind, marks=pytest.mark.weekly) for kind in LIKE_OTHERS))


@pytest.fixture(scope="module")
def results():
    """results(kind) -> the results of a type, computed once."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one_type = from_families("one_type")
        one_type.with_fixed_choices(lambda name, function: patch.setattr(mx, name, function))
        yield functools.cache(one_type.main)


@pytest.mark.parametrize("kind", TYPES)
def test_checkpointed_on_short_and_long_rows_gradients_are_plain(results, kind):
    # one_type.py gives a sentence where an error is above its bound.
    for column in ("full", "checkpoints", "long rows"):
        assert isinstance(results(kind)[column], float), results(kind)[column]


@pytest.mark.parametrize("kind", TYPES)
def test_runs_with_adapters_continue_and_merge(results, kind):
    found = results(kind)
    assert (found["lora"], found["resumed"]) == (True, True), found
    assert isinstance(found["merged"], float), found["merged"]


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "afm7"])
def test_adapters_on_four_bits_get_plain_gradients(results, kind):
    assert isinstance(results(kind)["4 bits"], float), results(kind)["4 bits"]


@pytest.mark.parametrize("kind", TYPES)
def test_packed_documents_get_the_gradients_that_they_get_alone_or_are_refused_in_both_dtypes(results, kind):
    fp32, bf16 = results(kind)["packed fp32"], results(kind)["packed bf16"]
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
