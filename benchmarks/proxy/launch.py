"""Starts polarq's proxy as a contender of the proxy benchmark: one open session per connection, then the proxy itself.

    python launch.py PORT UPSTREAM REDIS_PORT [FOLDER]

The secret of connection 7 is `7` (a real one has 256 random bits; what it opens costs the same). The process that is
measured is the proxy's own: this one becomes it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from redis import Redis

from polarq.ledger.keys import Keys
from polarq.store.grants import GrantSpec, digest_of

SESSIONS = 1024


def open_sessions(redis: Redis) -> None:
    """Grants named by number. Raises redis' own errors."""
    pipe = redis.pipeline(transaction=False)
    for index in range(SESSIONS):
        spec = GrantSpec(rollout_id=f"bench.{index}", task_id="bench", attempt=1, token=1, node_id="node0")
        key = Keys().grant(digest_of(str(index)))
        pipe.delete(key, Keys().completions(spec.rollout_id, 1, 1))
        pipe.hset(key, mapping={"state": "open", "spec": spec.model_dump_json(), "next_seq": 0})
    pipe.execute()


def main() -> None:
    port, upstream, redis_port = sys.argv[1:4]
    folder = Path(sys.argv[4] if len(sys.argv) > 4 else ".")
    open_sessions(Redis(port=int(redis_port)))
    inference = {"engine": "vllm", "base_url": upstream, "model": "bench", "max_concurrency": 1024}
    topology = folder / "topology.yaml"
    topology.write_text(json.dumps({"gateway": {"nodes": [{"id": "node0", "inference": inference}]}}))
    os.environ["POLARQ_REDIS_URL"] = f"redis://127.0.0.1:{redis_port}/0"
    arguments = ["-m", "polarq_proxy", "--node", "node0", "--topology", str(topology), "--port", port]
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
