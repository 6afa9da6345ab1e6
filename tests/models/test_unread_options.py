"""Options that change transformers' logits and that mlx-lm's model does not read are refused."""

import pytest

from deltatune.errors import UserError
from deltatune.models.transformers_configs import check_options


@pytest.mark.bad_input("{option} in a {family} model, which mlx-lm's model does not read")
@pytest.mark.parametrize(
    ("family", "option", "value"),
    [
        ("llama", "hidden_act", "relu"),
        ("qwen3_5_text", "hidden_act", "gelu"),
        ("gptj", "activation_function", "silu"),
        ("gemma3_text", "final_logit_softcapping", 30.0),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gpt_oss", "swiglu_alpha", 1.0),
    ],
)
def test_an_option_that_nobody_reads_is_refused(family, option, value):
    with pytest.raises(UserError, match=f"it sets {option} to .*mlx-lm's {family} computes with"):
        check_options({"model_type": family, option: value})


@pytest.mark.parametrize(
    ("family", "option", "value"),
    [
        ("llama", "hidden_act", "silu"),
        ("llama", "hidden_act", "swish"),
        ("gemma", "hidden_act", "gelu"),
        ("gemma2", "final_logit_softcapping", 10.0),
        ("nemotron", "hidden_act", "relu2"),
        ("granite", "logits_scaling", 8.0),
        ("gemma3_text", "final_logit_softcapping", None),
        ("unknown", "hidden_act", "relu"),
    ],
)
def test_an_option_that_is_read_or_as_ever(family, option, value):
    check_options({"model_type": family, option: value})


def test_the_text_part_of_a_model_with_a_tower_is_looked_at():
    with pytest.raises(UserError, match="final_logit_softcapping"):
        check_options(
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "final_logit_softcapping": 1.0}}
        )
