"""Refuses a message whose role is neither a common one nor one of the model's chat template."""

from __future__ import annotations

import re

from ..errors import UserError
from ..options.values import nearest
from .row_formats import ASSISTANT, SYSTEM, TOOL, Messages

ROLES = [SYSTEM, "developer", "user", ASSISTANT, TOOL]


def check_roles(messages: Messages, template: str | None, source: str) -> None:
    """Refuse a role that is mistyped.

    Many templates write whatever role they are given, so a mistyped one would train as it stands.

    Args:
        messages: the messages of a row.
        template: the chat template, which may name further roles; None where code writes conversations.
        source: what messages call the row.

    Raises:
        UserError: a role is unknown.
    """
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role in ROLES or template is None or re.search(rf"""(['"]){re.escape(role)}\1""", template):
            continue
        raise UserError(
            f"{source}: message {number}: unknown role {role!r}{nearest(role, ROLES)}; expected {', '.join(ROLES)}, or "
            "a role that the model's chat template names."
        )
