"""What messages may not hold."""

import pytest

from rlpipe.redaction import without_secrets


@pytest.mark.parametrize("name", ["GIT_PASSWORD", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING"])
def test_b07_values_of_private_variables(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Case B07."""
    monkeypatch.setenv(name, "marker-8f3a\n")
    assert without_secrets("refused marker-8f3a at a") == "refused *** at a"


def test_b07_credentials_in_urls() -> None:
    """Case B07."""
    assert without_secrets("cannot read 'https://me:marker@git.example/a@b.git'") == "cannot read 'https://***@git.example/a@b.git'"


def test_other_text_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_SSH_KEY", "/secrets/key")
    monkeypatch.setenv("SHORT_TOKEN", "a")
    text = "cannot read /secrets/key at https://git.example/a"
    assert without_secrets(text) == text
