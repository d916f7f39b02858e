"""LangChain's ChatOpenAI: the loop as its users write it, over Chat Completions and Responses."""

import sys
from importlib import metadata

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

import common


# The schema itself: one made from annotations would allow more properties.
@tool(common.TOOL, description=common.DESCRIPTION, args_schema=common.PARAMETERS)
def forecast(city, days):
    return common.RESULT


def conversation(streamed, **more):
    model = ChatOpenAI(
        base_url=common.BASE_URL,
        api_key=common.API_KEY,
        model=common.MODEL,
        max_tokens=common.MAX_TOKENS,
        max_retries=0,
        timeout=common.TIMEOUT_S,
        # Off by itself where the address is not OpenAI's: a stream would have no usage.
        stream_usage=True,
        **more,
    )
    messages = [SystemMessage(common.system()), HumanMessage(common.QUESTION)]
    turns = common.Turns()

    def turn(choice):
        bound = model.bind_tools([forecast], tool_choice=choice if common.FORCED else None)
        if streamed:
            answer = None
            for chunk in bound.stream(messages):
                answer = chunk if answer is None else answer + chunk
        else:
            answer = bound.invoke(messages)
        usage = answer.usage_metadata
        cached = usage["input_token_details"].get("cache_read")
        turns.add(usage["input_tokens"], cached, usage["output_tokens"])
        messages.append(answer)
        return answer

    answer = turn(common.TOOL)
    assert answer.tool_calls and not answer.invalid_tool_calls, answer
    for call in answer.tool_calls:
        assert call["id"] and call["name"] == common.TOOL, call
        common.valid(call["args"])
        messages.append(forecast.invoke(call))
    for question in (common.THANKS, None):
        answer = turn("none")
        assert answer.text and not answer.tool_calls, answer
        if question:
            messages.append(HumanMessage(question))
    return turns


def check(streamed, **more):
    return lambda: conversation(streamed, **more)


chained = {"use_responses_api": True, "use_previous_response_id": True}
sys.exit(
    common.run(
        "langchain-openai",
        metadata.version("langchain-openai"),
        [
            ("chat, whole", check(False)),
            ("chat, streamed", check(True)),
            ("responses, whole", check(False, use_responses_api=True)),
            ("responses, streamed", check(True, use_responses_api=True)),
            ("responses, whole, by previous_response_id", check(False, **chained)),
            ("responses, streamed, by previous_response_id", check(True, **chained)),
        ],
    )
)
