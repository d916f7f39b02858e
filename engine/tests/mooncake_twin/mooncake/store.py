"""A store like Mooncake's for tests: the same calls and numbers, and a folder for its objects.

The folder is MOONCAKE_TWIN, so several clients share one. A file `fault-CALL` in it (CALL is setup,
exist, put, get or remove) makes that call misbehave: `hang` never answers, `die` ends the process, a
number is what it says for every object. `calls` has a line for each call.
"""

import ctypes
import os
import pathlib
import time

FOLDER = pathlib.Path(os.environ["MOONCAKE_TWIN"])
OBJECTS = FOLDER / "objects"


def call(name, count):
    """Notes a call; the number that it must say for everything, if any."""
    with open(FOLDER / "calls", "a", encoding="ascii") as calls:
        calls.write(f"{os.getpid()} {name} {count}\n")
    try:
        fault = (FOLDER / f"fault-{name}").read_text().strip()
    except FileNotFoundError:
        return None
    if fault == "hang":
        time.sleep(3600)
    if fault == "die":
        os._exit(9)
    return int(fault)


class MooncakeDistributedStore:
    def setup(self, host, metadata, segment, buffer, protocol, device, master):
        code = call("setup", 0)
        OBJECTS.mkdir(exist_ok=True)
        (FOLDER / "setup").write_text(f"{host} {metadata} {segment} {protocol} {device!r} {master}")
        return code or 0

    def register_buffer(self, address, size):
        return 0

    def batch_is_exist(self, keys):
        code = call("exist", len(keys))
        if code is not None:
            return [code] * len(keys)
        return [int((OBJECTS / key).exists()) for key in keys]

    def batch_put_from(self, keys, addresses, lengths):
        code = call("put", len(keys))
        if code is not None:
            return [code] * len(keys)
        for key, address, length in zip(keys, addresses, lengths):
            # What is there stays there.
            if not (OBJECTS / key).exists():
                part = FOLDER / f"{key}.{os.getpid()}.part"
                part.write_bytes(ctypes.string_at(address, length))
                part.rename(OBJECTS / key)
        return [0] * len(keys)

    def batch_get_into(self, keys, addresses, lengths):
        code = call("get", len(keys))
        if code is not None:
            return [code] * len(keys)
        said = []
        for key, address, length in zip(keys, addresses, lengths):
            try:
                data = (OBJECTS / key).read_bytes()
            except FileNotFoundError:
                said.append(-704)
                continue
            ctypes.memmove(address, data[:length], min(len(data), length))
            said.append(len(data))
        return said

    def remove(self, key, force=False):
        code = call("remove", 1)
        if code is None:
            (OBJECTS / key).unlink(missing_ok=True)
        return code or 0

    def close(self):
        return 0
