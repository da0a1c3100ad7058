"""Stores a word under a new name and asks for it; ends with 1 where the service does not do as the task says."""

import http.client
import secrets
import sys


def ask(method: str, path: str, body: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", 7071, timeout=10)
    connection.request(method, path, body)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def main() -> int:
    name, word = f"/{secrets.token_hex(8)}", secrets.token_hex(8)
    try:
        before, stored, after = ask("GET", name)[0], ask("PUT", name, word)[0], ask("GET", name)
    except (OSError, http.client.HTTPException) as exc:
        print(f"the service does not answer: {exc}")
        return 1
    print(before, stored, after)
    return int((before, stored, after) != (404, 204, (200, word)))


if __name__ == "__main__":
    sys.exit(main())
