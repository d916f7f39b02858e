"""Carries a node's commands to a Mooncake Store.

The node's other end of the Unix socket is file 0. First comes an open file, the memory that both map,
then the set-up, then commands; each frame is a little-endian u32 of its length and so many bytes. A
command is one letter, a u32 of how many objects it names, and for each a u16 of its key's length, the
key, a u64 of where it lies in the memory and a u64 of its length. The answer has an i32 for each: what
the store said. When the socket ends, so does this; when the node's thread dies, the system ends it.
"""

import array
import ctypes
import json
import mmap
import os
import signal
import socket
import struct
import sys

OBJECT = struct.Struct("<H")
PLACE = struct.Struct("<QQ")


def die_with_parent():
    """Asks the system to end this process with the thread that started it, where it can (Linux)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError):
        pass


def exactly(sock, count):
    """So many bytes; None if the other end is gone before the first."""
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def frame(sock):
    head = exactly(sock, 4)
    return None if head is None else exactly(sock, struct.unpack("<I", head)[0])


def answer(sock, codes):
    codes = list(codes)
    sock.sendall(struct.pack(f"<I{len(codes)}i", 4 * len(codes), *codes))


def receive_memory(sock):
    """Maps the file that comes first; its address, its size, and what keeps it mapped."""
    size = array.array("i").itemsize
    _, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(size))
    files = [
        struct.unpack("i", data[:size])[0]
        for level, kind, data in ancillary
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
    ]
    memory = mmap.mmap(files[0], os.fstat(files[0]).st_size)
    os.close(files[0])
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory), memory


def open_store(setup, base, size):
    """The store, and what its set-up said."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(
        setup["host"],
        "P2PHANDSHAKE",
        setup["segment_bytes"],
        setup["buffer_bytes"],
        setup["protocol"],
        setup["device"],
        setup["master"],
    )
    if code == 0:
        code = store.register_buffer(base, size)
    return store, code


def parse(body, base, size):
    """Letter, keys, addresses and lengths of a command."""
    letter, (count,) = body[:1], struct.unpack_from("<I", body, 1)
    at, keys, addresses, lengths = 5, [], [], []
    for _ in range(count):
        (length,) = OBJECT.unpack_from(body, at)
        at += OBJECT.size
        keys.append(body[at : at + length].decode("ascii"))
        at += length
        where, length = PLACE.unpack_from(body, at)
        at += PLACE.size
        if where + length > size:
            raise ValueError("a place outside the memory")
        addresses.append(base + where)
        lengths.append(length)
    return letter, keys, addresses, lengths


def carry_out(store, letter, keys, addresses, lengths):
    if letter == b"E":
        return store.batch_is_exist(keys)
    if letter == b"P":
        return store.batch_put_from(keys, addresses, lengths)
    if letter == b"G":
        return store.batch_get_into(keys, addresses, lengths)
    if letter == b"R":
        # By force: what is no block must go, whoever is reading it.
        return [store.remove(key, True) for key in keys]
    raise ValueError(f"no such command: {letter!r}")


def main():
    die_with_parent()
    # Ctrl-C is for the node, which ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=0)
    base, size, _memory = receive_memory(sock)
    setup = frame(sock)
    if setup is None:
        return 0
    store, code = open_store(json.loads(setup), base, size)
    answer(sock, [code])
    if code != 0:
        return 1
    while (body := frame(sock)) is not None:
        answer(sock, carry_out(store, *parse(body, base, size)))
    store.close()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Without the store's own threads being asked: they may wait for a master that is gone.
    os._exit(code)
