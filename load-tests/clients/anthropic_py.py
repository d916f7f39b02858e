"""The official Python SDK of Anthropic: Messages, whole and streamed, and the counting of tokens."""

import sys
from importlib import metadata

import anthropic

import common

client = anthropic.Anthropic(
    base_url=common.ROOT_URL, api_key=common.API_KEY, max_retries=0, timeout=common.TIMEOUT_S
)
TOOL = {
    "name": common.TOOL,
    "description": common.DESCRIPTION,
    "input_schema": common.PARAMETERS,
}


def messages(streamed):
    # The mark is what Anthropic's own API needs to cache; here it must at least do no harm.
    system = [
        {"type": "text", "text": common.system(), "cache_control": {"type": "ephemeral"}}
    ]
    history = [{"role": "user", "content": common.QUESTION}]
    turns = common.Turns()

    def turn(choice):
        asked = dict(model=common.MODEL, system=system, messages=history, tools=[TOOL])
        if common.FORCED:
            asked["tool_choice"] = choice
        if common.FORCED and turns.prompt:
            form = {"type": "json_schema", "schema": common.SHORT_ANSWER}
            asked["output_config"] = {"format": form}
        counted = client.messages.count_tokens(**asked).input_tokens
        request = dict(asked, max_tokens=common.MAX_TOKENS)
        if streamed:
            with client.messages.stream(**request) as stream:
                for event in stream:
                    if event.type == "message_start":
                        started = event.message.usage
                        assert started.input_tokens + started.cache_read_input_tokens > 0, started
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**request)
        usage = answer.usage
        # Anthropic counts what was cached beside the input, not within it.
        cached = usage.cache_read_input_tokens
        prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
        turns.add(prompt, cached, usage.output_tokens)
        assert counted > 0, counted
        if common.FORCED:
            assert counted == prompt, (counted, usage)
        history.append({"role": "assistant", "content": answer.content})
        return answer

    answer = turn({"type": "tool", "name": common.TOOL})
    assert answer.type == "message" and answer.stop_reason == "tool_use", answer
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert calls, answer
    results = []
    for call in calls:
        assert call.id and call.name == common.TOOL, call
        common.valid(call.input)
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": common.RESULT})
    for content in (results, common.THANKS):
        history.append({"role": "user", "content": content})
        answer = turn({"type": "none"})
        assert answer.stop_reason == "end_turn", answer
        assert any(block.type == "text" and block.text for block in answer.content), answer
        assert all(block.type != "tool_use" for block in answer.content), answer
    return turns


sys.exit(
    common.run(
        "anthropic (Python)",
        metadata.version("anthropic"),
        [
            ("messages, whole", lambda: messages(False)),
            ("messages, streamed", lambda: messages(True)),
        ],
    )
)
