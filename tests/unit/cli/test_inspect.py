"""`betahook inspect`, called as the console script calls it."""

import json
import re

import pytest
from transformers import (
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    RwkvConfig,
    SiglipVisionConfig,
    T5Config,
    XLNetConfig,
)

import betahook
from betahook.cli import main, models
from support.models import SIZE


@pytest.mark.oldest_skips("its Llama does not run on the meta device")
def test_inspect_names_every_layer(tmp_path, capsys):
    LlamaConfig(**SIZE, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "LlamaForCausalLM: betahook attaches to 2 attention layers"
    assert lines[2].split() == ["layer", "heads", "d_k", "own", "beta", "W_q", "W_k", "fold"]
    row = ["4", "8", "0.3536", "q_proj", "k_proj", "possible"]
    assert [line.split() for line in lines[4:6]] == [[f"model.layers.{index}.self_attn", *row] for index in range(2)]
    assert len(lines) == 7  # nothing special, though there are no weights


def test_inspect_says_what_is_special(tmp_path, capsys):
    """A factor in the query that is no part of beta."""
    sizes = dict(SIZE, num_local_experts=2, num_key_value_heads=2, layer_types=["full_attention"] * 2)
    GptOssConfig(**sizes, architectures=["GptOssForCausalLM"]).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    remark = "the factor of its rotary embedding (YaRN) is in q and k, a part of the scores and not of beta"
    assert f"model.layers.0-1.self_attn: {remark}" in lines


@pytest.mark.oldest_skips("its layers have longer names", config="SiglipVisionConfig*")
@pytest.mark.parametrize(
    ("config", "cells"),
    [
        (GPT2Config(n_embd=32, n_head=4, n_layer=1), ["h.0.attn", "4", "8", "0.3536", "c_attn", "c_attn"]),
        (SiglipVisionConfig(**SIZE), ["head.attention", "4", "8", "0.3536", "in_proj_weight", "in_proj_weight"]),
        (XLNetConfig(d_model=32, n_head=4, n_layer=1), ["layer.0.rel_attn", "4", "8"]),  # of no known form
    ],
)
def test_inspect_says_where_the_weights_are(tmp_path, capsys, config, cells):
    config.save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert any(said.split()[: len(cells)] == cells for said in capsys.readouterr().out.splitlines())


def terminal(monkeypatch, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize("columns", [80, 120])
def test_inspect_keeps_a_layer_on_a_line_where_its_name_is_long(tmp_path, capsys, monkeypatch, columns):
    sizes = dict(d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=32, vocab_size=64)
    T5Config(**sizes, architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    terminal(monkeypatch, columns)
    assert main(["inspect", str(tmp_path)]) == 0
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= columns
    rows = [line.split() for line in lines if line.startswith(("encoder", "decoder"))]
    assert len(rows) == 6
    assert {row[3] for row in rows} == {"1"}  # T5 has no scale
    assert {row[-1] for row in rows} == {"possible"}
    names = {80: "decoder.1.1.EncDecAttention", 120: "decoder.block.1.layer.1.EncDecAttention"}
    assert rows[-1][0] == names[columns]


def test_inspect_says_where_a_beta_is_unknown(tmp_path, capsys, monkeypatch):
    """Of layers that no forward reaches, since the code of the model fails before."""
    LlamaConfig(**SIZE).save_pretrained(tmp_path)
    monkeypatch.setattr(models, "an_input", lambda model: {"nonsense": 1})
    assert main(["inspect", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("layers.")]
    assert [row[3] for row in rows] == ["unknown", "unknown"]


def test_inspect_without_a_named_architecture(tmp_path, capsys):
    LlamaConfig(**SIZE).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "layers.0.self_attn" in capsys.readouterr().out


def test_inspect_reads_no_weights_and_so_needs_no_beta(tmp_path, capsys):
    model = LlamaForCausalLM(LlamaConfig(**SIZE))
    with betahook.attach(model) as hook:
        for layer in hook.layers.values():
            layer.beta = 0.5
        model.save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "LlamaForCausalLM: betahook attaches to 2 attention layers"
    assert lines[1] == "Saved with beta beside the weights at step 0: load it with betahook.restore(model, folder)"


def test_inspect_says_why_it_cannot(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert "has no config.json; give the folder of a model" in capsys.readouterr().err
    RwkvConfig(hidden_size=8, num_hidden_layers=1, vocab_size=16).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 1
    assert "cannot attach to RwkvModel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "gone does not exist; give the folder of a model, or a name on the Hugging Face Hub"),
        ("file.json", "file.json is a file; give the folder of the model"),
        ("adapter", "adapter holds an adapter and no model; give the folder of its base model"),
        ("empty", "empty has no config.json; give the folder of a model saved by save_pretrained()"),
    ],
)
def test_inspect_says_what_is_no_folder_of_a_model(tmp_path, capsys, name, message):
    (tmp_path / "file.json").write_text("{}")
    for folder in ("adapter", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert main(["inspect", str(tmp_path / name)]) == 1
    assert capsys.readouterr().err == f"betahook inspect: {tmp_path}/{message}\n"


def test_inspect_asks_the_hub_for_what_is_no_folder(capsys, monkeypatch):
    hub = {"someone/llama": LlamaConfig(**SIZE)}

    def look_up(name, trust_remote_code):
        if name not in hub:
            raise OSError("We couldn't connect")
        return hub[name]

    monkeypatch.setattr(models.AutoConfig, "from_pretrained", look_up)
    assert main(["inspect", "someone/llama"]) == 0
    assert "layers.0.self_attn" in capsys.readouterr().out
    assert main(["inspect", "gpt2"]) == 1
    message = "gpt2 is not a folder on this machine, and the Hugging Face Hub gave no config of it."
    assert capsys.readouterr().err == f"betahook inspect: {message} We couldn't connect\n"


def test_inspect_does_not_ask_the_hub_for_a_mistyped_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(models.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("it asked"))
    for name in ("runs/chekpoint-4", "nowhere/", "~/model", "./model", "a/b/c"):
        assert main(["inspect", name]) == 1
        assert f"{name} does not exist; give the folder of a model" in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["mine", "blip_text_model"])  # the config has that code, or the model alone
def test_inspect_neither_runs_code_of_the_model_nor_asks(tmp_path, capsys, monkeypatch, model_type):
    config = {"model_type": model_type, "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    assert main(["inspect", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "needs code of its own (auto_map in config.json), which this command does not run" in said.err
    assert "trust_remote_code" not in said.err + said.out


def test_inspect_says_what_speaks_against_folding(tmp_path, capsys):
    XLNetConfig(d_model=32, n_head=4, n_layer=1).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "its query projection has no known form" in capsys.readouterr().out


def test_unknown_commands_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["tune"])
    assert "invalid choice: 'tune'" in capsys.readouterr().err


def test_the_version_names_the_program(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"betahook {betahook.__version__}\n"
