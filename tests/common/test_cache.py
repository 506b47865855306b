"""Where kvfold keeps what it can make again."""

from pathlib import Path

from kvfold.common.cache import cache_folder


def test_the_nearest_wish_counts(monkeypatch, tmp_path):
    for name in ("KVFOLD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/kvfold"
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert cache_folder() == Path("/there/kvfold")
    monkeypatch.setenv("KVFOLD_CACHE", "/here")
    assert cache_folder() == Path("/here")


def test_nobody_needs_a_home_who_names_a_cache(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("KVFOLD_CACHE", "/here")
    assert cache_folder() == Path("/here")
