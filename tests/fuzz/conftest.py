"""Profiles of hypothesis: a short run that is the same everywhere, and a long one of fresh examples (`make fuzz`)."""

import json

import pytest
from fuzz_commands import Commands
from hypothesis import HealthCheck, Phase, settings

_COMMON = {
    "deadline": None, "database": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate],
}  # fmt: skip
settings.register_profile("short", derandomize=True, max_examples=6, **_COMMON)
settings.register_profile("fuzz", max_examples=100, **_COMMON)
# --hypothesis-profile, which pytest reads after this file, may choose the other.
settings.load_profile("short")


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    made = Commands(tmp_path_factory.mktemp("worker"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def rows():
    line = {"prompt": "the quick brown fox", "completion": "jumps over"}
    return (json.dumps(line) + "\n").encode() * 4
