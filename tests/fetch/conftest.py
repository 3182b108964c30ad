import pytest
from tiny_gguf import write_tiny_gguf


@pytest.fixture
def tiny_gguf(tmp_path):
    return write_tiny_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty download cache; a real download in a test is an error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def refuse(*_, **__):
        pytest.fail("a test tried to download")

    monkeypatch.setattr("toolchain.fetch.download._run", refuse)
    return tmp_path / "cache" / "dtool" / "downloads"
