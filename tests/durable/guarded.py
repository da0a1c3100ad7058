"""A Redis with the users of configs/redis-acl.conf, and a stack whose parts each have their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import redis

from polarq.client import Client
from polarq.settings import Settings
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack

SHIPPED = Path(__file__).parents[2] / "configs" / "redis-acl.conf"
ROLES = ("polarq-trainer", "polarq-worker", "polarq-proxy", "polarq-flower")


@dataclass(frozen=True)
class Guarded:
    server: EmbeddedRedis
    stack: LocalStack

    def url(self, role: str) -> str:
        return f"redis://{role}:{role}@127.0.0.1:{self.server.port}/0"

    def client(self) -> Client:
        env = {**self.stack.env, "POLARQ_REDIS_URL": self.url("polarq-trainer")}
        return Client(self.stack.topology, Settings.from_env(env))

    def refusals(self) -> list[tuple[str, str]]:
        """(user, command or key) of all that was refused so far.

        A client library also tries to say its own name, which servers from 7.2 on would let it: it needs no answer.
        """
        with redis.Redis.from_url(self.server.url, decode_responses=True) as admin:
            found = [(entry["username"], entry["object"]) for entry in admin.acl_log()]
        return [entry for entry in found if entry[1] not in {"client|setinfo", "client"}]


def with_passwords(folder: Path) -> Path:
    """The shipped file as its first lines say it is used: a password behind each user."""
    lines = SHIPPED.read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("user ")]
    assert sorted(users) == sorted(ROLES)
    path = folder / "acl.conf"
    path.write_text("\n".join(f"{x} >{x.split()[1]}" if x.startswith("user ") else x for x in lines) + "\n")
    return path
