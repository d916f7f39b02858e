"""A coding agent, headless: BASE_URL API_KEY MODEL MODE AGENT CLIENTS, CLIENTS where they are installed.

`free`: a scripted model lets the agent run a shell command and then talks; three turns, each a run of
the agent's program that continues the session. `forced`: the model's context is too small for the
agent's prompt, and what the agent reports must be the dialect's own context-length error.

Every agent gets a home and a folder of its own, is told to leave the network alone, and could not
reach it: its proxy is a closed port. How each is configured is what docs/agents.md describes.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import common

AGENT, CLIENTS = sys.argv[5], pathlib.Path(sys.argv[6])
QUESTION = "Run `echo tool-ok` in the shell and tell me what it printed."
FOLLOW_UPS = ["Thank you. Was that what you expected?", "Then we are done. Say goodbye."]
# More than the default model's context, whatever the agent adds to it.
LONG_QUESTION = QUESTION + " Then read this:" + " word" * 10_000
# Short where the default model answers what fits, such as a request for the session's title.
ANSWER_TOKENS = 64 if common.FORCED else 4096
# One run of an agent. The slowest repeats a refused request for half a minute.
RUN_S = 240
# The dialects' own words, and what agents make of them.
TOO_LONG = re.compile(
    r"context[_ ]length|maximum context|context window|prompt is too long", re.IGNORECASE
)


class Agent:
    """What differs between agents. `home` holds its settings, `work` is where it works."""

    def __init__(self, dialect):
        self.dialect = dialect
        self.folder = tempfile.TemporaryDirectory(prefix="agent-")
        self.home = pathlib.Path(self.folder.name, "home")
        self.work = pathlib.Path(self.folder.name, "work")
        for folder in (self.home, self.work):
            folder.mkdir()
        self.configure()

    def write(self, path, text):
        """A settings file below the agent's home."""
        path = self.home / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if isinstance(text, str) else json.dumps(text, indent=2))

    def run(self, prompt, is_first):
        """One turn: the events that the agent printed, and all that it printed."""
        closed = "http://127.0.0.1:9"
        environment = {
            "PATH": f"{CLIENTS / 'node/bin'}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "TERM": "dumb",
            "HTTP_PROXY": closed,
            "HTTPS_PROXY": closed,
            "NO_PROXY": "127.0.0.1,localhost",
            "HOMING_API_KEY": common.API_KEY,
            **self.environment(),
        }
        # A session of its own, so that all it started can be ended with it.
        with subprocess.Popen(
            [str(CLIENTS / AGENT / "node_modules/.bin" / self.program), *self.arguments(prompt, is_first)],
            cwd=self.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=RUN_S)
            finally:
                try:
                    os.killpg(process.pid, 9)
                except ProcessLookupError:
                    pass
        print(printed, file=sys.stderr)
        events = []
        for line in printed.splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
        return [event for event in events if isinstance(event, dict)], printed

    def environment(self):
        return {}


class Codex(Agent):
    """It is told the model's name: with those that it knows, it offers only tools of kinds that no
    model outside OpenAI takes, and so works without any.
    """

    program, package = "codex", "@openai/codex"
    dialects = ["responses", "responses by WebSocket"]
    read_before = 0

    def configure(self):
        self.write(
            ".codex/config.toml",
            f'''model = "{common.MODEL}"
model_provider = "homing"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.homing]
name = "Homing"
base_url = "{common.BASE_URL}"
env_key = "HOMING_API_KEY"
wire_api = "responses"
supports_websockets = {"true" if "WebSocket" in self.dialect else "false"}
''',
        )

    def arguments(self, prompt, is_first):
        resume = [] if is_first else ["resume", "--last"]
        return [
            "exec", *resume, "--json", "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox", prompt,
        ]

    def read(self, events):
        items = [event["item"] for event in events if event.get("type") == "item.completed"]
        text = [item["text"] for item in items if item["type"] == "agent_message"]
        # What it prints is the session's sum; its own record has each request.
        [record] = self.home.glob(".codex/sessions/**/*.jsonl")
        noted = [json.loads(line)["payload"] for line in record.read_text().splitlines()]
        usages = [
            note["info"]["last_token_usage"]
            for note in noted
            if note.get("type") == "token_count" and note.get("info")
        ]
        new, self.read_before = usages[self.read_before :], len(usages)
        return text[-1], [
            (usage["input_tokens"], usage["cached_input_tokens"], usage["output_tokens"])
            for usage in new
        ]


class ClaudeCode(Agent):
    """It asks for its own models, which the gateway has an alias for."""

    program, package = "claude", "@anthropic-ai/claude-code"
    dialects = ["messages"]

    def configure(self):
        pass

    def environment(self):
        return {
            "ANTHROPIC_BASE_URL": common.ROOT_URL,
            "ANTHROPIC_AUTH_TOKEN": common.API_KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }

    def arguments(self, prompt, is_first):
        resume = [] if is_first else ["--continue"]
        return [
            "--print", "--output-format", "stream-json", "--verbose",
            "--allowedTools", "Bash(echo:*)", *resume, "--", prompt,
        ]

    def read(self, events):
        [result] = [event for event in events if event.get("type") == "result"]
        assert not result["is_error"], result
        # A message comes in several events; its output is counted in the result alone.
        output = result["usage"]["output_tokens"]
        usages = {
            event["message"]["id"]: event["message"]["usage"]
            for event in events
            if event.get("type") == "assistant"
        }
        read = "cache_read_input_tokens"
        fields = ["input_tokens", read, "cache_creation_input_tokens"]
        return result["result"], [
            (sum(usage[field] for field in fields), usage[read], output)
            for usage in usages.values()
        ]


class OpenCode(Agent):
    program, package = "opencode", "opencode-ai"
    dialects = ["chat", "responses", "messages"]

    def configure(self):
        packages = {
            "chat": "@ai-sdk/openai-compatible",
            "responses": "@ai-sdk/openai",
            "messages": "@ai-sdk/anthropic",
        }
        self.write(
            ".config/opencode/opencode.json",
            {
                "model": f"homing/{common.MODEL}",
                "small_model": f"homing/{common.MODEL}",
                "autoupdate": False,
                "share": "disabled",
                "provider": {
                    "homing": {
                        "npm": packages[self.dialect],
                        "name": "Homing",
                        "options": {
                            "baseURL": common.BASE_URL,
                            "apiKey": "{env:HOMING_API_KEY}",
                        },
                        "models": {
                            common.MODEL: {
                                "reasoning": not common.FORCED,
                                "limit": {"context": 200000, "output": ANSWER_TOKENS},
                            }
                        },
                    }
                },
            },
        )

    def environment(self):
        return {
            # What it would otherwise fetch when it starts.
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        }

    def arguments(self, prompt, is_first):
        resume = [] if is_first else ["--continue"]
        return ["run", "--format", "json", *resume, prompt]

    def read(self, events):
        parts = [event["part"] for event in events if "part" in event]
        text = [part["text"] for part in parts if part["type"] == "text"]
        steps = [part["tokens"] for part in parts if part["type"] == "step-finish"]
        return text[-1], [
            (
                step["input"] + step["cache"]["read"] + step["cache"]["write"],
                step["cache"]["read"],
                step["output"] + step["reasoning"],
            )
            for step in steps
        ]


class Pi(Agent):
    program, package = "pi", "@mariozechner/pi-coding-agent"
    dialects = ["chat", "responses", "messages"]

    def configure(self):
        api = {
            "chat": "openai-completions",
            "responses": "openai-responses",
            "messages": "anthropic-messages",
        }[self.dialect]
        url = common.ROOT_URL if self.dialect == "messages" else common.BASE_URL
        self.write(
            ".pi/agent/models.json",
            {
                "providers": {
                    "homing": {
                        "baseUrl": url,
                        "api": api,
                        "apiKey": "HOMING_API_KEY",
                        "compat": {"sendSessionAffinityHeaders": True},
                        "models": [
                            {
                                "id": common.MODEL,
                                "reasoning": not common.FORCED,
                                "contextWindow": 200000,
                                "maxTokens": ANSWER_TOKENS,
                            }
                        ],
                    }
                }
            },
        )

    def environment(self):
        return {"PI_OFFLINE": "1"}

    def arguments(self, prompt, is_first):
        resume = [] if is_first else ["--continue"]
        return [
            "--print", "--mode", "json", "--provider", "homing", "--model", common.MODEL,
            *resume, prompt,
        ]

    def read(self, events):
        ended = [event["message"] for event in events if event.get("type") == "message_end"]
        answers = [message for message in ended if message["role"] == "assistant"]
        text = "".join(
            part["text"] for part in answers[-1]["content"] if part["type"] == "text"
        )
        return text, [
            (
                usage["input"] + usage["cacheRead"] + usage["cacheWrite"],
                usage["cacheRead"],
                usage["output"],
            )
            for usage in (answer["usage"] for answer in answers)
        ]


AGENTS = {"codex": Codex, "claude-code": ClaudeCode, "opencode": OpenCode, "pi": Pi}


def conversation(agent):
    turns, texts = common.Turns(), []
    for prompt in [QUESTION, *FOLLOW_UPS]:
        events, _ = agent.run(prompt, is_first=not texts)
        text, usages = agent.read(events)
        assert text and usages, events
        texts.append(text)
        for usage in usages:
            turns.add(*usage)
    # The scripted model repeats what the tool printed.
    assert "tool-ok" in texts[0], texts
    return turns


def refused(agent):
    _, printed = agent.run(LONG_QUESTION, is_first=True)
    assert TOO_LONG.search(printed), printed[-1000:]
    return None


def main():
    kind = AGENTS[AGENT]

    def check(dialect):
        work = refused if common.FORCED else conversation
        return lambda: work(kind(dialect))

    what = "context-length error" if common.FORCED else "three turns"
    checks = [(f"{dialect}, {what}", check(dialect)) for dialect in kind.dialects]
    package = CLIENTS / AGENT / "node_modules" / kind.package / "package.json"
    version = json.loads(package.read_text())["version"]
    return common.run(kind.package, version, checks, requests=4)


sys.exit(main())
