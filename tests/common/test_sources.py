"""What is not there is noticed before anything is opened."""

import huggingface_hub
import pytest

from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.common.sources import check_there


@pytest.fixture
def asked(monkeypatch):
    """Repositories that were asked for, of a Hub that knows only org/model."""
    seen = []

    def model_info(self, name, *, revision=None, timeout=None):
        seen.append((name, revision))
        if name != "org/model":
            raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    return seen


def test_paths_need_no_hub(tmp_path, asked):
    check_there(tmp_path, str(tmp_path))
    assert not asked
    with pytest.raises(UserError, match="missing does not exist"):
        check_there(tmp_path, tmp_path / "missing")


def test_a_name_may_be_one_of_the_hub(tmp_path, asked):
    check_there("org/model", tmp_path, revision="v1")
    assert asked == [("org/model", "v1")]
    with pytest.raises(EnvironmentFailure, match="there is no my-modle here, and the Hub cannot be reached"):
        check_there(tmp_path, "my-modle")


def test_what_was_fetched_before_need_not_be_asked_for(asked, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: "/cache/config.json")
    check_there("gpt2")
    assert not asked
