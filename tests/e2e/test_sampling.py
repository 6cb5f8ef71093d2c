"""Sampling and logprobs against a real server: exact under streaming, whatever shares the batch."""

from __future__ import annotations

import json
import threading
import urllib.request

import pytest
from openai import OpenAI

from tests.support.server import Server

PROMPT = "Once upon a time there was a"


@pytest.fixture
def client(tiny_server: Server) -> OpenAI:
    return OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def post(server: Server, path: str, **body: object) -> dict:
    status, answer = server.request("POST", path, body)
    assert status == 200, answer
    return answer


def ids_of(server: Server, **sampling: object) -> list[int]:
    return post(server, "/generate", text=PROMPT, sampling_params={"temperature": 0, **sampling})["output_ids"]


def test_a_bias_forces_and_bans_at_every_position(tiny_server: Server) -> None:
    free = ids_of(tiny_server, max_new_tokens=24, ignore_eos=True)
    token = free[0]
    assert ids_of(tiny_server, max_new_tokens=24, logit_bias={str(token): 100}) == [token] * 24
    assert token not in ids_of(tiny_server, max_new_tokens=24, ignore_eos=True, logit_bias={str(token): -100})


def test_a_frequency_penalty_moves_on_from_what_was_said(tiny_server: Server) -> None:
    first, second = 40, 41
    bias = {str(first): 100, str(second): 97}
    plain = ids_of(tiny_server, max_new_tokens=8, logit_bias=bias)
    assert plain == [first] * 8
    moved = ids_of(tiny_server, max_new_tokens=20, logit_bias=bias, frequency_penalty=2)
    assert set(moved) == {first, second}
    assert 0 < moved.count(first) - moved.count(second) <= 4


def test_min_tokens_wins_over_every_end(tiny_server: Server) -> None:
    said = ids_of(tiny_server, max_new_tokens=30, logit_bias={"40": 100}, stop_token_ids=[40], min_new_tokens=5)
    assert len(said) > 5
    assert 40 not in said[:5]
    assert said[-1] == 40


def test_penalties_of_a_neighbour_change_nothing(tiny_server: Server) -> None:
    alone = ids_of(tiny_server, max_new_tokens=40, ignore_eos=True)
    found: list[list[int]] = []
    neighbours = [
        {"frequency_penalty": 2, "temperature": 1.0, "seed": number, "max_new_tokens": 40, "logit_bias": {"40": 5}}
        for number in range(4)
    ]
    threads = [threading.Thread(target=ids_of, args=(tiny_server,), kwargs=one) for one in neighbours]
    threads.append(
        threading.Thread(target=lambda: found.append(ids_of(tiny_server, max_new_tokens=40, ignore_eos=True)))
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone]


def test_n_answers_share_a_prompt_and_a_seed_repeats_each(client: OpenAI, model: str) -> None:
    ask = {"model": model, "prompt": PROMPT, "n": 3, "max_tokens": 12, "temperature": 1.3, "seed": 5}
    first = client.completions.create(**ask)
    again = client.completions.create(**ask)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) > 1
    one = client.completions.create(**{**ask, "n": 1})
    assert one.choices[0].text == texts[0]
    assert first.usage is not None
    assert one.usage is not None
    assert first.usage.prompt_tokens == one.usage.prompt_tokens


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_logprobs_line_up_and_the_stream_equals_the_whole(client: OpenAI, model: str, route: str) -> None:
    if route == "chat":
        ask = {"model": model, "messages": [{"role": "user", "content": "häh"}], "logprobs": True, "top_logprobs": 3}
        whole = client.chat.completions.create(**ask, temperature=0, max_tokens=16).choices[0]
        assert whole.logprobs is not None
        entries = whole.logprobs.content or []
        assert b"".join(bytes(entry.bytes or []) for entry in entries).decode(errors="replace") == whole.message.content
        for entry in entries:
            values = [top.logprob for top in entry.top_logprobs]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
            assert entry.top_logprobs[0].bytes == entry.bytes
        chunks = client.chat.completions.create(**ask, temperature=0, max_tokens=16, stream=True)
        streamed = [
            e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content or []
        ]
        assert streamed == entries
        return
    ask = {"model": model, "prompt": "häh", "logprobs": 2, "echo": True, "temperature": 0, "max_tokens": 16}
    answer = client.completions.create(**ask)
    whole = answer.choices[0]
    assert whole.text.startswith("häh")
    assert whole.logprobs is not None
    assert whole.logprobs.token_logprobs is not None
    assert whole.logprobs.token_logprobs[0] is None
    assert answer.usage is not None
    assert len(whole.logprobs.token_logprobs) == answer.usage.prompt_tokens + 16
    streamed = [c.choices[0] for c in client.completions.create(**ask, stream=True) if c.choices]
    assert "".join(choice.text for choice in streamed) == whole.text
    parts = [choice.logprobs for choice in streamed if choice.logprobs]
    assert [value for part in parts for value in part.token_logprobs or []] == whole.logprobs.token_logprobs
    assert [value for part in parts for value in part.text_offset or []] == whole.logprobs.text_offset


def test_prompt_logprobs_are_the_same_cold_and_warm_and_in_company(tiny_server: Server) -> None:
    ids = [(7 * i) % 200 + 3 for i in range(90)]
    ask = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    ask["sampling_params"] = {"temperature": 0, "max_new_tokens": 4}
    cold = post(tiny_server, "/generate", **ask)["meta_info"]
    warm = post(tiny_server, "/generate", **ask)["meta_info"]
    assert len(cold["input_token_logprobs"]) == len(ids)
    assert cold["input_token_logprobs"][0][0] is None
    assert [entry[1] for entry in cold["input_token_logprobs"]] == ids
    for name in ("input_token_logprobs", "output_token_logprobs"):
        for left, right in zip(cold[name][1:], warm[name][1:], strict=True):
            assert left[0] == pytest.approx(right[0], abs=1e-3)
    later = post(tiny_server, "/generate", **{**ask, "logprob_start_len": 60})["meta_info"]
    assert later["cached_tokens"] > 0
    assert len(later["input_token_logprobs"]) == 30
    for left, right in zip(later["input_token_logprobs"], cold["input_token_logprobs"][60:], strict=True):
        assert left[1] == right[1]
        assert left[0] == pytest.approx(right[0], abs=1e-3)


def test_an_aborted_request_says_so_and_its_namesake_goes_on(tiny_server: Server) -> None:
    answers: dict[str, dict] = {}

    def run(rid: str) -> None:
        answers[rid] = post(
            tiny_server, "/generate", text=PROMPT, rid=rid,
            sampling_params={"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
        )  # fmt: skip

    threads = [threading.Thread(target=run, args=(rid,)) for rid in ("job-1", "job-1-retry")]
    for thread in threads:
        thread.start()
    tiny_server.until(lambda: tiny_server.scheduler()["running"] == 2, "run both")
    assert post(tiny_server, "/abort_request", rid="job-1")["aborted"] == 1
    for thread in threads:
        thread.join()
    assert answers["job-1"]["meta_info"]["finish_reason"]["type"] == "abort"
    assert answers["job-1-retry"]["meta_info"]["completion_tokens"] == 400
    tiny_server.wait_idle()


def test_metrics_count_what_happened(tiny_server: Server) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def read() -> dict[str, float]:
        with urllib.request.urlopen(f"{tiny_server.url}/metrics") as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        found: dict[str, float] = {}
        for family in families:
            for sample in family.samples:
                assert sample.value >= 0, sample
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    before = read()
    post(tiny_server, "/generate", text=PROMPT, sampling_params={"max_new_tokens": 9, "ignore_eos": True})
    after = read()
    assert after["engine_generation_tokens_total"] - before["engine_generation_tokens_total"] == 9


def test_tokenize_and_detokenize_are_inverse(tiny_server: Server) -> None:
    text = "Hello häh <|im_end|> \U0001f600"
    ids = post(tiny_server, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert post(tiny_server, "/detokenize", tokens=ids, skip_special_tokens=False)["text"] == text
    assert json.dumps(ids)
