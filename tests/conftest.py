"""One thread a worker (tiny models gain nothing from two); no network and no user's cache, whatever a test does."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """What tests of one run put here is keyed by its content, so they may share it."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["KVFOLD_CACHE"] = str(folder)
    return folder


def pytest_collection_modifyitems(items):
    """The README's commands first: they take longest, and all would wait for them at the end."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")
