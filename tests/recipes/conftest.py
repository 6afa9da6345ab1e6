"""Files of other trainers, for the tests of their translation."""

import pytest


@pytest.fixture
def file(tmp_path):
    """file(name, text) -> the path of a file."""

    def write(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write
