"""A picture that an agent showed the model, from a real worker's sandbox to a trainer's row."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from polarq.contracts import RolloutState
from polarq.testing.inference.images import IMAGE_TOKENS
from polarq.testing.inference.tokenizer import load_tokenizer
from polarq.testing.stack import LocalStack
from polarq.trainers.rows import rows
from polarq.trajectory.images import picture_bytes
from tests.worker.conftest import shell_task
from tests.worker.test_faults import run

STARS = Path(__file__).parents[2] / "examples/count_stars/stars.png"
LOOK = """python3 - <<'PY'
import base64, json, os, urllib.request
url = "data:image/png;base64," + base64.b64encode(open("stars.png", "rb").read()).decode()
parts = [{"type": "text", "text": "how many?"}, {"type": "image_url", "image_url": {"url": url}}]
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
    {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})).read()
PY
"""


def test_the_stars_are_in_the_row_by_reference_with_the_ids_that_stand_for_them(stack: LocalStack) -> None:
    upload = {"type": "upload_file", "source": str(STARS), "target": "/polar/session/stars.png"}
    runtime = {"backend": "local", "workdir": "/polar/session", "prepare": [upload]}
    result = run(stack, shell_task("picture", LOOK, runtime=runtime))
    assert (result.outcome.state, result.outcome.trainable) == (RolloutState.COMPLETED, True), result.outcome
    (row,) = rows(result)
    (image,) = row.images
    data = STARS.read_bytes()
    assert (image.sha256, image.media_type, image.size) == (
        hashlib.sha256(data).hexdigest(),
        "image/png",
        len(data),
    )
    whole = [*row.prompt_ids, *row.response_ids]
    assert whole[image.start : image.end] == [load_tokenizer().image_token_id] * IMAGE_TOKENS
    assert result.trajectory is not None
    assert result.trajectory.fidelity.unplaced_images == 0
    assert picture_bytes(result.trajectory.traces[0]) == {image.sha256: data}
    assert "base64" not in json.dumps([str(row)])
