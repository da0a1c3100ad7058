"""inference: the command that starts a server as polarq needs it, or one line about what is missing."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from polarq.cli.model_families import FAMILIES, family_of
from tests.cli.conftest import Cli, program


def flags_of(cli: Cli, *arguments: str) -> dict[str, str | None]:
    """The flags of the command with the value that follows each."""
    words = cli("inference", *arguments, "--json").json["exec"]
    return {
        word: following if following and not following.startswith("--") else None
        for word, following in zip(words, [*words[1:], ""], strict=True)
        if word.startswith("--")
    }


def test_vllm_is_started_with_what_polarq_needs(cli: Cli) -> None:
    ran = cli("inference", "vllm", "--model", "Qwen/Qwen3-8B", "--port", "8123", "--tp", "4", "--json")
    assert ran.code == 0
    assert ran.json["env"] == {"VLLM_SERVER_DEV_MODE": "1"}
    assert ran.json["exec"][:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    assert flags_of(cli, "vllm", "--model", "Qwen/Qwen3-8B", "--port", "8123", "--tp", "4") == {
        "--host": "127.0.0.1",
        "--port": "8123",
        "--tensor-parallel-size": "4",
        "--tool-call-parser": "hermes",
        "--reasoning-parser": "qwen3",
        "--logprobs-mode": "raw_logprobs",
        "--generation-config": "vllm",
        "--enable-prompt-tokens-details": None,
        "--enable-scale-out": None,
        "--enable-auto-tool-choice": None,
    }


def test_sglang_is_started_with_what_polarq_needs(cli: Cli) -> None:
    ran = cli("inference", "sglang", "--model", "zai-org/GLM-4.7", "--weight-version", "0", "--json")
    assert ran.json["env"] == {}
    assert ran.json["exec"][:3] == ["python", "-m", "sglang.launch_server"]
    assert flags_of(cli, "sglang", "--model", "zai-org/GLM-4.7", "--weight-version", "0") == {
        "--model-path": "zai-org/GLM-4.7",
        "--host": "127.0.0.1",
        "--port": "8000",
        "--tool-call-parser": "glm47",
        "--reasoning-parser": "glm45",
        "--sampling-defaults": "openai",
        "--enable-cache-report": None,
        "--incremental-streaming-output": None,
        "--return-input-ids": None,
        "--return-output-ids": None,
        "--weight-version": "0",
    }


def test_an_earlier_release_gets_no_flag_that_it_would_refuse(cli: Cli) -> None:
    old = flags_of(cli, "sglang", "--model", "Qwen/Qwen3-8B", "--engine-version", "0.5.19")
    assert not {"--return-input-ids", "--return-output-ids"} & set(old)
    assert "--enable-scale-out" not in flags_of(cli, "vllm", "--model", "Qwen/Qwen3-8B", "--engine-version", "0.29.1")
    assert "--enable-scale-out" in flags_of(cli, "vllm", "--model", "Qwen/Qwen3-8B", "--engine-version", "0.30.0")


def test_the_printed_line_is_one_for_a_shell(cli: Cli) -> None:
    model = "/models/it's Qwen3"
    ran = cli("inference", "vllm", "--model", model, "--", "--max-num-seqs", "8")
    [line] = ran.out.splitlines()
    first, *words = shlex.split(line)
    assert first == "VLLM_SERVER_DEV_MODE=1"
    assert words[:3] == ["vllm", "serve", model]
    assert words[-2:] == ["--max-num-seqs", "8"]
    assert words == cli("inference", "vllm", "--model", model, "--json", "--", "--max-num-seqs", "8").json["exec"]


def test_a_flag_of_the_users_own_replaces_polarqs(cli: Cli) -> None:
    words = cli(
        "inference",
        "vllm",
        "--model",
        "Qwen/Qwen3-8B",
        "--json",
        "--",
        "--generation-config=auto",
        "--tool-call-parser",
        "x",
    ).json["exec"]
    assert words.count("--generation-config") == 0
    assert [words[at + 1] for at, word in enumerate(words) if word == "--tool-call-parser"] == ["x"]


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ((), "--tool-parser NAME and --reasoning-parser NAME"),
        (("--tool-parser", "hermes"), "--reasoning-parser NAME"),
        (("--reasoning-parser", "none"), "--tool-parser NAME"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_unknown_family_is_one_line_that_names_the_missing_flags(
    cli: Cli, engine: str, given: tuple[str, ...], missing: str
) -> None:
    ran = cli("inference", engine, "--model", "acme/foo-7b", *given)
    assert (ran.code, ran.out) == (2, "")
    [line] = ran.err.splitlines()
    assert f"'acme/foo-7b' is of no family that polarq knows: give {missing} (or none)" in line


def test_parsers_can_be_chosen_and_left_out(cli: Cli) -> None:
    chosen = flags_of(cli, "vllm", "--model", "acme/foo", "--tool-parser", "pythonic", "--reasoning-parser", "none")
    assert chosen["--tool-call-parser"] == "pythonic"
    assert "--reasoning-parser" not in chosen
    none = flags_of(cli, "vllm", "--model", "Qwen/Qwen3-8B", "--tool-parser", "none")
    assert not {"--tool-call-parser", "--enable-auto-tool-choice"} & set(none)
    assert none["--reasoning-parser"] == "qwen3"


@pytest.mark.parametrize(
    ("model", "vllm", "sglang"),
    [
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", ("qwen3_coder", None), ("qwen3_coder", None)),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", ("hermes", None), ("qwen25", None)),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", ("hermes", "qwen3"), ("qwen25", "qwen3-thinking")),
        ("Qwen/Qwen3.5-35B-A3B", ("qwen3_coder", "qwen3"), ("qwen3_coder", "qwen3")),
        ("Qwen/Qwen2.5-7B-Instruct", ("hermes", None), ("qwen25", None)),
        ("deepseek-ai/DeepSeek-V3.2", ("deepseek_v32", "deepseek_v3"), ("deepseekv32", "deepseek-v3")),
        ("deepseek-ai/DeepSeek-R1-0528", ("deepseek_v3", "deepseek_r1"), ("deepseekv3", "deepseek-r1")),
        ("openai/gpt-oss-20b", ("openai", "openai_gptoss"), ("gpt-oss", "gpt-oss")),
        ("zai-org/GLM-4.5-Air", ("glm45", "glm45"), ("glm45", "glm45")),
        ("moonshotai/Kimi-K2-Instruct", ("kimi_k2", "kimi_k2"), ("kimi_k2", "kimi_k2")),
        ("meta-llama/Llama-3.3-70B-Instruct", ("llama3_json", None), ("llama3", None)),
    ],
)
def test_a_models_family_is_known_by_its_name(
    model: str, vllm: tuple[str, str | None], sglang: tuple[str, str | None]
) -> None:
    family = family_of(model)
    assert family is not None
    assert (family.vllm.tool, family.vllm.reasoning) == vllm
    assert (family.sglang.tool, family.sglang.reasoning) == sglang


def test_a_folder_is_known_by_its_model_type(tmp_path: Path) -> None:
    folder = tmp_path / "step_400"
    folder.mkdir()
    assert family_of(str(folder)) is None
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}), encoding="utf-8")
    family = family_of(str(folder))
    assert family is not None
    assert family.vllm.reasoning == "qwen3"


def test_no_family_is_hidden_by_an_earlier_one() -> None:
    """A broader pattern that comes first would make a narrower one useless."""
    for place, family in enumerate(FAMILIES):
        plain = family.pattern.replace(".*", "-").replace("[-_.]?", "-").replace("[-_]?", "-").replace("[._]", ".")
        name = plain.split("|")[0].replace("-?", "-").replace("[5-9]", "5").replace("(", "").replace(")", "")
        assert family_of(f"org/{name}") is FAMILIES[place], name


def test_exec_becomes_the_server(tmp_path: Path) -> None:
    fake = tmp_path / "vllm"
    fake.write_text('#!/bin/sh\necho "$VLLM_SERVER_DEV_MODE" "$@"\nexit 7\n', encoding="utf-8")
    fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ran = program("inference", "vllm", "--model", "Qwen/Qwen3-8B", "--exec", env={**os.environ, "PATH": path})
    assert ran.returncode == 7
    assert ran.stdout.startswith("1 serve Qwen/Qwen3-8B --host 127.0.0.1 --port 8000 --tool-call-parser hermes")


def test_a_server_that_is_not_installed_is_one_line(tmp_path: Path) -> None:
    arguments = ("inference", "vllm", "--model", "Qwen/Qwen3-8B", "--exec")
    ran = program(*arguments, env={**os.environ, "PATH": str(tmp_path)})
    assert ran.returncode == 2
    [line] = ran.stderr.splitlines()
    assert line.startswith("polarq: cannot start vllm: No such file or directory (pip install vllm)")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tgi", "--model", "x"), "No such command 'tgi'"),
        (("vllm",), "Missing option '--model'"),
        (("vllm", "--model", "Qwen/Qwen3-8B", "--engine-version", "new"), "'new' is no release such as"),
        (("vllm", "--model", "Qwen/Qwen3-8B", "--weight-version", "1"), "/update_weight_version"),
    ],
)
def test_bad_usage_is_one_line(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    ran = cli("inference", *arguments)
    assert ran.code == 2
    [line] = ran.err.splitlines()
    assert words in line
