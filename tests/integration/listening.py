"""On which TCP ports a process listens, as anybody on the machine can see."""

import os


def ports_of(process: int) -> set[int]:
    folder = f"/proc/{process}/fd"
    links = [
        os.readlink(f"{folder}/{name}") for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")
    ]
    inodes = {
        link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")
    }
    found: set[int] = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{process}/net/{table}") as rows:
            for row in rows:
                _, local, _, state, *rest = row.split()
                if state == "0A" and rest[5] in inodes:
                    found.add(int(local.rpartition(":")[2], 16))
    return found
