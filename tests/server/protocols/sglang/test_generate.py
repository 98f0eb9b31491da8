"""SGLang's native endpoints, with the requests that the RuntimeEndpoint of SGLang's language sends.

`Endpoint` sends the same requests; `make clients` runs SGLang's package.
"""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest

from plait.runtime.server.protocols.sglang.generate import AbortRegistry

PROMPT = "The capital of France is"
GREEDY = {"max_new_tokens": 4, "temperature": 0}
IN_OUT = {"skip_special_tokens": False, "spaces_between_special_tokens": True}


class Endpoint:
    def __init__(self, address):
        self.http = httpx.Client(base_url=address, timeout=60)

    def generate(self, **body):
        answer = self.http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, **body):
        """(new text, answer so far) of every chunk; asserts that the text grows and that [DONE] is the last line."""
        at, done = 0, False
        with self.http.stream("POST", "/generate", json=body | {"stream": True}) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    assert line == ""
                elif line == "data: [DONE]":
                    done = True
                else:
                    data = json.loads(line[5:])
                    text = data["text"][at:]
                    at += len(text)
                    yield text, data
        assert done

    def select(self, text, choices, unconditional=False):
        """The scores of the choices as RuntimeEndpoint.select finds them: mean logprobs, the healed token left out."""
        none = {"max_new_tokens": 0}
        length = self.generate(text=text, sampling_params=none)["meta_info"]["prompt_tokens"]
        answers = self.generate(
            text=[text + choice for choice in choices],
            sampling_params=none | {"temperature": 0},
            return_logprob=True,
            return_text_in_logprobs=True,
            logprob_start_len=max(length - 2, 0),
        )
        assert [answer["meta_info"]["output_token_logprobs"] for answer in answers] == [[]] * len(choices)
        inputs = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
        scores = []
        for at, entries in enumerate(inputs):
            values = [logprob for logprob, _, _ in entries if logprob]
            score = sum(values) / len(values)
            if text.endswith(entries[0][-1]):
                score = (score * len(entries) - entries[0][0]) / (len(entries) - 1)
                inputs[at] = entries[1:]
            scores.append(score)
        if not unconditional:
            return scores, inputs, None
        ids = [[token for _, token, _ in entries] for entries in inputs]
        alone = self.generate(input_ids=ids, sampling_params=none, return_logprob=True)
        return scores, inputs, [answer["meta_info"]["input_token_logprobs"] for answer in alone]


@pytest.fixture(scope="session")
def endpoint(address):
    return Endpoint(address)


@pytest.fixture(scope="session")
def real_endpoint(real_address):
    return Endpoint(real_address)


def comparable(answer):
    meta = answer["meta_info"]
    return {key: value for key, value in meta.items() if key not in ("id", "e2e_latency", "cached_tokens")} | {
        "text": answer["text"],
        "ids": answer["output_ids"],
    }


def test_continues_text_and_input_ids(endpoint):
    answer = endpoint.generate(text=PROMPT, sampling_params=GREEDY | IN_OUT | {"n": 1, "top_k": -1})
    assert set(answer) == {"text", "output_ids", "meta_info"} and answer["text"]
    meta = answer["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 4)
    assert meta["finish_reason"] == {"type": "length", "length": 4} and meta["e2e_latency"] > 0
    again = endpoint.generate(text=PROMPT, sampling_params=GREEDY)
    assert comparable(again) == comparable(answer) and again["meta_info"]["cached_tokens"] == 4


@pytest.mark.parametrize(
    "extra_params",
    [
        {},
        {"stop": ["zzz"]},
        {"regex": " [a-z]{2,5}"},
        {"json_schema": '{"enum": ["a", "b"]}'},
        {"ebnf": 'root ::= " yes" | " no"'},
        {"skip_special_tokens": False},
    ],
)
def test_stream_equals_the_answer(endpoint, extra_params):
    logprob_options = dict(return_logprob=True, top_logprobs_num=2, logprob_start_len=1, return_text_in_logprobs=True)
    if "stop" in extra_params:
        stop_text = endpoint.generate(text=PROMPT, sampling_params=GREEDY)["text"][3:5]
        extra_params = {"stop": [*extra_params["stop"], stop_text]}
    body = dict(text=PROMPT, sampling_params=GREEDY | extra_params, **logprob_options)
    answer = endpoint.generate(**body)
    chunks = list(endpoint.stream(**body))
    assert "".join(text for text, _ in chunks) == answer["text"]
    assert comparable(chunks[-1][1]) == comparable(answer)
    assert all(data["meta_info"]["finish_reason"] is None for _, data in chunks[:-1])
    if "stop" in extra_params:
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_text}


def test_constraints(endpoint, real_endpoint):
    def text(**params):
        return endpoint.generate(text=PROMPT, sampling_params=GREEDY | params)["text"]

    assert text(regex=" [0-9]{3}").strip().isdigit()
    assert json.loads(text(json_schema='{"enum": ["a", "b"]}')) in ("a", "b")
    schema = '{"type":"array","items":{"type":"integer","minimum":1,"maximum":9},"minItems":3}'
    answer = json.loads(text(json_schema=schema, max_new_tokens=14))  # though the model would go on
    assert len(answer) >= 3
    assert text(ebnf='root ::= " yes" | " no"') in (" yes", " no")
    anything = {"json_schema": "$$ANY$$", "max_new_tokens": 30}
    assert json.loads(real_endpoint.generate(text=PROMPT, sampling_params=GREEDY | anything)["text"]) is not None


def test_logprobs(endpoint):
    logprob_options = dict(return_logprob=True, top_logprobs_num=3, return_text_in_logprobs=True)
    answer = endpoint.generate(text=PROMPT, sampling_params=GREEDY, logprob_start_len=0, **logprob_options)
    meta = answer["meta_info"]
    assert "".join(text for _, _, text in meta["input_token_logprobs"]) == PROMPT
    assert meta["input_token_logprobs"][0][0] is None and meta["input_top_logprobs"][0] is None
    assert all(logprob <= 0 for logprob, _, _ in meta["input_token_logprobs"][1:])
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    for (logprob, token, text), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert len(top) == 3 and top[0] == [logprob, token, text]
    later = endpoint.generate(text=PROMPT, sampling_params=GREEDY, logprob_start_len=3, **logprob_options)["meta_info"]
    assert later["input_token_logprobs"] == meta["input_token_logprobs"][3:]
    assert later["input_top_logprobs"] == meta["input_top_logprobs"][3:]
    only = endpoint.generate(text=PROMPT, sampling_params=GREEDY, return_logprob=True)["meta_info"]
    assert only["input_token_logprobs"] == [] and only["output_token_logprobs"][0][2] is None
    assert "input_top_logprobs" not in only


def test_prompt_logprobs_equal_those_of_generation(endpoint):
    logprob_options = dict(return_logprob=True)
    first = endpoint.generate(text=PROMPT, sampling_params=GREEDY, **logprob_options)
    ids = [
        *endpoint.generate(text=PROMPT, sampling_params={"max_new_tokens": 0}, **logprob_options)["meta_info"][
            "input_token_logprobs"
        ]
    ]
    prompt = [token for _, token, _ in ids]
    scored = endpoint.generate(
        input_ids=prompt + first["output_ids"],
        sampling_params={"max_new_tokens": 0},
        logprob_start_len=len(prompt),
        **logprob_options,
    )
    sampled, prompt_entries = first["meta_info"]["output_token_logprobs"], scored["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in prompt_entries] == [entry[1] for entry in sampled]
    assert [entry[0] for entry in prompt_entries] == pytest.approx([entry[0] for entry in sampled], abs=0.05)


def test_select_of_sglangs_language(real_endpoint):
    scores, inputs, alone = real_endpoint.select(PROMPT, [" Paris", " Rome", " banana"], unconditional=True)
    assert scores.index(max(scores)) == 0 and scores[2] < scores[1]
    assert [len(entries) for entries in alone] == [len(entries) for entries in inputs]
    assert all(entries[0][0] is None for entries in alone)


def test_lists_and_n(endpoint):
    texts = [PROMPT, "One, two,"]
    listed = endpoint.generate(text=texts, sampling_params=GREEDY, rid=["a", "b"])
    alone = [endpoint.generate(text=text, sampling_params=GREEDY) for text in texts]
    assert [comparable(answer) for answer in listed] == [comparable(answer) for answer in alone]
    assert [answer["meta_info"]["id"] for answer in listed] == ["a", "b"]
    several = endpoint.generate(text=texts, sampling_params=[GREEDY | {"n": 2, "max_new_tokens": 2}, GREEDY])
    assert [len(answer["output_ids"]) for answer in several] == [2, 2, 4]
    chunks = [data for _, data in endpoint.stream(text=texts, sampling_params=GREEDY)]
    last = {data["index"]: data["text"] for data in chunks}
    assert last == {0: alone[0]["text"], 1: alone[1]["text"]}
    one = endpoint.generate(text=[PROMPT], sampling_params=GREEDY)
    assert isinstance(one, list) and one[0]["text"] == alone[0]["text"]


def test_control_tokens_of_the_text_are_control_tokens(endpoint):
    marked = endpoint.generate(
        text="<|im_start|>user\n",
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        return_text_in_logprobs=True,
    )
    entries = marked["meta_info"]["input_token_logprobs"]
    assert [text for _, _, text in entries] == ["<|im_start|>", "user", "\n"]


def test_seed_gives_the_same_text(endpoint):
    params = {"max_new_tokens": 6, "temperature": 2.0}
    seeded = [endpoint.generate(text=PROMPT, sampling_params=params | {"sampling_seed": 3})["text"] for _ in range(2)]
    assert seeded[0] == seeded[1]


def abort_when_running(endpoint, **selection):
    """Repeats an abort until it aborts one request: the request may not have arrived yet."""
    until = time.monotonic() + 60
    while (aborted := endpoint.http.post("/abort_request", json=selection).json()["aborted"]) == 0:
        assert time.monotonic() < until
    assert aborted == 1


def test_abort_by_rid(real_endpoint, real_address):
    answers = {}

    def run(name):
        params = {"max_new_tokens": 8000, "ignore_eos": True}
        answers[name] = Endpoint(real_address).generate(text=PROMPT, sampling_params=params, rid=name)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("x1", "x2")]
    for thread in threads:
        thread.start()
    abort_when_running(real_endpoint, rid="x1")
    threads[0].join(60)
    assert answers["x1"]["meta_info"]["finish_reason"]["type"] == "abort" and "x2" not in answers
    abort_when_running(real_endpoint, abort_all=True)
    threads[1].join(60)
    assert answers["x2"]["meta_info"]["finish_reason"]["type"] == "abort"
    assert real_endpoint.http.post("/abort_request", json={"rid": "x1"}).json() == {"aborted": 0}


def test_server_info(endpoint):
    for path in ("/get_model_info", "/model_info"):
        info = endpoint.http.get(path).json()
        assert info["model_path"].endswith(".gguf") and info["is_generation"] is True
    for path in ("/get_server_info", "/server_info"):
        info = endpoint.http.get(path).json()
        assert info["max_total_num_tokens"] > 0 and info["internal_states"][0]["num_waiting_reqs"] == 0
    assert endpoint.http.get("/health_generate").status_code == 200
    endpoint.generate(text=PROMPT, sampling_params=GREEDY)
    for method in ("GET", "POST"):
        assert endpoint.http.request(method, "/flush_cache", json={"empty_cache": True}).status_code == 200
        assert endpoint.generate(text=PROMPT, sampling_params=GREEDY)["meta_info"]["cached_tokens"] == 0


TAG = '{"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}'
WRONG = [
    ({"text": None}, "text"),
    ({"input_ids": [1]}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": None, "input_ids": [1, [2]]}, "input_ids"),
    ({"text": None, "input_ids": [1 << 30]}, "input_ids"),
    ({"text": ["a"], "sampling_params": [{}, {}]}, "sampling_params"),
    ({"text": ["a", ""]}, "text[1]"),
    ({"rid": ["a", "b"]}, "rid"),
    ({"image_data": "x"}, "image_data"),
    ({"lora_path": "x"}, "lora_path"),
    ({"token_ids_logprob": [1]}, "token_ids_logprob"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"logprob_start_len": 99, "return_logprob": True}, "logprob_start_len"),
    ({"top_logprobs_num": 1000, "return_logprob": True}, "top_logprobs_num"),
    ({"timeout": -1}, "timeout"),
    ({"sampling_params": {"stop_regex": "a*"}}, "sampling_params.stop_regex"),
    ({"sampling_params": {"structural_tag": "{}"}}, "sampling_params.structural_tag"),
    ({"sampling_params": {"structural_tag": "["}}, "sampling_params.structural_tag"),
    ({"sampling_params": {"structural_tag": TAG.replace('["<f>"]', '["<"]')}}, "sampling_params.structural_tag"),
    ({"sampling_params": {"structural_tag": TAG, "regex": "a"}}, "sampling_params.structural_tag"),
    ({"sampling_params": {"repetition_penalty": 0}}, "sampling_params.repetition_penalty"),
    ({"sampling_params": {"no_stop_trim": True}}, "sampling_params.no_stop_trim"),
    ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    ({"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, "sampling_params.min_new_tokens"),
    ({"sampling_params": {"n": 0}}, "sampling_params.n"),
    ({"sampling_params": {"n": 100000}}, "sampling_params.n"),
    ({"sampling_params": {"stop": [""]}}, "sampling_params.stop"),
    ({"sampling_params": {"regex": "("}}, "sampling_params.regex"),
    ({"sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
    ({"sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "sampling_params.ebnf"),
    ({"sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias"),
    ({"sampling_params": {"logit_bias": {"99999999": 1}}}, "logit_bias"),
    ({"sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
]


@pytest.mark.parametrize(("change", "param"), WRONG, ids=[str(change)[:50] for change, _ in WRONG])
def test_errors_name_the_field(endpoint, change, param):
    for extra in ({}, {"stream": True}):
        answer = endpoint.http.post("/generate", json={"text": PROMPT, "sampling_params": GREEDY} | change | extra)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, answer.text


def test_concate_and_append_request(endpoint):
    joined = endpoint.http.post("/concate_and_append_request", json={"src_rids": ["a", "b"], "dst_rid": "c"})
    assert joined.status_code == 200 and joined.json() == {}
    assert endpoint.http.post("/concate_and_append_request", json={"src_rids": ["a"]}).status_code == 400


def test_abort_needs_a_rid(endpoint):
    assert endpoint.http.post("/abort_request", json={}).status_code == 400


def test_tenants_cannot_abort_requests_of_other_tenants():
    registry, ended = AbortRegistry(), []
    with (
        registry.registered("a", "r", lambda: not ended.append("a")),
        registry.registered("a", "r", lambda: not ended.append("again")),
        registry.registered("b", "s", lambda: not ended.append("b")),
    ):
        assert registry.abort("b", "r") == 0 and registry.abort("c", None) == 0
        assert registry.abort("a", "r") == 2 and registry.abort("b", None) == 1
    assert ended == ["a", "again", "b"] and registry.abort("a", None) == 0
