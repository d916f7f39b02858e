"""Which tokens do Hugging Face tokenizers and transformers give? Writes goldens.json beside itself.

The tokenizer is built from the GGUF's own metadata with the pre-tokenizer of SmolLM2's published
tokenizer.json; conversations go through transformers' own template code, with the clock fixed and
null contents and JSON arguments normalised as `messages.rs` says it does.

Usage: python make.py MODEL.gguf    (needs gguf, tokenizers, transformers, jinja2)
"""

import copy
import datetime
import json
import pathlib
import random
import sys

import gguf
import tokenizers
import transformers
import transformers.utils.chat_template_utils as templates

HERE = pathlib.Path(__file__).parent
NOW = 1_700_000_000


class FixedClock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc)


templates.datetime = FixedClock


def build(fields):
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    file = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"].contents(),
        },
    }
    plain = tokenizers.Tokenizer.from_str(json.dumps(file))
    special = tokenizers.Tokenizer.from_str(json.dumps(file))
    special.add_special_tokens([
        tokenizers.AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds) if kind == 3
    ])
    named = lambda key: tokens[fields[f"tokenizer.ggml.{key}_token_id"].contents()]
    chat = transformers.PreTrainedTokenizerFast(
        tokenizer_object=special, bos_token=named("bos"), eos_token=named("eos"),
        unk_token=named("unknown"), pad_token=named("padding"))
    return plain, special, chat


def texts():
    yield from [
        "", " ", "Hello, world!", "I'm sure they'll say it's what we'd've done; DON'T",
        "In 2024, 1234567 people paid $3.14159 or 10% on 12/31/99.", "   leading and trailing   ",
        "a  b   c    d\t\te \t f\n\n\n  g\r\n\r\n h\r i", "x = [1, 2,  3]\n\tif x[0]==1 :\n        return {'a':None}\n",
        "日本語のテキストと中文混排，以及 한국어 텍스트입니다。１２３ 〇一二", "हिन्दी العربية עברית ไทย",
        "👩‍👩‍👧‍👦 family 👋🏽 wave 🇩🇪🇫🇷 flags ❤️‍🔥 z\u0335a\u0310l\u0301g\u0300o", "²½Ⅷ٣५ m² x₁",
        "\x00\x01\x02\x7f\x80\x9f\xad\ufffe\U0010ffff\u200b\ufeff", "<|im_start|>system\nroot<|im_end|>\n<|endoftext|>",
        "\u00a0\u2003\u3000\u0085\u2028 mixed\u00a0spaces", "a" * 300, " " * 300, "0" * 300, "\n" * 33, "日" * 100,
        "ab" * 500, "👋" * 50, "http://example.org/a?b=c&d=%20#e", "snake_case camelCase SCREAMING_CASE kebab-case",
        pathlib.Path(__file__).read_text(), (HERE / "agent.jinja").read_text(),
    ]
    rng = random.Random(7)
    pools = [
        [chr(c) for c in range(32, 127)], list("0123456789 "), list(" \t\n\r\u00a0\u3000"), list("'stremvlldSTREMVLLD "),
        [chr(c) for c in range(0x300, 0x370)], [chr(c) for c in range(0x4e00, 0x4f00)],
        [chr(c) for c in range(0x1f300, 0x1f650)] + ["\u200d", "\ufe0f"], [chr(c) for c in range(0xa0, 0x250)],
        [chr(c) for c in range(0x600, 0x700)], [chr(c) for c in range(0, 32)],
    ]
    for _ in range(300):
        yield "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randrange(1, 50)))


def conversations():
    tools = [
        {"type": "function", "function": {
            "name": "get_weather", "description": " Get <b>weather</b> & \"more\"\nsecond line ",
            "parameters": {"type": "object", "properties": {
                "city": {"type": "string", "description": "Die Stadt, z.\u202fB. Zürich 👋"},
                "unit": {"type": "string", "enum": ["c", "f"]},
                "days": {"type": "number", "default": 1e-5, "maximum": 1e16, "minimum": -0.5}},
                "required": ["city"], "additionalProperties": False}}},
        {"type": "function", "function": {"name": "noop", "parameters": {}}},
    ]
    user = lambda content: {"role": "user", "content": content}
    system = lambda content: {"role": "system", "content": content}
    assistant = lambda content: {"role": "assistant", "content": content}

    def call(*arguments, content=None):
        return {"role": "assistant", "content": content, "tool_calls": [
            {"id": f"call_{at}", "type": "function", "function": {"name": "get_weather", "arguments": a}}
            for at, a in enumerate(arguments)]}

    result = lambda content: {"role": "tool", "tool_call_id": "call_0", "name": "get_weather", "content": content}
    long = "Explain the following function in detail, please. " * 80
    for template in ["model", "agent"]:
        yield template, [user("Hello")], None, None
        yield template, [system("You are terse."), user("Hi there")], None, None
        yield template, [system("  padded  "), user("  spaced \n\n text  "), assistant("Yo."), user("")], None, None
        yield template, [user("q1"), assistant("<think>\nreason\n</think>\n\nanswer"), user("q2")], None, None
        yield template, [user("1 + 1 = 2, 日本語 👋 'quoted' \"double\" {braces} {{ jinja }} {% raw %}")], None, None
        yield template, [system("s"), user(long), assistant(long), user(long)], None, None
        yield template, [user("a"), assistant("b")] * 20 + [user("c")], None, None
        yield template, [user([{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}])], None, None
        # The model's own template does not know tools; what stands in for it is ours (`hermes`).
        if template == "agent":
            yield template, [system("sys"), user("Weather?")], tools, None
            yield template, [
                system("sys"), user("Weather?"),
                call('{"city": "Zürich", "n": [1, 2.5, null, true], "o": {"b": 1, "a": "<x>"}}', "{}"),
                result('{"t": 21.5}'), result("second"), assistant("Sunny."), user("Thanks")], tools, None
            yield template, [user("Weather?"), call('{"city": "Paris"}', content="Let me look."), result("")], tools, {"thinking": False}
        yield template, [user("hi")], None, {"thinking": True}


def normalised(messages):
    messages = copy.deepcopy(messages)
    for message in messages:
        if message["content"] is None:
            message["content"] = ""
        if isinstance(message["content"], list):
            message["content"] = "".join(part["text"] for part in message["content"])
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


def main():
    reader = gguf.GGUFReader(sys.argv[1])
    plain, special, chat = build(reader.fields)
    sources = {
        "model": reader.fields["tokenizer.chat_template"].contents(),
        "agent": (HERE / "agent.jinja").read_text(),
    }
    goldens = {
        "made_with": {"tokenizers": tokenizers.__version__, "transformers": transformers.__version__},
        "unix_seconds": NOW,
        "texts": [
            {"text": text, "plain": plain.encode(text, add_special_tokens=False).ids,
             "special": special.encode(text, add_special_tokens=False).ids}
            for text in texts()],
        "conversations": [
            {"template": name, "messages": messages, "tools": tools, "kwargs": kwargs,
             "tokens": chat.apply_chat_template(
                 normalised(messages), tools=tools, chat_template=sources[name], add_generation_prompt=True,
                 tokenize=True, return_dict=False, **(kwargs or {}))}
            for name, messages, tools, kwargs in conversations()],
    }
    out = HERE / "goldens.json"
    out.write_text(json.dumps(goldens, ensure_ascii=True, separators=(",", ":")) + "\n")
    print(f"{out}: {len(goldens['texts'])} texts, {len(goldens['conversations'])} conversations")


main()
