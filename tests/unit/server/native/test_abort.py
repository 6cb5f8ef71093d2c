"""POST /abort_request."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_client import FakeClient
from tests.unit.server.native.support import send
from tests.unit.server.support import Http, expect_error


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"rid": "job-1"}, ("job-1", None)),
        ({"rid_prefix": "job-"}, (None, "job-")),
        ({"abort_all": True}, (None, None)),
        ({"rid": "", "abort_all": True}, (None, None)),
        ({"rid": "job-1", "abort_all": False}, ("job-1", None)),
    ],
)
async def test_whole_ids_prefixes_and_all(
    http: Http, fake: FakeClient, body: dict[str, Any], asked: tuple[str | None, str | None]
) -> None:
    response = await send(http, "/abort_request", body)
    assert (response.status, await response.json()) == (200, {"aborted": 1})
    assert fake.aborted == [asked]


async def test_an_unknown_id_is_no_error(http: Http, fake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "abort", lambda **_: 0)
    response = await send(http, "/abort_request", {"rid": "nobody"})
    assert (response.status, await response.json()) == (200, {"aborted": 0})


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({}, None, "none"),
        ({"rid": ""}, None, "none"),
        ({"rid_prefix": ""}, None, "none"),
        ({"abort_all": False}, None, "none"),
        ({"rid": "a", "rid_prefix": "b"}, None, "rid, rid_prefix"),
        ({"rid": "a", "abort_all": True}, None, "rid, abort_all"),
        ({"rid": 5}, "rid", ""),
        ({"abort_all": "yes"}, "abort_all", ""),
    ],
)
async def test_what_names_nothing_aborts_nothing(
    http: Http, fake: FakeClient, body: dict[str, Any], param: str | None, part: str
) -> None:
    await expect_error(await send(http, "/abort_request", body), 400, param, part)
    assert fake.aborted == []
