"""Models, health, server_info, model_info, flush_cache, and what is no route."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.errors import ErrorInfo, OverloadedError, ProcessDiedError
from engine.server import health
from engine.server.error_body import error_body
from engine.server.info import SHOWN_OPTIONS
from tests.support.fake_client import FakeClient, FakeHealth, Script
from tests.unit.server.support import CHAT, HELLO, Http, expect_error, post

CARD = {
    "id": "org/tiny",
    "object": "model",
    "created": 1_700_000_000,
    "owned_by": "engine-serve",
    "root": "org/tiny",
    "parent": None,
    "max_model_len": 512,
}


async def test_models(http: Http) -> None:
    assert await (await http.get("/v1/models")).json() == {"object": "list", "data": [CARD]}
    assert await (await http.get("/v1/models/org/tiny")).json() == CARD
    assert await (await http.get("/v1/models/org%2Ftiny")).json() == CARD
    error = await expect_error(await http.get("/v1/models/other"), 404, "model", "org/tiny")
    assert error["code"] == "model_not_found"


async def test_health(http: Http, fake: FakeClient) -> None:
    response = await http.get("/health")
    assert response.status == 200
    assert await response.json() == {
        "status": "ok",
        "state": "ready",
        "reason": "",
        "processes": [{"name": "scheduler", "pid": 1, "age_s": 0.1}],
    }
    fake.report = FakeHealth(False, "restarting", "scheduler: no heartbeat for 6 s", [])
    response = await http.get("/health")
    assert response.status == 503
    body = await response.json()
    assert body["status"] == "unavailable"
    assert (body["state"], body["reason"]) == ("restarting", "scheduler: no heartbeat for 6 s")
    assert not fake.asked


async def test_health_generate_really_generates(http: Http, fake: FakeClient) -> None:
    response = await http.get("/health_generate")
    assert (response.status, await response.json()) == (200, {"status": "ok"})
    (ask,) = fake.asked
    assert ask.label.startswith("HEALTH_CHECK_")
    assert ask.sampling.max_tokens == 1
    assert fake.in_flight == 0


@pytest.mark.parametrize(
    "script",
    [
        Script(hang_before_accept=True),
        Script(texts=[], hang_after_texts=True),
        Script(refuse=OverloadedError("The queue is full.")),
        Script(fail=ProcessDiedError("The scheduler ended.")),
    ],
)
async def test_health_generate_without_a_token(
    http: Http, fake: FakeClient, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    monkeypatch.setattr(health, "GENERATE_TIMEOUT_S", 0.1)
    fake.script = script
    await expect_error(await http.get("/health_generate"), 503, None, "No token came")
    assert fake.in_flight == 0


async def test_health_generate_before_the_model_is_ready(http: Http, fake: FakeClient) -> None:
    fake.state = "starting"
    await expect_error(await http.get("/health_generate"), 503, None, "starting")
    assert not fake.asked


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_flush_cache(http: Http, method: str) -> None:
    response = await http.request(method, "/flush_cache")
    assert (response.status, await response.json()) == (200, {"success": True, "pages": 12})


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info(http: Http, fake: FakeClient, path: str) -> None:
    body = await (await http.get(path)).json()
    assert body == {
        "model": "org/tiny",
        "model_path": "/models/tiny",
        "tokenizer_path": "/models/tiny",
        "is_generation": True,
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "context_length": 512,
        "weight_version": "default",
        "preferred_sampling_params": None,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }
    fake.state, fake.model = "starting", None
    body = await (await http.get(path)).json()
    assert (body["model"], body["model_path"], body["vocab_size"]) == ("org/tiny", None, None)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info(http: Http, fake: FakeClient, path: str) -> None:
    body = await (await http.get(path)).json()
    assert body["model"] == "org/tiny"
    assert body["model_path"] == "/models/tiny"
    assert body["config"]["port"] == 30000
    assert {name: body["scheduler"][name] for name in ("running", "waiting", "pages", "step", "audit_errors")} == {
        "running": 1,
        "waiting": 2,
        "pages": {"total": 100, "free": 60, "tree": 30, "tail": 8, "in_flight": 2},
        "step": 33,
        "audit_errors": 0,
    }
    drafts = ("drafted_tokens", "accepted_tokens", "verified_rows")
    assert [body["scheduler"][name] for name in drafts] == [40, 30, 20]
    fake.state = "starting"
    body = await (await http.get(path)).json()
    assert (body["state"], body["scheduler"]) == ("starting", None)


async def test_routes_before_the_model_is_known(http: Http, fake: FakeClient) -> None:
    fake.state, fake.model, fake.context_length = "starting", None, 0
    body = await (await http.get("/server_info")).json()
    assert (body["model"], body["model_path"]) == ("org/tiny", None)
    assert (await (await http.get("/v1/models")).json())["data"][0]["root"] == "org/tiny"
    response = await post(http, HELLO)
    await expect_error(response, 503, None, "starting")


def test_the_whitelist_names_every_option_but_the_key() -> None:
    assert set(SHOWN_OPTIONS) == set(EngineConfig().flat()) - {"api_key"}


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/chat/completions/", "/%ff", "/" + "x" * 3000])
async def test_no_such_route(http: Http, path: str) -> None:
    error = await expect_error(await http.get(path), 404)
    assert error["code"] == "not_found"


async def test_wrong_method(http: Http) -> None:
    response = await http.get(CHAT)
    error = await expect_error(response, 405, None, "GET")
    assert error["code"] == "method_not_allowed"
    assert response.headers["Allow"] == "POST"


@pytest.mark.parametrize("text", ["x" * 10**6, "\x00" * 10**6, "\ud800" * 10**6, "\U0001f600" * 10**6, '"\\' * 10**6])
def test_error_bodies_are_short(text: str) -> None:
    assert len(error_body(ErrorInfo(400, "invalid_request_error", text, text))) < 4096
