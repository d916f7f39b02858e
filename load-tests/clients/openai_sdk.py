"""The official openai SDK against a running stack: BASE_URL API_KEY MODEL. Exits 0 when all holds.

Each check is a function; a failed one prints its traceback and the rest still run.
"""

import sys
import traceback

import openai

BASE_URL, API_KEY, MODEL = sys.argv[1:4]
# No retries: a fault that a second try would hide is a fault.
client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0, timeout=120)

SYSTEM = "You are a patient assistant who answers in one short sentence. " * 12


def whole_answer():
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=16,
        temperature=0,
    )
    assert answer.object == "chat.completion", answer
    assert answer.choices[0].message.role == "assistant", answer
    assert answer.choices[0].message.content, answer
    assert answer.choices[0].finish_reason in ("stop", "length"), answer
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    assert usage.completion_tokens <= 16, usage
    assert usage.prompt_tokens_details.cached_tokens is not None, usage
    assert answer._request_id, "x-request-id is missing"


def stream_equals_whole():
    request = dict(
        model=MODEL,
        messages=[{"role": "user", "content": "Name three colours."}],
        max_tokens=20,
        temperature=0,
    )
    whole = client.chat.completions.create(**request)
    pieces, usage, reasons = [], None, []
    stream = client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk", chunk
        if chunk.choices:
            pieces.append(chunk.choices[0].delta.content or "")
            reasons.append(chunk.choices[0].finish_reason)
        if chunk.usage:
            assert not chunk.choices, chunk
            usage = chunk.usage
    assert "".join(pieces) == whole.choices[0].message.content, (pieces, whole)
    assert [r for r in reasons if r] == [whole.choices[0].finish_reason], reasons
    assert usage is not None, "no usage at the end of the stream"
    assert usage.prompt_tokens == whole.usage.prompt_tokens, (usage, whole.usage)
    assert usage.completion_tokens == whole.usage.completion_tokens, (usage, whole.usage)


def no_usage_unless_asked():
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say yes."}],
        max_tokens=4,
        stream=True,
    )
    assert all(chunk.usage is None for chunk in stream)


def multi_turn_with_extra_headers():
    messages = [{"role": "system", "content": SYSTEM}]
    nodes, cached = [], []
    for question in ["Who are you?", "What can you do?", "And what not?"]:
        messages.append({"role": "user", "content": question})
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=messages,
            max_tokens=12,
            temperature=0,
            extra_headers={"x-session-affinity": "sdk-session"},
        )
        answer = raw.parse()
        nodes.append(raw.headers["x-homing-node"])
        assert raw.headers["x-homing-route"], raw.headers
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    assert len(set(nodes)) == 1, nodes
    assert cached[0] == 0 and cached[1] > 100 and cached[2] >= cached[1], cached


def content_parts_and_own_request_id():
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"},
                                               {"type": "text", "text": " there"}]}],
        max_tokens=4,
        extra_headers={"x-request-id": "sdk-request-1"},
    )
    assert raw.headers["x-request-id"] == "sdk-request-1", raw.headers
    assert raw.parse().choices, raw


def text_completions():
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0
    )
    assert answer.object == "text_completion" and answer.choices[0].text, answer
    pieces = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0, stream=True
    )
    text = "".join(p.choices[0].text for p in pieces if p.choices)
    assert text == answer.choices[0].text, (text, answer)


def models():
    listed = [m.id for m in client.models.list()]
    assert MODEL in listed, listed


def expect(error_class, status, call):
    try:
        call()
    except openai.APIStatusError as error:
        assert type(error) is error_class, repr(error)
        assert error.status_code == status, repr(error)
        assert error.body and error.body.get("message"), repr(error)
        assert {"message", "type", "param", "code"} <= set(error.body), error.body
        assert error.request_id, "x-request-id is missing on an error"
        return error
    raise AssertionError(f"no {error_class.__name__}")


def error_classes():
    hello = [{"role": "user", "content": "Hello"}]

    def ask(with_client=client, **more):
        request = {"model": MODEL, "messages": hello, "max_tokens": 2, **more}
        return lambda: with_client.chat.completions.create(**request)

    stranger = openai.OpenAI(base_url=BASE_URL, api_key="sk-wrong", max_retries=0)
    expect(openai.AuthenticationError, 401, ask(stranger))
    error = expect(openai.NotFoundError, 404, ask(model="no-such-model"))
    assert "no-such-model" in error.body["message"], error.body
    expect(openai.BadRequestError, 400, ask(messages=[]))
    error = expect(openai.BadRequestError, 400, ask(messages=[{"role": "bogus", "content": "x"}]))
    assert error.body["param"] and "messages" in error.body["param"], error.body
    expect(openai.BadRequestError, 400, ask(temperature="warm"))
    expect(openai.BadRequestError, 400, ask(max_tokens=-1))
    expect(openai.BadRequestError, 400, ask(messages=[{"role": "user", "content": "word " * 20000}]))


def main():
    checks = [
        whole_answer,
        stream_equals_whole,
        no_usage_unless_asked,
        multi_turn_with_extra_headers,
        content_parts_and_own_request_id,
        text_completions,
        models,
        error_classes,
    ]
    failed = 0
    for check in checks:
        try:
            check()
            print(f"ok {check.__name__}")
        except Exception:
            failed += 1
            print(f"FAILED {check.__name__}")
            traceback.print_exc()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
