"""The API key is nowhere but where it is compared."""

from __future__ import annotations

from engine.config import EngineConfig, HttpOptions


def test_a_printed_configuration_hides_the_key() -> None:
    config = EngineConfig(http=HttpOptions(api_key="sesame"))
    assert "sesame" not in repr(config)
    assert "sesame" not in str(config)
    assert "***" in repr(config)
    assert "port=30000" in repr(config)


def test_other_processes_get_no_key() -> None:
    config = EngineConfig(http=HttpOptions(api_key="sesame", port=1234)).without_secrets()
    assert config.http.api_key is None
    assert config.http.port == 1234
