"""pydantic-ai: its agent runs the loop, over Chat Completions, Responses and Messages."""

import asyncio
import sys
from importlib import metadata
from typing import Annotated, Literal

from pydantic import Field
from pydantic_ai import Agent, Tool
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

import common

called = []


def forecast(
    city: Literal["Paris", "Oslo", "Rome"], days: Annotated[int, Field(ge=1, le=7)]
) -> str:
    called.append({"city": city, "days": days})
    return common.RESULT


def settings(context):
    """The first request of a conversation calls the tool, the later ones answer."""
    chosen = {"max_tokens": common.MAX_TOKENS, "timeout": common.TIMEOUT_S}
    if common.FORCED:
        is_first = not any(isinstance(message, ModelResponse) for message in context.messages)
        chosen["tool_choice"] = [common.TOOL] if is_first else "none"
    return chosen


async def drain(_context, events):
    async for _ in events:
        pass


async def conversation(model, streamed):
    agent = Agent(
        model,
        instructions=common.system(),
        tools=[Tool(forecast, name=common.TOOL, description=common.DESCRIPTION)],
        model_settings=settings,
        retries=0,
    )
    turns, history = common.Turns(), []
    called.clear()
    for question in (common.QUESTION, common.THANKS):
        # A handler of events makes it stream.
        handler = drain if streamed else None
        result = await agent.run(
            question, message_history=history, event_stream_handler=handler
        )
        assert result.output, result
        for message in result.new_messages():
            if isinstance(message, ModelResponse):
                usage = message.usage
                turns.add(usage.input_tokens, usage.cache_read_tokens, usage.output_tokens)
        history = result.all_messages()
    assert called, history
    for arguments in called:
        common.valid(arguments)
    return turns


def openai_model(model):
    provider = OpenAIProvider(base_url=common.BASE_URL, api_key=common.API_KEY)
    return model(common.MODEL, provider=provider)


def anthropic_model():
    provider = AnthropicProvider(base_url=common.ROOT_URL, api_key=common.API_KEY)
    return AnthropicModel(common.MODEL, provider=provider)


def check(model, streamed):
    # The model is made within the event loop that its connections belong to.
    async def run():
        return await conversation(model(), streamed)

    return lambda: asyncio.run(run())


chat = lambda: openai_model(OpenAIChatModel)
responses = lambda: openai_model(OpenAIResponsesModel)
sys.exit(
    common.run(
        "pydantic-ai",
        metadata.version("pydantic-ai-slim"),
        [
            ("chat, whole", check(chat, False)),
            ("chat, streamed", check(chat, True)),
            ("responses, whole", check(responses, False)),
            ("responses, streamed", check(responses, True)),
            ("messages, whole", check(anthropic_model, False)),
            ("messages, streamed", check(anthropic_model, True)),
        ],
    )
)
