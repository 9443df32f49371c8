"""What the server tells and reads, by value and without a process: figures, metrics, limits, conversations."""

import asyncio
import json
import math
import threading
from contextlib import ExitStack
from hashlib import sha256
from types import SimpleNamespace

import pytest

from kog_triton.backends.mailbox import PromptLogprob, Request, Step
from kog_triton.claim import Claim
from kog_triton.errors import DeviceError, ModelError, RequestError, RunError, TooLong
from kog_triton.metrics import RequestMetrics
from kog_triton.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from kog_triton.request_queue import QueueFull
from kog_triton.sampling.params import SamplingParams
from kog_triton.sampling.structured import StructuredOutputsParams
from kog_triton.server import child, figures, json_body, wire
from kog_triton.server import service as service_module
from kog_triton.server.admission import Admission
from kog_triton.server.asked import read_chat, render, template_kwargs
from kog_triton.server.completion_answer import CompletionAnswer
from kog_triton.server.limits import BodyLimit, KeyGuard, refuse
from kog_triton.server.metrics import Counts, ServerMetrics
from kog_triton.server.model import ServedModel
from kog_triton.server.pacing import Interval, Pacing
from kog_triton.server.problems import Problem, problem_of
from kog_triton.server.routes import generation, messages, tokens
from kog_triton.server.samples import Job, News
from kog_triton.server.schemas.chat import ChatBody, Message
from kog_triton.server.schemas.messages import Conversation
from kog_triton.server.schemas.tokens import DetokenizeBody, TokenizeBody
from kog_triton.server.supervisor import EngineLost, Supervisor


def output(prompt=10, cached=4, made=5, reason="stop"):
    """A request of 2 tokens/s, whose first token came after half a second, of which it waited an eighth."""
    metrics = RequestMetrics(
        backend="b", seed=1, prompt_tokens=prompt, cached_tokens=cached, output_tokens=made, total_s=2.5,
        queue_s=0.125, ttft_s=0.5,
        prompt_tokens_per_s=12.0, decode_tokens_per_s=2.0, itl_p50_us=5e5, itl_p99_us=6e5, itl_max_us=7e5,
        clock="host", bytes_per_token=100, gb_per_s=2e-7, peak="toy", mbu=0.25, kv_depth_start=prompt,
        kv_depth_end=prompt + made - 1,
    )  # fmt: skip
    return RequestOutput("0", "p", [1] * prompt, [CompletionOutput(0, "t", [2] * made, reason)], metrics)


# ---- figures ----


def test_a_prompt_counts_once_however_many_samples_it_has():
    """Two prompts of two samples each."""
    told = figures.usage([(i, output(prompt=10 + i)) for i in range(4)], 2, reasoning_tokens=3)
    assert told == {
        "prompt_tokens": 10 + 12,
        "completion_tokens": 20,
        "total_tokens": 42,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }


def test_timings_by_value():
    assert figures.timings(output()) == {
        "queue_ms": 125.0,
        "cache_n": 4,
        "prompt_n": 6,
        "prompt_ms": 375.0,
        "prompt_per_second": 12.0,
        "predicted_n": 5,
        "predicted_ms": 2000.0,  # of the four tokens behind the first
        "predicted_per_token_ms": 500.0,
        "predicted_per_second": 2.0,
        "kv_depth": 14,
        "itl_p50_us": 5e5,
        "itl_p99_us": 6e5,
        "mbu": 0.25,
    }


def test_a_token_of_a_completion_tells_where_its_text_begins():
    tokens = [None, {3: Logprob(-0.5, 1, "bcd")}, {4: Logprob(-9e9, 7, "e"), 5: Logprob(-0.25, 1, "f")}]
    names, offsets = ["a", "bcd", "e"], [10, 11, 14]
    assert figures.completion_logprobs(tokens, names, offsets, lambda _, text: text) == {
        "tokens": ["a", "bcd", "e"],
        "token_logprobs": [None, -0.5, -9e9],
        "top_logprobs": [None, {"bcd": -0.5}, {"e": -9e9, "f": -0.25}],
        "text_offset": [10, 11, 14],
    }


def test_a_token_of_a_chat_has_as_many_others_as_were_asked_for(server):
    """The chosen one is among them only if it is that likely."""
    tokenizer = SimpleNamespace(token_bytes=lambda token: bytes([token]))
    found = {9: Logprob(-3.0, 3, "c"), 7: Logprob(-0.5, 1, "a"), 8: Logprob(float("-inf"), 2, "b")}
    for most, best in ((0, []), (1, ["a"]), (2, ["a", "b"]), (3, ["a", "b", "c"])):
        (told,) = figures.chat_logprobs(tokenizer, [found], most)["content"]
        assert (told["token"], told["logprob"], told["bytes"]) == ("c", -3.0, [9])
        assert [one["token"] for one in told["top_logprobs"]] == best
    assert told["top_logprobs"][1]["logprob"] == -9999.0
    asked = server.chat(server.play("none", "hi"), logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["top_logprobs"]) for one in asked[:2]] == [("h", []), ("i", [])]


# ---- metrics ----


def test_the_buckets_of_a_histogram_are_cumulative():
    counts = Counts((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 5.0):
        counts.observe(seconds)
    (family,) = counts.families("x", "text")
    samples = {(s.name, s.labels.get("le")): s.value for s in family.samples}
    assert samples == {
        ("kog:x_bucket", "0.1"): 2, ("kog:x_bucket", "1.0"): 3, ("kog:x_bucket", "+Inf"): 4,
        ("kog:x_count", None): 4, ("kog:x_sum", None): 5.65,
    }  # fmt: skip


def test_metrics_tell_what_happened_under_our_names_and_vllms():
    metrics = ServerMetrics()
    for reason in ("stop", "stop", "length", "abort"):
        metrics.finished(output(reason=reason))
    metrics.failed(RunError("NaN in a layer"))
    metrics.failed(RequestError("structured_outputs.regex 'NaN(' is invalid"))  # a client's words
    metrics.supervisor = SimpleNamespace(
        num_restarts=2, beats_total=70, state="ready", heartbeat_age_s=0.5, num_running=3, num_waiting=4, kv_usage=0.25
    )  # fmt: skip
    metrics.admission = SimpleNamespace(num_refused=6)
    told = {
        (s.name, *s.labels.values()): s.value
        for family in metrics.collect()
        for s in family.samples
        if "bucket" not in s.name and "created" not in s.name
    }
    whole = ("kog:request_success_total", "stop"), ("kog:request_success_total", "length")
    assert [told[w] for w in whole] == [2, 1] and told["kog:request_success_total", "abort"] == 1
    by_name = {name: value for (name, *labels), value in told.items() if not labels and name.startswith("kog:")}
    assert by_name == {
        "kog:prompt_tokens_total": 40, "kog:cached_prompt_tokens_total": 16, "kog:generation_tokens_total": 20,
        "kog:request_errors_total": 2, "kog:corrupted_requests_total": 1, "kog:admission_rejections_total": 6,
        "kog:engine_restarts_total": 2, "kog:decode_steps_total": 70, "kog:engine_up": 1,
        "kog:device_heartbeat_age_seconds": 0.5, "kog:inter_token_latency_seconds_count": 0,
        "kog:inter_token_latency_seconds_sum": 0, "kog:time_to_first_token_seconds_count": 4,
        "kog:time_to_first_token_seconds_sum": 2.0, "kog:request_queue_time_seconds_count": 4,
        "kog:request_queue_time_seconds_sum": 0.5, "kog:request_prefill_time_seconds_count": 4,
        "kog:request_prefill_time_seconds_sum": 1.5, "kog:request_decode_time_seconds_count": 4,
        "kog:request_decode_time_seconds_sum": 8.0, "kog:e2e_request_latency_seconds_count": 4,
        "kog:e2e_request_latency_seconds_sum": 10.0,
        "kog:num_requests_running": 3, "kog:num_requests_waiting": 4, "kog:kv_cache_usage_perc": 0.25,
    }  # fmt: skip
    vllm = {
        (name.removeprefix("vllm:"), *labels): value
        for (name, *labels), value in told.items()
        if name.startswith("vllm:")
    }
    times = ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time")
    assert {name for name, *_ in vllm} == {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
        "generation_tokens_total", "request_success_total",
        *(f"{name}_seconds_{part}" for name in (*times, "e2e_request_latency", "inter_token_latency")
          for part in ("count", "sum")),
    }  # fmt: skip
    assert all(told[(f"kog:{name}", *labels)] == value for (name, *labels), value in vllm.items())


def test_times_between_tokens_are_told_from_50_us_on():
    """Where a fast engine's are: vLLM's first bucket ends at 10 ms."""
    metrics = ServerMetrics()
    metrics.inter_token.observe(70e-6)
    buckets = {
        s.labels["le"]: s.value
        for family in metrics.collect()
        for s in family.samples
        if s.name == "kog:inter_token_latency_seconds_bucket"
    }
    assert (buckets["5e-05"], buckets["0.0001"], buckets["+Inf"]) == (0, 1, 1)
    assert sum(float(le) < 5e-3 for le in buckets) >= 8


# ---- who may enter ----


def test_keys_are_compared_as_digests_in_constant_time(monkeypatch):
    """Each with each: how long it takes tells neither how much of a key was right nor which one it was."""
    compared, refused = [], []

    def compare(a, b):
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("kog_triton.server.limits.hmac.compare_digest", compare)

    async def app(scope, receive, send):
        refused.append(scope["kog_namespace"])

    async def send(message):
        refused.append(message.get("status"))

    guard = KeyGuard(app, ["first", "second"])
    for key in ("first", "fir"):
        headers = [(b"authorization", f"Bearer {key}".encode())]
        asyncio.run(guard({"type": "http", "path": "/v1/x", "headers": headers}, None, send))
    assert refused == ["0:", 401, None]
    digests = [sha256(key.encode()).digest() for key in ("first", "second", "fir")]
    assert compared == [(digests[i], digests[known]) for i in (0, 2) for known in (0, 1)]


@pytest.mark.parametrize("status", [401, 402, 413])
def test_who_sent_no_key_is_told_how_to(status):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(refuse(Problem(status, "no"), {"path": "/v1/x"}, send))
    names = [name for name, _ in sent[0]["headers"]]
    assert sent[0]["status"] == status and (b"www-authenticate" in names) is (status == 401)


def test_who_finds_no_place_is_counted_and_told_why():
    admission = Admission(1)
    with ExitStack() as inside:
        inside.enter_context(admission.enter())
        for refused in (1, 2):
            with pytest.raises(Problem) as told, admission.enter():
                raise AssertionError("entered")
            assert (told.value.status, told.value.code) == (503, "queue_full")
            assert (admission.num_refused, admission.num_inside) == (refused, 1)
    assert admission.num_inside == 0
    admission.draining = True
    with pytest.raises(Problem, match="shutting down"), admission.enter():
        raise AssertionError("entered")
    assert admission.num_refused == 2  # a draining server has places


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (tokens.tokenize, TokenizeBody(prompt="x")),
        (tokens.detokenize, DetokenizeBody(tokens=[1])),
        (messages.count_tokens, Conversation(messages=[{"role": "user", "content": "x"}])),
    ],
)
def test_who_counts_tokens_needs_a_place_too(route, body):
    """A flood of them would take the threads that encode prompts."""
    service = SimpleNamespace(admission=Admission(0), check_name=lambda name: None)
    request = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(service=service)))
    with pytest.raises(Problem) as told:
        asyncio.run(route(request, body))
    assert told.value.code == "queue_full"


def test_a_prompt_without_room_is_refused_before_its_ids_travel():
    model = SimpleNamespace(opened=SimpleNamespace(max_context=8))
    service = service_module.Service(None, ServerMetrics(), Admission(1), Interval(), 0)
    service.opened = model

    async def prepare():
        return [Job(None, (1,) * 8, SamplingParams())], Interval(), None

    with pytest.raises(TooLong, match="the prompt has 8 tokens and the context holds 8"):
        asyncio.run(generation.answer(service, prepare, stream=False, ignored=[]))
    assert service.admission.num_inside == 0


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(("size", "passes"), [(8, True), (9, False)])
def test_a_body_may_have_the_bytes_that_it_may_have(size, passes, told):
    """Told beforehand, or counted as it comes."""
    sent, seen = [], []

    async def app(scope, receive, send):
        try:
            seen.append(len((await receive())["body"]))
        except Problem as problem:
            seen.append(problem.status)

    async def receive():
        return {"type": "http.request", "body": b"x" * size}

    async def send(message):
        sent.append(message.get("status"))

    headers = [(b"content-length", str(size).encode())] if told else []
    scope = {"type": "http", "path": "/v1/x", "headers": headers}
    asyncio.run(BodyLimit(app, 8)(scope, receive, send))
    assert (seen, sent) == (([size], []) if passes else ([], [413, None]) if told else ([413], []))


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (QueueFull("full"), 503, "queue_full", True),
        (EngineLost("lost"), 503, "engine_lost", True),
        (RequestError("no"), 400, "invalid_value", False),
        (TooLong("no"), 400, "context_length_exceeded", False),
        (ModelError("no"), 400, "invalid_value", False),
        (DeviceError("out of memory"), 503, "device_error", True),
        (RunError("NaN"), 500, "engine_error", False),
        (KeyError("a bug"), 500, "internal_error", False),
    ],
)
def test_what_an_error_is_to_a_client(error, status, code, retry):
    problem = problem_of(error)
    assert (problem.status, problem.code) == (status, code)
    assert (problem.headers or {}) == ({"Retry-After": "1"} if retry else {})
    assert "a bug" not in problem.message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, or echo true"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"best_of": 2}, "best_of is not supported: use n"),
        ({"stream": True, "echo": True, "logprobs": 1}, "echo with logprobs is not streamed"),
        ({"n": 128, "prompt": ["a", "b"]}, "samples in all"),
        ({"response_format": {"type": "xml"}}, "response_format.type: Input should be"),
    ],
)
def test_what_a_completion_may_not_ask(server, fields, says):
    response = server.post("/v1/completions", {"prompt": "x", **fields})
    assert response.status_code == 400 and says in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("completions", {"prompt": {"a": 1}}, "prompt", "prompt: Input should be a valid string; "),
        ("completions", {"prompt": [1, "a"]}, "prompt", "prompt: Input should be a valid string; "),
        ("completions", {}, "prompt", "prompt: Field required"),
        ("completions", [1], None, "body: Input should be a valid dictionary"),
        ("chat/completions", {"messages": [{}]}, "messages.0.role", "messages.0.role: Field"),
        (
            "chat/completions",
            {"messages": [{"role": "user"}], "tool_choice": "some"},
            "tool_choice",
            "tool_choice: Input should be 'none', 'auto' or 'required'; tool_choice: Input",
        ),
        ("completions", {"prompt": "x", "guided_json": {}}, "guided_json", "guided_json is not"),
    ],
)
def test_an_error_names_the_field_and_not_how_it_is_read(server, path, body, param, message):
    error = server.post(f"/v1/{path}", body).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(message)


@pytest.mark.parametrize("fields", [{"max_tokens": 10000}, {"prompt": "x" * 600}, {"prompt": "x" * 99999}])
def test_agents_are_told_by_openais_word_that_a_context_is_full(server, fields):
    response = server.post("/v1/completions", {"prompt": "x", **fields})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_completion_is_held_by_a_response_format_too(server):
    shape = {"response_format": {"type": "json_object"}}
    body = {"prompt": server.play("held", '{"a": 1}')} | shape
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == '{"a": 1}'
    body = {"prompt": server.play("not_held", "free")} | shape
    assert server.post("/v1/completions", body).status_code == 500  # the script is judged by the grammar


# ---- conversations ----


def test_a_template_gets_the_arguments_of_a_call_as_an_object():
    """Those that are no JSON, of a model's broken call, as they are."""
    got = []
    tokenizer = SimpleNamespace(
        encode_chat=lambda messages, **how: got.append((messages, how)) or [1], chat_templates={"default": ""}
    )
    opened = SimpleNamespace(max_context=64)
    model = SimpleNamespace(tokenizer=tokenizer, opened=opened)
    service = SimpleNamespace(model=model, check_length=lambda characters: None)
    calls = [{"id": "1", "function": {"name": "f", "arguments": a}} for a in ('{"a": [1]}', "{bad", "", {"b": 2})]
    asked = [Message(role="user", content="x"), Message(role="assistant", tool_calls=calls)]
    assert asyncio.run(render(service, asked, (), True, {"enable_thinking": False})) == [1]
    ((messages, how),) = got
    named = {"tools": None, "add_generation_prompt": True, "enable_thinking": False}
    named |= {"most": 64, "content_format": "string"}
    assert how == named | {"whose": None}  # of no key: nobody's kept ids
    assert messages[0] == {"role": "user", "content": "x"} and messages[1]["content"] == ""
    told = [call["function"]["arguments"] for call in messages[1]["tool_calls"]]
    assert told == [{"a": [1]}, {"arguments": "{bad"}, {}, {"b": 2}]


def served(pieces, piece=None):
    """A model whose tokens have these bytes."""
    tokenizer = SimpleNamespace(token_bytes=pieces.get, special_ids=frozenset())
    return SimpleNamespace(name="m", tokenizer=tokenizer, piece=piece)


def test_a_prompt_that_is_echoed_with_log_probabilities_is_decoded_once_for_all_samples():
    made = []
    scored = RequestOutput(
        "0", "p", [5, 6], [CompletionOutput(0, "t", [2], "stop")], output().metrics,
        prompt_logprobs=[None, {6: Logprob(-0.5, 1, "b")}],
    )  # fmt: skip
    answer = CompletionAnswer(
        "id", served({5: b"a", 6: b"b"}, lambda token: made.append(token) or chr(92 + token)),
        [Job("ab", (5, 6), SamplingParams(n=3, max_tokens=1))],
        echo=True, made=False, logprobs=True, include_usage=False,
    )  # fmt: skip
    answer.take([News(i, Delta("+", [2], None, scored), 1) for i in range(3)])
    told = [choice["logprobs"]["tokens"] for choice in answer.whole()["choices"]]
    assert told == [["a", "b"]] * 3 and made == [5, 6]


def test_scores_of_a_long_prompt_are_told_in_portions():
    """No message keeps the event loop for long."""
    sent = []
    request = Request(-1, (0,) * 600, SamplingParams(), 1, 1, prompt_logprobs=1)
    claim = Claim(request, "", lambda *ended: None, lambda: None)
    child.Served(1, claim, SimpleNamespace(send=sent.append))
    claim.admit(0, 0)
    claim.push_prompt([PromptLogprob(i, -1.0) for i in range(599)])
    claim.push(Step(7, "length"))
    told = map(wire.from_engine.decode, wire.Frames().feed(b"".join(sent)))
    scores = [message.tokens for message in told if isinstance(message, wire.Scores)]
    assert [one.token for some in scores for one in some] == list(range(599))
    assert max(map(len, scores)) <= 256


def test_a_large_body_is_read_beside_the_event_loop(monkeypatch):
    """8 MiB of empty lists took 6 s of every stream."""
    places = []
    monkeypatch.setattr(json_body, "check_depth", lambda value: places.append(threading.current_thread()))

    def read(body):
        async def receive():
            return {"type": "http.request", "body": body}

        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        return asyncio.run(json_body.JsonRequest(scope, receive).json())

    assert read(b"[1]") == [1] and len(read(b"[" + b"1," * 50_000 + b"1]")) == 50_001
    assert [place is threading.main_thread() for place in places] == [True, False]
    with pytest.raises(Problem, match="the body has more than 262144 brackets"):
        read(b"[" + b"[]," * (1 << 18) + b"[]]")


# ---- templates, echo, pace, restarts ----


def test_a_request_overrules_the_servers_template_arguments():
    model = SimpleNamespace(template_kwargs={"enable_thinking": False, "reasoning_effort": "low"})
    assert template_kwargs(model, None) == model.template_kwargs
    assert template_kwargs(model, {"enable_thinking": True})["enable_thinking"] is True
    assert template_kwargs(model, None, "high")["reasoning_effort"] == "high"
    asked = template_kwargs(model, {"reasoning_effort": "none"}, "high")
    assert asked == {"enable_thinking": False, "reasoning_effort": "none"}


def test_each_of_several_samples_echoes_its_own_prompt():
    params = SamplingParams(n=2, max_tokens=1)
    jobs = [Job(text, (1,), params) for text in ("one", "two")]
    answer = CompletionAnswer(
        "id", SimpleNamespace(name="m"), jobs,
        echo=True, made=True, logprobs=False, include_usage=False,
    )  # fmt: skip
    answer.take([News(i, Delta("+", [2], None, output()), 1) for i in range(4)])
    texts = [choice["text"] for choice in answer.whole()["choices"]]
    assert texts == ["one+", "one+", "two+", "two+"]


def test_log_probabilities_of_a_token_without_text_come_with_the_text_behind_it():
    """Half a character, or what may yet be a stop string."""
    answer = CompletionAnswer(
        "id", served({2: b"\xc3", 3: b"\xa9"}), [Job("x", (1, 2), SamplingParams(max_tokens=2))],
        echo=False, made=True, logprobs=True, include_usage=False,
    )  # fmt: skip
    half, whole = ([{i: Logprob(-0.5, 1, text)}] for i, text in ((2, "\ufffd"), (3, "é")))
    assert answer.event([News(0, Delta("", [2], half), 1)], 0.1) == b""
    event = answer.event([News(0, Delta("é", [3], whole), 2)], 0.2)
    told = json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"]
    assert told["tokens"] == ["bytes:\\xc3", "é"] and told["text_offset"] == [0, 0]


def test_slow_checks_of_grammars_keep_no_text_from_being_encoded(monkeypatch):
    begun, go_on = [], threading.Event()

    def slow(*constraint):
        begun.append(constraint)
        assert go_on.wait(10)

    monkeypatch.setattr(service_module, "try_constraint", slow)
    shaped = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    service = service_module.Service(None, ServerMetrics(), None)

    async def ask():
        checks = [asyncio.create_task(service.check_shapes([Job("x", (1,), shaped)])) for _ in range(64)]
        while not begun:
            await asyncio.sleep(0.001)
        encoded = await asyncio.wait_for(asyncio.to_thread(len, "text"), 5)
        assert len(begun) == 1
        go_on.set()
        await asyncio.gather(*checks)
        return encoded

    assert asyncio.run(ask()) == 4 and len(begun) == 64


def test_tools_that_cannot_reach_the_model_are_refused():
    """An agent would wait for calls of tools that the model was never told of."""

    def asked(template, parser="auto", **fields):
        templates = {} if template is None else {"default": template}
        tokenizer = SimpleNamespace(chat_templates=templates)
        model = ServedModel(None, tokenizer, ("m",), parser)
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        coroutine = read_chat(SimpleNamespace(model=model), ChatBody.model_validate(body), "")
        with pytest.raises((Problem, RequestError, AttributeError)) as found:
            asyncio.run(coroutine)
        # What is taken needs a whole service.
        taken = isinstance(found.value, AttributeError)
        return "" if taken else getattr(found.value, "message", str(found.value))

    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    assert asked("{{ messages }}", **tools).startswith("the model's chat template knows no tools")
    assert asked(None, **tools).startswith("the model has no chat template")
    assert asked("{{ messages }}", **tools, tool_choice="none") == ""
    assert asked("{{ messages }}", tools=[{"type": "web_search"}]) == ""
    assert asked("{{ messages }}", "hermes", **tools) == asked("{{ tools }}", **tools) == ""


def test_an_event_has_as_many_tokens_as_were_asked_for():
    pacing = Pacing(Interval(seconds=9.0, tokens=3))
    assert pacing.wait(1, 0.0) == 0  # the first token at once
    pacing.sent(0.0)
    assert [pacing.wait(unread, 100.0) for unread in (0, 2, 3, 4)] == [math.inf, math.inf, 0, 0]


def test_pauses_between_starts_of_an_engine_grow_up_to_a_bound(monkeypatch):
    pauses, failures = [], 8
    supervisor = Supervisor({})
    supervisor._process = SimpleNamespace(kill=lambda: None, ended=lambda: answer(1))

    async def answer(value):
        return value

    async def launch():
        if len(pauses) <= failures:
            raise RunError("no GPU")
        supervisor._opened = answer("model")

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr("kog_triton.server.supervisor.asyncio.sleep", sleep)
    monkeypatch.setattr(supervisor, "_launch", launch)
    asyncio.run(supervisor._restart())
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert supervisor.state == "ready" and supervisor.num_restarts == failures + 1
