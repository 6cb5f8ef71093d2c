"""Logprobs through HTTP from a server that drafts: one for each token, in order, streamed or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob

from tests.support.server import Server, serve

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--speculative-algorithm", "NGRAM", "--no-speculative-adaptive")
    options += ("--speculative-ngram-min-match-window-size", "1", "--max-total-tokens", "8192")
    with serve("--model", str(tiny_model), *options, log=tmp_path_factory.mktemp("logs") / "log") as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.7, "seed": 3, "top_p": 0.9}])
@pytest.mark.parametrize("stops", [False, True])
def test_streams_and_answers_have_the_logprobs_of_one_that_does_not_draft(
    server: Server, sampling: dict, stops: bool
) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "one two one two one two"}]
    ask: dict = {"messages": messages, "max_tokens": 60, "logprobs": True, "top_logprobs": 2, "n": 2}
    ask["model"] = client.models.list().data[0].id
    # Few different tokens, so that what came before comes again.
    ask |= {"logit_bias": {str(token): 30 for token in range(70, 73)}, **sampling}
    without = {"speculative": {"enabled": False}}
    plain = client.chat.completions.create(**ask, extra_body=without)
    if stops:
        text = plain.choices[0].message.content or ""
        ask["stop"] = [text[30:36]]
        plain = client.chat.completions.create(**ask, extra_body=without)
        assert plain.choices[0].finish_reason == "stop"
    whole = client.chat.completions.create(**ask)
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert (whole.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 5
    entries = [scored(choice.logprobs) for choice in whole.choices]
    for mine, choice in zip(entries, plain.choices, strict=True):
        others = scored(choice.logprobs)
        assert [entry.token for entry in mine] == [entry.token for entry in others]
        for entry, other in zip(mine, others, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            tops = [top.logprob for top in other.top_logprobs]
            assert [top.logprob for top in entry.top_logprobs] == pytest.approx(tops, abs=1e-4)
    streamed: list[list[ChatCompletionTokenLogprob]] = [[], []]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += scored(choice.logprobs)
    for mine, others in zip(streamed, entries, strict=True):
        assert [entry.token for entry in mine] == [entry.token for entry in others]
        values = [entry.logprob for entry in others]
        assert [entry.logprob for entry in mine] == pytest.approx(values, abs=1e-4)


def scored(logprobs: object) -> list[ChatCompletionTokenLogprob]:
    """Of a choice, of a chunk or a whole one."""
    return getattr(logprobs, "content", None) or []
