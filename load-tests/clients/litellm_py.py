"""litellm: one call for all dialects; here its providers openai, openai/responses and anthropic."""

import os
import sys
from importlib import metadata

# Its list of prices comes from the network otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # noqa: E402

import common  # noqa: E402

# No second try that hides a fault.
litellm.telemetry = False
litellm.num_retries = 0
TOOL = {
    "type": "function",
    "function": {
        "name": common.TOOL,
        "description": common.DESCRIPTION,
        "parameters": common.PARAMETERS,
    },
}


def conversation(streamed, provider, url):
    messages = [
        {"role": "system", "content": common.system()},
        {"role": "user", "content": common.QUESTION},
    ]
    turns = common.Turns()

    def turn(choice):
        request = dict(
            model=f"{provider}/{common.MODEL}",
            api_base=url,
            api_key=common.API_KEY,
            messages=messages,
            tools=[TOOL],
            max_tokens=common.MAX_TOKENS,
            timeout=common.TIMEOUT_S,
        )
        if common.FORCED:
            request["tool_choice"] = choice
        if streamed:
            chunks = list(
                litellm.completion(**request, stream=True, stream_options={"include_usage": True})
            )
            answer = litellm.stream_chunk_builder(chunks, messages=messages)
        else:
            answer = litellm.completion(**request)
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        turns.add(usage.prompt_tokens, cached, usage.completion_tokens)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        return message

    message = turn({"type": "function", "function": {"name": common.TOOL}})
    assert message.tool_calls, message
    for call in message.tool_calls:
        assert call.id and call.function.name == common.TOOL, call
        common.valid(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": common.RESULT})
    for question in (common.THANKS, None):
        message = turn("none")
        assert message.content and not message.tool_calls, message
        if question:
            messages.append({"role": "user", "content": question})
    return turns


def check(streamed, provider, url):
    return lambda: conversation(streamed, provider, url)


sys.exit(
    common.run(
        "litellm",
        metadata.version("litellm"),
        [
            ("chat, whole", check(False, "openai", common.BASE_URL)),
            ("chat, streamed", check(True, "openai", common.BASE_URL)),
            ("responses, whole", check(False, "openai/responses", common.BASE_URL)),
            ("responses, streamed", check(True, "openai/responses", common.BASE_URL)),
            ("messages, whole", check(False, "anthropic", common.ROOT_URL)),
            ("messages, streamed", check(True, "anthropic", common.ROOT_URL)),
        ],
    )
)
