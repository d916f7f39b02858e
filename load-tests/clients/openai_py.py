"""The official Python SDK of OpenAI: Chat Completions and Responses, whole and streamed."""

import sys
from importlib import metadata

import openai

import common

client = openai.OpenAI(
    base_url=common.BASE_URL, api_key=common.API_KEY, max_retries=0, timeout=common.TIMEOUT_S
)
FUNCTION = {
    "name": common.TOOL,
    "description": common.DESCRIPTION,
    "parameters": common.PARAMETERS,
}

# The SDK's helpers of streams raise on an answer that was cut.
SHORT = {"name": "advice", "schema": common.SHORT_ANSWER, "strict": True}


def chat(streamed):
    tool = {"type": "function", "function": FUNCTION}
    named = {"type": "function", "function": {"name": common.TOOL}}
    messages = [
        {"role": "system", "content": common.system()},
        {"role": "user", "content": common.QUESTION},
    ]
    turns = common.Turns()

    def turn(choice):
        request = dict(
            model=common.MODEL, messages=messages, tools=[tool], max_tokens=common.MAX_TOKENS
        )
        if common.FORCED:
            request["tool_choice"] = choice
        if common.FORCED and turns.prompt:
            request["response_format"] = {"type": "json_schema", "json_schema": SHORT}
        if streamed:
            usage = {"include_usage": True}
            with client.chat.completions.stream(**request, stream_options=usage) as stream:
                for _ in stream:
                    pass
                answer = stream.get_final_completion()
        else:
            answer = client.chat.completions.create(**request)
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        turns.add(usage.prompt_tokens, cached, usage.completion_tokens)
        message = answer.choices[0].message
        # As the SDK's own examples replay an answer: what it read, unset fields left out.
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        return answer.choices[0].finish_reason, message

    reason, message = turn(named)
    # OpenAI says `stop` where a named tool was forced.
    assert reason in ("tool_calls", "stop") and message.tool_calls, message
    for call in message.tool_calls:
        assert call.id and call.type == "function" and call.function.name == common.TOOL, call
        common.valid(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": common.RESULT})
    for question in (common.THANKS, None):
        reason, message = turn("none")
        assert reason == "stop" and message.content, message
        assert not message.tool_calls, message
        if question:
            messages.append({"role": "user", "content": question})
    return turns


def responses(streamed, chained):
    """`chained` names the response before; otherwise every item is sent again."""
    tool = {"type": "function", **FUNCTION, "strict": False}
    history = [{"role": "user", "content": common.QUESTION}]
    instructions = common.system()
    turns, last = common.Turns(), None

    def turn(choice, new):
        nonlocal last
        history.extend(new)
        request = dict(
            model=common.MODEL,
            instructions=instructions,
            input=new if last and chained else history,
            tools=[tool],
            max_output_tokens=common.MAX_TOKENS,
            store=chained,
        )
        if common.FORCED:
            request["tool_choice"] = choice
        if common.FORCED and last:
            request["text"] = {"format": {"type": "json_schema", **SHORT}}
        if last and chained:
            request["previous_response_id"] = last.id
        if streamed:
            with client.responses.stream(**request) as stream:
                for _ in stream:
                    pass
                last = stream.get_final_response()
        else:
            last = client.responses.create(**request)
        usage = last.usage
        cached = usage.input_tokens_details.cached_tokens
        turns.add(usage.input_tokens, cached, usage.output_tokens)
        history.extend(
            item.model_dump(exclude_none=True, exclude={"status", "parsed_arguments"})
            for item in last.output
        )
        return last

    answer = turn({"type": "function", "name": common.TOOL}, [])
    assert answer.status == "completed", answer
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls, answer
    results = []
    for call in calls:
        assert call.call_id and call.name == common.TOOL, call
        common.valid(call.arguments)
        results.append(
            {"type": "function_call_output", "call_id": call.call_id, "output": common.RESULT}
        )
    for new in (results, [{"role": "user", "content": common.THANKS}]):
        answer = turn("none", new)
        assert answer.status == "completed" and answer.output_text, answer
        assert all(item.type != "function_call" for item in answer.output), answer
    return turns


sys.exit(
    common.run(
        "openai (Python)",
        metadata.version("openai"),
        [
            ("chat, whole", lambda: chat(False)),
            ("chat, streamed", lambda: chat(True)),
            ("responses, whole", lambda: responses(False, False)),
            ("responses, streamed", lambda: responses(True, False)),
            ("responses, whole, by previous_response_id", lambda: responses(False, True)),
            ("responses, streamed, by previous_response_id", lambda: responses(True, True)),
        ],
    )
)
