"""Unpacks one GGUF from a wheel: WHEEL NAME SHA256 FOLDER. The file appears whole or not at all."""

import hashlib
import os
import sys
import zipfile


def main() -> int:
    wheel, name, wanted, folder = sys.argv[1:5]
    part = os.path.join(folder, name + ".part")
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        member = next(m for m in archive.infolist() if m.filename.endswith("/" + name))
        done = 0
        with archive.open(member) as source, open(part, "wb") as target:
            while chunk := source.read(1 << 22):
                digest.update(chunk)
                target.write(chunk)
                done += len(chunk)
                show(name, done, member.file_size)
            target.flush()
            os.fsync(target.fileno())
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if digest.hexdigest() != wanted:
        os.unlink(part)
        print(f"setup: {name} has checksum {digest.hexdigest()}, expected {wanted}", file=sys.stderr)
        return 1
    os.replace(part, os.path.join(folder, name))
    return 0


def show(name: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        filled = 40 * done // max(total, 1)
        bar = "#" * filled + "." * (40 - filled)
        print(f"\rsetup: {name} [{bar}] {done >> 20}/{total >> 20} MiB", end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
