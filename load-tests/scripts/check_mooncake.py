"""A real Mooncake Store between two engine nodes.

One node computes conversations and pushes them out of its memory; the other goes on with them from the
store. Its answers and its cached tokens are compared with those of a node that did everything itself.
Then the store's client and its master are killed, and turns go on. Standard library only.
"""

import argparse
import atexit
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

TOKEN = "check-mooncake"
# The default model's pool holds 43 blocks of 360 KiB then, a conversation has about 20, host memory 22.
SMALL = ["--kv-memory", "15MiB", "--kv-host-memory", "8MiB"]
CONVERSATIONS = 6
RIVERS = ["Nile", "Amazon", "Danube", "Mekong", "Volga", "Rhine"]


def say(text):
    print(text, flush=True)


def check(holds, what):
    say(f"  {'ok  ' if holds else 'FAIL'} {what}")
    if not holds:
        sys.exit(1)


def until(what, holds, patience_s=60):
    deadline = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline:
            check(False, f"waited in vain: {what}")
        time.sleep(0.05)
    say(f"  ok   {what}")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Master:
    def __init__(self, program, log):
        self.program, self.log = program, log
        self.port, self.metrics_port = free_port(), free_port()
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [
                self.program,
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self.port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={self.metrics_port}",
                "--default_kv_lease_ttl=5000ms",
                "--logtostderr=true",
            ],
            stdout=self.log,
            stderr=self.log,
        )
        atexit.register(self.process.kill)
        until("mooncake_master listens", lambda: is_open(self.port))

    def kill(self):
        self.process.kill()
        self.process.wait()


class Node:
    def __init__(self, options, log, *args):
        environment = {**os.environ, "HOMING_NODE_TOKEN": TOKEN}
        environment.setdefault("HOMING_LOG", "info,mooncake=debug")
        command = [options.engine, "serve", "--model", options.model, "--listen", "127.0.0.1:0"]
        command += ["--model-id", "smol", "--exit-with-stdin", *args]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
        )
        self.url = json.loads(self.process.stdout.readline())["listening"]

    def get(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read().decode()

    def chat(self, messages):
        body = {"model": "smol", "messages": messages, "temperature": 0, "max_tokens": 24}
        answer = json.loads(self.get("/v1/chat/completions", body))
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], cached

    def metric(self, name, tier=None):
        labels = r'model_name="smol"' + (f',tier="{tier}"' if tier else "")
        found = re.search(rf"^homing:{name}{{{labels}}} (\S+)$", self.get("/metrics"), re.M)
        return float(found.group(1))

    def client(self):
        """The process that holds the store's client; 0 if there is none."""
        children = f"/proc/{self.process.pid}/task"
        for task in os.listdir(children):
            try:
                pids = pathlib.Path(children, task, "children").read_text().split()
            except OSError:
                continue
            if pids:
                return int(pids[0])
        return 0

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        check(self.process.wait(timeout=60) == 0, "a node ends as it should")


def opening(which):
    story = " ".join(f"Chapter {n} of the {RIVERS[which]}: it flows on, past town {n * 7}." for n in range(16))
    return [{"role": "user", "content": f"{story} Name one town of the {RIVERS[which]}."}]


def play(node, conversations):
    """One turn of each; answers and cached tokens."""
    said = []
    for messages in conversations:
        answer, cached = node.chat(messages)
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": "And another one?"})
        said.append((answer, cached))
    return said


def copy(conversations):
    return [list(messages) for messages in conversations]


def push_out(node):
    """Has a node's memory filled with other things."""
    for number in range(5):
        text = f"{number} " + " ".join(f"Item {n} costs {n * 3 + number}." for n in range(60))
        node.chat([{"role": "user", "content": text}])


def rate(node, way):
    count, seconds = node.metric(f"kv_shared_{way}_bytes_total"), node.metric(f"kv_shared_{way}_seconds_total")
    return f"{count / 1e6:.0f} MB at {count / 1e6 / seconds:.0f} MB/s" if seconds else "nothing"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--logs", required=True, type=pathlib.Path)
    parser.add_argument("--bench", required=True, help="the program shared_bench")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    log = lambda name: open(options.logs / f"{name}.log", "w", encoding="utf-8")

    say("a master, two nodes with a shared tier, one that keeps everything itself")
    master = Master(options.master, log("master"))
    store = ["--kv-shared", f"mooncake://127.0.0.1:{master.port}", "--kv-shared-python", options.python]
    store += ["--kv-shared-memory", "256MiB"]
    a = Node(options, log("node-a"), *SMALL, *store)
    b = Node(options, log("node-b"), *SMALL, *store)
    alone = Node(options, log("node-alone"), "--kv-memory", "200MiB")
    for node in (a, b):
        until("the store is reached", lambda: node.metric("kv_shared_up") == 1)

    say("conversations that node A computed and lost from its memory go on at node B")
    conversations = [opening(which) for which in range(CONVERSATIONS)]
    expected = copy(conversations)
    check(play(a, conversations)[0][0] == play(alone, expected)[0][0], "the first turns are equal")
    push_out(a)
    until("A's conversations are in the store", lambda: a.metric("kv_tier_stored_total", "shared") > 90)
    at_b, at_alone = play(b, conversations), play(alone, expected)
    for which, (ours, theirs) in enumerate(zip(at_b, at_alone)):
        check(ours == theirs, f"{RIVERS[which]}: the answer, and {ours[1]} cached tokens as on one node {theirs[1]}")
    tokens = b.metric("kv_tier_hit_tokens_total", "shared")
    check(tokens > 0, f"B had {tokens:.0f} tokens from the store; computed what was left")
    check(b.metric("kv_shared_damaged_total") == 0, "nothing was damaged")
    say(f"  A put {rate(a, 'put')}; B fetched {rate(b, 'get')} (batches of up to 16 blocks)")

    say("B's client is killed")
    os.kill(b.client(), signal.SIGKILL)
    check(play(b, conversations)[0][0] == play(alone, expected)[0][0], "answers go on, the same")
    until("the store is reached again", lambda: b.metric("kv_shared_up") == 1 and b.client() > 0)

    say("the master is killed")
    master.kill()
    started = time.monotonic()
    ours, theirs = play(b, conversations), play(alone, expected)
    took = time.monotonic() - started
    check([t for t, _ in ours] == [t for t, _ in theirs], f"answers go on, the same ({took:.1f} s for all)")
    until("B has noticed", lambda: b.metric("kv_shared_up") == 0)
    check(b.metric("kv_tier_blocks", "shared") == 0, "nothing is told to be in the store")
    master.start()
    until("the store is reached again", lambda: b.metric("kv_shared_up") == 1, 90)
    before = b.metric("kv_tier_stored_total", "shared")
    ours, theirs = play(b, conversations), play(alone, expected)
    check([t for t, _ in ours] == [t for t, _ in theirs], "answers go on, the same")
    until("blocks are put again", lambda: b.metric("kv_tier_stored_total", "shared") > before)

    for node in (a, b, alone):
        node.end()

    say("putting and fetching, by the size of a block")
    subprocess.run([options.bench, f"127.0.0.1:{master.port}", options.python], check=True)
    master.kill()
    say("all is well")


if __name__ == "__main__":
    main()
