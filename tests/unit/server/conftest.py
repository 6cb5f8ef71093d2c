"""The application over a fake client, served the way the supervisor serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from engine.server.app import create_app
from tests.support.fake_client import FakeClient


@pytest.fixture
async def fake() -> FakeClient:
    return FakeClient()


@pytest.fixture
async def http(fake: FakeClient) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    # The test server sets handler_cancellation=True, as `serve` does.
    async with TestClient(TestServer(create_app(fake, keep_alive_s=0.05))) as client:  # ty: ignore[invalid-argument-type]
        yield client
