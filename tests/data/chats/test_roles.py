import pytest

from deltatune.data.rows.row_formats import Features
from deltatune.data.text import ROLES, TextEncoder, check_roles
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig

TEMPLATE = "{% for m in messages %}{% if m.role == 'observer' %}?{% endif %}{{ m.role }}{{ m.content }}{% endfor %}"


def said(*roles):
    return [{"role": role, "content": "x"} for role in roles]


@pytest.mark.bad_input("a row of data with the role `usr`")
def test_a_mistyped_role_is_refused(tokenizer):
    encode = TextEncoder(tokenizer, Features(), TrainConfig.mask_prompt)
    message = r"a.jsonl:3: message 2: unknown role 'usr' \(did you mean 'user'\?\); expected system, developer, user, "
    with pytest.raises(UserError, match=message):
        encode({"messages": said("system", "usr", "assistant")}, "a.jsonl:3")
    assert encode({"messages": said("system", "user", "assistant", "function", "assistant")}, "a.jsonl:3")


def test_common_roles_and_those_of_the_template_are_known():
    check_roles(said(*ROLES, "observer"), TEMPLATE, "row 1")
    for role in ("observe", "m", "OBSERVER"):
        with pytest.raises(UserError, match="row 1: message 1: unknown role"):
            check_roles(said(role), TEMPLATE, "row 1")
    check_roles(said("anything"), None, "row 1")
