import ssl
from pathlib import Path
from urllib.error import HTTPError, URLError

import datasets
import pytest

from deltatune.data import datasets as data_sets
from deltatune.data import load_datasets
from deltatune.errors import UserError


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """hub(answer) makes the hub answer, or fail with an exception; the list holds the requests."""
    asked: list[str] = []

    def use(answer):
        def urlopen(request, timeout):
            asked.append(request.full_url)
            raise answer

        monkeypatch.setattr(data_sets, "urlopen", urlopen)
        return asked

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    data_sets._answers.cache_clear()
    return use


@pytest.mark.bad_input("--data with a mistyped folder, while the hub cannot be reached")
def test_a_mistyped_folder_is_named_before_the_hub_is_asked(hub, folder, tokenizer, tmp_path, capsys):
    asked = hub(URLError(OSError("no route")))
    (tmp_path / "my-data").mkdir()
    config = folder(data="my-dta")
    for _ in range(2):
        with pytest.raises(UserError, match="my-dta: no such data, neither a folder here nor a data set of the"):
            load_datasets(config, tokenizer)
    assert len(asked) == 1
    assert asked[0].endswith("/api/datasets/my-dta")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("--data my-dta: there is no such folder here (did you mean 'my-data'?); asking the Hugging")
    assert "cannot be reached" in second
    assert not datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("answer", "offline"),
    [
        (HTTPError("url", 401, "", None, None), False),
        (URLError(ssl.SSLError("no certificate")), False),
        (TimeoutError("timed out"), True),
    ],
)
def test_only_a_hub_that_does_not_answer_is_left_out(hub, answer, offline):
    hub(answer)
    with data_sets.hub_lookup("some/data"):
        assert datasets.config.HF_HUB_OFFLINE is offline


def test_a_current_folder_that_may_not_be_listed_keeps_nothing_from_being_asked(hub, monkeypatch, capsys):
    def refuse(_):
        raise PermissionError(13, "Permission denied")

    hub(HTTPError("url", 401, "", None, None))
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert data_sets._answers("some/data")
    assert "--data some/data: there is no such folder here; asking" in capsys.readouterr().err
