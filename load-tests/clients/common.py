"""What the Python drivers share: the conversation, what must hold of it, the line that comes out.

Each driver takes BASE_URL API_KEY MODEL MODE. MODE says who decides about the tool: `free` leaves it
to the model (a scripted one), `forced` makes the first turn call by `tool_choice` and the later ones
not, for a model too small to decide. A driver prints one line of JSON and exits 0 when all holds.
"""

import json
import sys
import traceback
import uuid

BASE_URL, API_KEY, MODEL, MODE = sys.argv[1:5]
# Anthropic's clients append /v1 themselves.
ROOT_URL = BASE_URL.removesuffix("/v1")
FORCED = MODE == "forced"

# A call of this tool has fewer tokens than that, and so has any answer that is not told to be short.
MAX_TOKENS = 96
# Prefilling the conversation on a busy machine; far above what it takes.
TIMEOUT_S = 300

TOOL = "get_weather"
DESCRIPTION = "Gives the weather forecast of a city."
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
QUESTION = "What will the weather in Paris be tomorrow? Look it up."
RESULT = "Sunny, 21 degrees, a light wind from the west."
THANKS = "Thank you. What should I wear?"

# The form of a small model's later answers, so that `max_tokens` does not cut them: some clients take
# that for a failure.
SHORT_ANSWER = {
    "type": "object",
    "properties": {"advice": {"type": "string", "enum": ["a coat", "a shirt", "boots"]}},
    "required": ["advice"],
    "additionalProperties": False,
}


def system():
    """Instructions that no earlier conversation began with, so that what is cached is its own."""
    rules = "Use the tool for any question about weather, and answer in one short sentence. "
    return f"You are assistant {uuid.uuid4()}. " + rules * 6


def valid(arguments):
    """The arguments of a call satisfy PARAMETERS."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    assert set(arguments) == {"city", "days"}, arguments
    assert arguments["city"] in PARAMETERS["properties"]["city"]["enum"], arguments
    days = arguments["days"]
    assert type(days) is int and 1 <= days <= 7, arguments


class Turns:
    """What a client's own usage objects say, turn by turn."""

    def __init__(self):
        self.prompt, self.cached = [], []

    def add(self, prompt, cached, output):
        """`prompt` counts all its tokens, `cached` those of them that were."""
        assert cached is not None and 0 <= cached < prompt, (prompt, cached)
        assert output and output > 0, output
        self.prompt.append(prompt)
        self.cached.append(cached)

    def check(self, count):
        """Each turn found the one before it in the cache: all of it but a last part of a block."""
        assert len(self.prompt) == count, self.prompt
        for before, cached in zip(self.prompt, self.cached[1:]):
            assert cached > 0 and cached >= before - 32, (self.prompt, self.cached)


def run(client, version, checks, requests=3):
    """Runs every check, whatever becomes of the others; each gives its `Turns`, or nothing."""
    done = []
    for name, check in checks:
        result = {"check": name, "cached": None, "error": None}
        try:
            turns = check()
            if turns is not None:
                turns.check(requests)
                result["cached"] = turns.cached
        except Exception as error:
            traceback.print_exc()
            result["error"] = f"{type(error).__name__}: {error}"[:2000]
        done.append(result)
    line = {"client": client, "version": version, "checks": done}
    print(json.dumps(line), flush=True)
    return any(result["error"] for result in done)
