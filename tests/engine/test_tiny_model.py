"""The tiny model's checkpoint, as far as it can be judged without an engine; that it loads, the engine's tests show."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

from polarq.testing.tiny_model import TinyModel, make_tiny_model


def test_the_same_model_gives_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    folders = [make_tiny_model(tmp_path / name) for name in ("one", "two")]
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == second
    other = make_tiny_model(tmp_path / "three", TinyModel(seed=1))
    assert (other / "model.safetensors").read_bytes() != first["model.safetensors"]


def test_the_weights_file_describes_its_own_bytes(tmp_path: Path) -> None:
    packed = (make_tiny_model(tmp_path) / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", packed)
    header = json.loads(packed[8 : 8 + length])
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    end = 0
    for tensor in tensors:
        start, stop = tensor["data_offsets"]
        count = 1
        for size in tensor["shape"]:
            count *= size
        assert (start, stop - start) == (end, 4 * count)
        end = stop
    assert 8 + length + end == len(packed)
    assert length % 8 == 0


def test_every_id_of_the_tokenizer_has_a_row_in_the_vocabulary(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    assert max(ids) < config["vocab_size"]
    ends = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert config["eos_token_id"] == ends["<|im_end|>"]


def test_the_command_writes_a_checkpoint_and_says_how_it_is_used(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polarq.testing.tiny_model"]
    made = subprocess.run([*command, str(tmp_path / "model")], capture_output=True, text=True, check=True)
    assert str(tmp_path / "model") in made.stdout
    wrong = subprocess.run(command, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("usage:")
