"""`betahook examine`, called as the console script calls it."""

import math
import re
import shutil

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    RobertaConfig,
    RobertaModel,
    XLNetConfig,
    XLNetModel,
)

import betahook
from betahook.cli import main, pages
from betahook.report import precision
from support.html_page import Page
from support.models import build, inputs
from support.tokens import tokenizer

TINY = dict(vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


def test_examine_looks_at_a_model_with_its_beta(saved, tmp_path, capsys):
    page = tmp_path / "page.html"
    arguments = ["--text", str(saved / "text.txt"), "--length", "32", "--batch", "2", "--batches", "3"]
    assert main(["examine", str(saved / "hooked"), *arguments, "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "Both layers healthy." in said
    assert "Beta is 1 to 1.4 times the model's own." in said
    assert "192 tokens of text.txt, in 3 forwards of up to 2 x 32" in said
    assert "float8_e4m3fn" in said
    shown = Page(page)
    assert "Assumptions behind 1/sqrt(d_k)" in shown.texts
    assert "img" in shown.seen
    assert main(["examine", str(saved / "plain"), *arguments]) == 0
    assert "Beta is the model's own." in capsys.readouterr().out


def test_examine_looks_at_the_layers_that_were_hooked(saved, tmp_path, capsys):
    folder = tmp_path / "one"
    shutil.copytree(saved / "plain", folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with betahook.attach(model, controller="monitor", layers="*.1.*") as hook:
        model.train()(**inputs("llama")).loss.backward()
        hook.step()
        hook.layers["model.layers.1.self_attn"].beta = 0.5
        model.save_pretrained(folder)
    assert main(["examine", str(folder), "--text", str(saved / "text.txt"), "--length", "32"]) == 0
    said = capsys.readouterr().out
    assert "Beta is 1.4 times the model's own." in said
    assert "layers.0" not in said


@pytest.mark.parametrize(
    ("model", "length"),
    [
        (lambda: RobertaModel(RobertaConfig(**TINY, max_position_embeddings=20)), 18),  # the first is after the padding
        (lambda: XLNetModel(XLNetConfig(vocab_size=300, d_model=16, n_head=2, n_layer=1, d_inner=16)), 32),  # no limit
        (lambda: LlamaModel(LlamaConfig(**TINY, max_position_embeddings=20)), 20),
    ],
    ids=["RoBERTa", "XLNet", "Llama"],
)
def test_examine_reads_no_more_tokens_than_a_model_has_positions_for(saved, tmp_path, capsys, model, length):
    tokenizer().save_pretrained(tmp_path)
    model().save_pretrained(tmp_path)
    arguments = ["--text", str(saved / "text.txt"), "--length", "32", "--batch", "2", "--batches", "1"]
    assert main(["examine", str(tmp_path), *arguments]) == 0
    assert f"in 1 forward of up to 2 x {length}" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--length", "--batch", "--batches"])
def test_examine_takes_numbers_far_beyond_the_text(saved, capsys, option):
    arguments = ["examine", str(saved / "plain"), "--text", str(saved / "text.txt"), "--length", "16", option]
    assert main([*arguments, "9999"]) == 0
    whole = capsys.readouterr().out
    for number in ("99999999999999", "9" * 30):
        assert main([*arguments, number]) == 0
        assert capsys.readouterr().out == whole.replace("9999 x", f"{number} x")


def test_examine_gives_the_text_to_encoder_and_decoder(saved, tmp_path, capsys):
    tokenizer().save_pretrained(tmp_path)
    build("t5", vocab_size=300).save_pretrained(tmp_path)
    arguments = ["--text", str(saved / "text.txt"), "--length", "32", "--batch", "2", "--batches", "1"]
    assert main(["examine", str(tmp_path), *arguments]) == 0
    said = capsys.readouterr().out
    for place in ("encoder.block.0.layer.0.SelfAttention", "decoder.block.1.layer.1.EncDecAttention"):
        assert re.search(rf"{place} +(healthy|flat)", said)
    assert "6 layers" in said


def test_heads_with_a_nan_are_counted_in_the_table_of_formats():
    largest = {"max_logit/attention": torch.tensor([math.nan, 1.0]), "beta/attention": torch.ones(2)}
    (row,) = pages.formats(list(precision.judge(largest)), ["0"]).rows
    assert row == ["0", *3 * ["not measured: 1 of 2 heads"]]


def test_examine_refuses_a_tokenizer_with_more_tokens_than_the_model(saved, tmp_path, capsys):
    tokenizer().save_pretrained(tmp_path)
    LlamaModel(LlamaConfig(**{**TINY, "vocab_size": 100})).save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["examine", str(tmp_path), "--text", str(saved / "text.txt"), "--length", "32"]) == 1
    said = capsys.readouterr().err
    assert re.match(rf"betahook examine: {tmp_path}: token \d+ of the tokenizer, but the model has 100: call ", said)
    assert said.count("\n") == 1


@pytest.mark.oldest_skips("it makes up a tokenizer where there is none")
def test_examine_says_why_it_cannot(saved, tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(bytes(range(256)) * 20)
    assert main(["examine", str(saved / "plain"), "--text", str(binary)]) == 1
    assert "binary.txt is no text in UTF-8; give a file of plain text" in capsys.readouterr().err
    damaged = shutil.copytree(saved / "plain", tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"")
    assert main(["examine", str(damaged), "--text", str(saved / "text.txt")]) == 1
    assert f"the weights in {damaged} cannot be read, a file is damaged: " in capsys.readouterr().err
    without = tmp_path / "without"
    LlamaForCausalLM(LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(without)
    made_up = tmp_path / "made_up"  # transformers makes up an empty tokenizer for some model types
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1)).save_pretrained(made_up)
    gone = str(tmp_path / "gone.txt")
    capsys.readouterr()
    for folder, text, message in [
        (saved / "plain", gone, f"{gone} is not a file; give a file of plain text with --text"),
        (saved / "plain", empty, f"{empty}: 0 tokens from 0 characters; give a longer text"),
        (made_up, saved / "text.txt", f"characters; has {made_up} a tokenizer? tokenizer.save_pretrained("),
        (tmp_path / "gone", empty, f"{tmp_path / 'gone'} does not exist; give the folder of a model"),
        (without, empty, f"{without} has no tokenizer that can be loaded; save it there with"),
    ]:
        assert main(["examine", str(folder), "--text", str(text)]) == 1
        said = capsys.readouterr().err
        assert message in said
        assert said.startswith("betahook examine: ")
        assert said.count("\n") == 1
