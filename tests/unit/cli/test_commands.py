"""`betahook` show, fold, examine and report, called as the console script calls them."""

import json
import re
import runpy
import shutil
from dataclasses import dataclass
from html.parser import HTMLParser

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.tensorboard import SummaryWriter
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
    XLNetConfig,
    XLNetModel,
)

import betahook
from betahook import checkpoint
from betahook.cli import main
from betahook.integrations.trainer import BetaHookCallback
from support.models import build, inputs
from support.trainer import make_trainer

TEXT = betahook.attach.__doc__ + betahook.fold.__doc__
TINY = dict(vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
NAME = "model.layers.0.self_attn"


@dataclass(frozen=True)
class Halved(betahook.Controller):
    """A controller of a user, which the command does not know."""

    def update(self, beta, observation, state):
        return beta / 2, state


def tokenizer():
    """Bytes and some merges, trained on a text that is shipped."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="!")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model with a tokenizer, its text, and a checkpoint of it with betas of its own."""
    folder = tmp_path_factory.mktemp("models")
    model = build("llama", "sdpa", vocab_size=300)
    (folder / "text.txt").write_text(TEXT)
    for name in ("plain", "hooked"):
        tokenizer().save_pretrained(folder / name)
    model.save_pretrained(folder / "plain")
    (folder / "hooked" / "optimizer.pt").write_text("large")
    with betahook.attach(model, controller=betahook.Search(window=3, rise=False)) as hook:
        model(**inputs("llama"))
        hook.step()
        hook.layers[NAME].beta = 0.5
        model.save_pretrained(folder / "hooked")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(folder, BetaHookCallback(), save_strategy="steps", save_steps=3, report_to="tensorboard")
    trainer.train()
    return folder


class Page(HTMLParser):
    """Texts, tags and addresses of a page; unclosed tags are an error."""

    def __init__(self, path):
        super().__init__()
        self.open, self.seen, self.texts, self.addresses = [], [], [], []
        self.source = path.read_text()
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "img", "polyline", "line", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("polyline", "line", "circle"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("inspect", "examine", "report", "show", "fold"))


def test_the_package_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["betahook", "--version"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module("betahook", run_name="__main__")
    assert capsys.readouterr().out == f"betahook {betahook.__version__}\n"


def test_show(saved, capsys):
    assert main(["show", str(saved / "hooked")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{saved / 'hooked'}: beta after 1 steps"
    cells = [line.split() for line in lines]
    assert ["0", "0.3536", "0.5", "1.41", "x"] in cells
    assert ["1", "0.3536", "0.3536", "1", "x"] in cells
    assert lines[-1] == "From Search(window=3, rise=False)"


def test_show_tells_heads_that_differ(tmp_path, capsys):
    model = build("llama")
    with betahook.attach(model, per_head=True) as hook:
        model(**inputs("llama"))
        hook.step()
        hook.layers[NAME].head_beta = torch.tensor([0.1, 0.2, 0.4, 0.8])
        checkpoint.save(hook, tmp_path)
    assert main(["show", str(tmp_path)]) == 0
    assert "0.283 to 2.26 x" in capsys.readouterr().out


def test_fold_makes_the_plain_model_of_a_checkpoint(saved, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["fold", str(saved / "hooked"), str(out)]) == 0
    assert "Beta, 1 to 1.41 times the model's own, is in the weights of 1 of 2 layers" in capsys.readouterr().out
    assert not (out / checkpoint.FILE).exists()
    assert not (out / "optimizer.pt").exists()
    assert (out / "tokenizer.json").read_bytes() == (saved / "hooked/tokenizer.json").read_bytes()
    assert checkpoint.MARK not in json.loads((out / "config.json").read_text())
    ids = torch.arange(20)[None]
    model = AutoModelForCausalLM.from_pretrained(saved / "hooked")
    with betahook.restore(model, saved / "hooked"), torch.no_grad():
        expected = model(input_ids=ids).logits
    with torch.no_grad():
        assert torch.allclose(AutoModelForCausalLM.from_pretrained(out)(input_ids=ids).logits, expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:Unexpected keyword")  # both are of PEFT
def test_fold_names_the_way_for_an_adapter(tmp_path, capsys):
    peft = pytest.importorskip("peft")
    base, folder = tmp_path / "base", tmp_path / "adapter"
    build("llama").save_pretrained(base)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(build("llama"), config).eval()
    with betahook.attach(adapted, controller="monitor", when="always") as hook, torch.no_grad():
        adapted(**inputs("llama"))
        for layer in hook.layers.values():
            layer.beta = 2 * layer.beta_default
        expected = adapted(**inputs("llama")).logits
        adapted.save_pretrained(folder)
    capsys.readouterr()
    assert main(["fold", str(folder), str(tmp_path / "plain")]) == 1
    assert capsys.readouterr().err == (
        f"betahook fold: {folder} holds an adapter and no model; in Python, load its base model and the adapter, then "
        "betahook.restore(model, folder), merged = model.merge_and_unload(), one forward of it, betahook.fold(merged)\n"
    )
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    betahook.restore(model, folder)
    merged = model.merge_and_unload()
    merged(**inputs("llama"))
    betahook.fold(merged)
    torch.testing.assert_close(merged(**inputs("llama")).logits, expected, rtol=1e-4, atol=1e-5)


def test_fold_reads_the_file_of_beta_once(saved, tmp_path, monkeypatch):
    places, read = [], checkpoint.file._put_together
    monkeypatch.setattr(checkpoint.file, "_put_together", lambda *given: places.append(given[-1]) or read(*given))
    assert main(["fold", str(saved / "hooked"), str(tmp_path / "out")]) == 0
    assert places == [saved / "hooked" / checkpoint.FILE]


def test_fold_names_one_beta_once(tmp_path, capsys):
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        hook.step()
        for layer in hook.layers.values():
            layer.beta = 2 * layer.beta_default
        model.save_pretrained(tmp_path / "hooked")
    assert main(["fold", str(tmp_path / "hooked"), str(tmp_path / "plain")]) == 0
    assert "Beta, 2 times the model's own, is in the weights of 2 of 2 layers" in capsys.readouterr().out


def test_beta_that_was_still_on_its_way(saved, tmp_path, capsys):
    model = build("llama")
    with betahook.attach(model, controller=[betahook.Search(warmup=5), Halved()]) as hook:
        for _ in range(3):
            model(**inputs("llama")).logits.sum().backward()
            hook.step()
        model.save_pretrained(tmp_path / "hooked")
    assert main(["show", str(tmp_path / "hooked")]) == 0
    assert capsys.readouterr().out.endswith("From Search(warmup=5), Halved(), and still on its way\n")
    assert main(["fold", str(tmp_path / "hooked"), str(tmp_path / "plain")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "When the checkpoint was saved, beta was still on its way. If the model is worse" in said
    assert main(["fold", str(saved / "hooked"), str(tmp_path / "arrived")]) == 0
    assert "on its way" not in capsys.readouterr().out


def test_fold_overwrites_nothing(saved, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main(["fold", str(saved / "hooked"), str(tmp_path)]) == 1
    assert (
        capsys.readouterr().err == f"betahook fold: {tmp_path} exists already; give a new folder for the plain model\n"
    )


def test_fold_has_nothing_to_do_where_beta_is_the_models_own(tmp_path, capsys):
    model = build("llama")
    with betahook.attach(model, controller="monitor") as hook:
        model(**inputs("llama"))
        hook.step()
        model.save_pretrained(tmp_path / "watched")
    assert main(["fold", str(tmp_path / "watched"), str(tmp_path / "plain")]) == 1
    message = "watched is a plain model already: beta is in the weights, or was never changed\n"
    assert capsys.readouterr().err.endswith(message)
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("command", [["show"], ["fold", "out"]])
def test_what_is_no_checkpoint(saved, run, tmp_path, capsys, command):
    name, *rest = command
    for inside in ("checkpoint-3", "checkpoint-12", f"{checkpoint.UNFINISHED}checkpoint-6.1"):
        (tmp_path / "killed" / inside).mkdir(parents=True)
        (tmp_path / "killed" / inside / checkpoint.FILE).touch()
    for folder, message in [
        (tmp_path / "killed", f"has no {checkpoint.FILE}; name one of its checkpoints: checkpoint-3, checkpoint-12"),
        (tmp_path / "gone", "is not a folder; give a checkpoint of a run with betahook"),
        (tmp_path, f"has no {checkpoint.FILE} and no config.json; give a checkpoint of a run with betahook"),
        (saved / "plain", f"has no {checkpoint.FILE}: beta is in the weights already, or was never changed"),
        (run, f"has no {checkpoint.FILE}; name one of its checkpoints: checkpoint-3, checkpoint-6"),
    ]:
        assert main([name, str(folder), *rest]) == 1
        assert capsys.readouterr().err == f"betahook {name}: {folder} {message}\n"


def test_a_plain_model_that_was_saved_over_a_hooked_one_is_plain(saved, tmp_path, capsys):
    """The file of beta stays where it was."""
    folder = shutil.copytree(saved / "hooked", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    hook = betahook.restore(model, folder)
    model(**inputs("llama"))
    betahook.fold(hook)
    model.save_pretrained(folder)
    assert (folder / checkpoint.FILE).exists()
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("LlamaForCausalLM: betahook attaches to 2 attention layers")
    assert "Saved with beta" not in said
    arguments = ["--text", str(saved / "text.txt"), "--length", "32", "--batch", "2", "--batches", "3"]
    assert main(["examine", str(folder), *arguments]) == 0
    assert "Beta is the model's own." in capsys.readouterr().out
    assert main(["show", str(folder)]) == 1
    message = f"{folder}: {checkpoint.FILE} is left from an earlier save, the model is plain: beta is in the weights"
    assert capsys.readouterr().err.startswith(f"betahook show: {message} already")


def test_report_leaves_out_a_checkpoint_that_is_damaged(run, tmp_path, capsys):
    folder, page = shutil.copytree(run, tmp_path / "run"), tmp_path / "page.html"
    (folder / "checkpoint-6" / checkpoint.FILE).write_bytes(b"damaged")
    assert main(["report", str(folder), "--html", str(page)]) == 0
    texts = " ".join(Page(page).texts)
    assert f"left out: {folder / 'checkpoint-6' / checkpoint.FILE} is damaged" in texts
    assert "Beta after 3 steps" in texts
    assert main(["report", str(folder / "checkpoint-6")]) == 1
    assert f"{folder / 'checkpoint-6' / checkpoint.FILE} is damaged" in capsys.readouterr().err


def test_examine_looks_at_a_model_with_its_beta(saved, tmp_path, capsys):
    page = tmp_path / "page.html"
    arguments = ["--text", str(saved / "text.txt"), "--length", "32", "--batch", "2", "--batches", "3"]
    assert main(["examine", str(saved / "hooked"), *arguments, "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "Of 2 layers, 2 healthy." in said
    assert "Beta is 1 to 1.4 times the model's own." in said
    assert "192 tokens of text.txt, in 3 forwards of up to 2 x 32" in said
    assert "float8_e4m3fn" in said
    shown = Page(page)
    assert "Assumptions behind 1/sqrt(d_k)" in shown.texts
    assert "img" in shown.seen
    assert main(["examine", str(saved / "plain"), *arguments]) == 0
    assert "Beta is the model's own." in capsys.readouterr().out


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
    assert f"in 1 forwards of up to 2 x {length}" in capsys.readouterr().out


@pytest.mark.oldest_skips("it makes up a tokenizer where there is none")
def test_examine_says_why_it_cannot(saved, tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    without = tmp_path / "without"
    LlamaForCausalLM(LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(without)
    made_up = tmp_path / "made_up"  # transformers makes up an empty tokenizer for some model types
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1)).save_pretrained(made_up)
    gone = str(tmp_path / "gone.txt")
    capsys.readouterr()
    for folder, text, message in [
        (saved / "plain", gone, f"{gone} is not a file; give a file of plain text with --text"),
        (saved / "plain", empty, f"{empty} gives 0 tokens of 0 characters; give a longer text"),
        (made_up, saved / "text.txt", f"characters; does {made_up} have the files of a tokenizer?"),
        (tmp_path / "gone", empty, f"{tmp_path / 'gone'} does not exist; give the folder of a model"),
        (without, empty, f"{without} has no tokenizer that can be loaded; save it there with"),
    ]:
        assert main(["examine", str(folder), "--text", str(text)]) == 1
        said = capsys.readouterr().err
        assert message in said
        assert said.startswith("betahook examine: ")
        assert said.count("\n") == 1


def test_arguments_that_make_no_sense(capsys):
    for arguments, message in [
        (["examine", "model"], "the following arguments are required: --text"),
        (
            ["examine", "m", "--text", "t", "--batch", "0"],
            "argument --batch: expected a whole number, 1 or more; got '0'",
        ),
        (["fold", "one"], "the following arguments are required: out"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert message in capsys.readouterr().err


def test_report_of_a_run_is_one_file_that_needs_no_other(run, tmp_path, capsys):
    page = tmp_path / "run.html"
    assert main(["report", str(run), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}: open it in a browser\n"
    shown = Page(page)
    assert all(address.startswith("data:") for address in shown.addresses)
    assert "script" not in shown.seen
    assert {"Loss", "Beta after 6 steps", "Assumptions behind 1/sqrt(d_k)", "from W_q and W_k"} <= set(shown.texts)
    assert "?" not in shown.texts
    assert [shown.texts.count(name) for name in ("attention", "beta / own", "own beta", "since step")] == [1] * 4
    assert any(re.match("Step 6: of 2 layers", text) for text in shown.texts)
    assert any("Search()" in text for text in shown.texts)
    assert not list(tmp_path.glob("*.unfinished"))


def test_report_of_a_checkpoint_alone(run, tmp_path):
    page = tmp_path / "one.html"
    assert main(["report", str(run / "checkpoint-3"), "--html", str(page)]) == 0
    shown = Page(page)
    assert "Beta after 3 steps" in shown.texts
    assert any(text.startswith("training: ") for text in shown.texts)  # from the history of the Trainer
    assert any(text.startswith("largest logit: ") for text in shown.texts)


def test_report_of_a_checkpoint_whose_config_is_of_a_part_of_the_model(run, tmp_path):
    """As that of the encoder in a wrapper, whose layers have other names."""
    folder, page = tmp_path / "checkpoint-3", tmp_path / "one.html"
    shutil.copytree(run / "checkpoint-3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    assert main(["report", str(folder), "--html", str(page)]) == 0
    assert "Beta after 3 steps" in Page(page).texts


def test_report_of_a_run_that_was_killed_in_its_last_save(run, tmp_path):
    page, folder = tmp_path / "one.html", tmp_path / "run"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("events.*"))
    written = folder / "checkpoint-6" / "trainer_state.json"
    written.write_text(written.read_text()[:100])
    assert main(["report", str(folder), "--html", str(page)]) == 0
    shown = Page(page)
    assert "Beta after 6 steps" in shown.texts
    assert any(re.match("training: .* at step 2, .* at 2", text) for text in shown.texts)  # of checkpoint-3


@pytest.mark.parametrize("aside", [True, False])
def test_report_judges_the_newest_whole_checkpoint(run, tmp_path, aside):
    """Of a run that was killed before the config of its last one was written."""
    page, folder = tmp_path / "one.html", tmp_path / "run"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("events.*"))
    unfinished = folder / "checkpoint-6"
    for name in ("config.json", "trainer_state.json"):
        (unfinished / name).unlink()
    if aside:
        make_trainer(folder, BetaHookCallback(), save_strategy="steps", save_steps=3)
        assert not unfinished.exists()
    assert main(["report", str(folder), "--html", str(page)]) == 0
    shown = Page(page)
    assert f"Beta after {3 if aside else 6} steps" in shown.texts
    assert any(re.match("Step 3: of 2 layers", text) for text in shown.texts)


def test_report_of_a_checkpoint_that_measured_nothing(tmp_path):
    page, model = tmp_path / "one.html", build("llama").eval()
    with betahook.attach(model) as hook:
        model(**inputs("llama"))
        hook.step()
        hook.layers[NAME].beta = 0.5
        model.save_pretrained(tmp_path)
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    assert "Beta after 1 steps" in Page(page).texts


def test_report_of_a_checkpoint_has_the_loss_of_its_evaluations(run, tmp_path):
    folder, page = tmp_path / "checkpoint-3", tmp_path / "one.html"
    shutil.copytree(run / "checkpoint-3", folder)
    written = json.loads((folder / "trainer_state.json").read_text())
    written["log_history"] += [{"step": step, "eval_loss": 4.0} for step in (2, 3)]
    (folder / "trainer_state.json").write_text(json.dumps(written))
    assert main(["report", str(folder), "--html", str(page)]) == 0
    assert any(text.startswith("evaluation: ") for text in Page(page).texts)


def test_report_of_tensorboard_files_alone(tmp_path):
    page = tmp_path / "page.html"
    table = "**Step 2: of 1 layer, 1 flat.**\n\n| layer | attention |\n| --- | --- |\n| 0 | flat |\n"
    with SummaryWriter(str(tmp_path / "older")) as writer:
        writer.add_scalar("attention/max_logit", 99.0, 0)
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        for step in range(3):
            writer.add_scalar("attention/max_logit", 4.0 + step, step)
            writer.add_scalar("attention/layers_one_key", 0.5, step)
        writer.add_image("attention/at a glance", torch.zeros(3, 4, 4), 2)
        writer.add_text("attention/findings", table, 2)
    with SummaryWriter(str(tmp_path / "other")) as writer:
        writer.add_scalar("loss", 1.0, 0)
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    shown = Page(page)
    assert {"Largest logit", "Step 2: of 1 layer, 1 flat.", "attention", "flat"} <= set(shown.texts)
    tips = [text for text in shown.texts if "at step" in text]
    assert tips == ["largest logit: 4 at step 0, 6 at 2", "one key: 0.5 at step 0, 0.5 at 2"]
    assert "img" in shown.seen


def test_all_charts_of_a_report_have_the_same_steps(tmp_path):
    page = tmp_path / "page.html"
    begins = {"train/loss": 0, "attention/max_logit": 500, "attention/lowest_entropy": 900}
    with SummaryWriter(str(tmp_path)) as writer:
        for tag, begin in begins.items():
            for step in range(begin, 1001, 100):
                writer.add_scalar(tag, float("nan") if step == 900 and tag == "train/loss" else 1.0, step)
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    shown = Page(page)
    lines = re.findall('polyline[^>]* points="([^"]+)"', shown.source)
    assert [float(line.split(",")[0]) for line in lines] == [62, 62 + 484 * 0.5, 62 + 484 * 0.9]
    assert "training: 1 at step 0, 1 at 1000; not finite at step 900" in shown.texts


def test_report_says_why_it_cannot(tmp_path, capsys):
    page = str(tmp_path / "page.html")
    assert main(["report", str(tmp_path), "--html", page]) == 1
    assert "holds nothing of betahook: neither TensorBoard files with its numbers nor" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "gone"), "--html", page]) == 1
    assert "is not a folder; give that of a run" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_fault_of_ours_shows_where_it_is(monkeypatch):
    monkeypatch.setattr("betahook.cli.commands.show", lambda folder: {}["missing"])
    with pytest.raises(KeyError):
        main(["show", "folder"])


def test_ctrl_c_is_no_fault(monkeypatch):
    def interrupt(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr("betahook.cli.commands.show", interrupt)
    assert main(["show", "folder"]) == 130


def test_report_says_which_of_several_runs_it_shows(run, tmp_path):
    page = tmp_path / "page.html"
    for name in ("first", "second"):
        shutil.copytree(run / "runs", tmp_path / "all" / name, copy_function=shutil.copy)  # not the times
    assert main(["report", str(tmp_path / "all"), "--html", str(page)]) == 0
    assert "of 2 folders with TensorBoard files the newest is shown, second" in " ".join(Page(page).texts)


def test_report_takes_the_checkpoints_of_the_run_that_it_shows(run, saved, tmp_path):
    page = tmp_path / "page.html"
    for name in ("first", "second"):
        shutil.copytree(run, tmp_path / "all" / name, copy_function=shutil.copy)
    shutil.copytree(saved / "hooked", tmp_path / "all" / "another")
    assert main(["report", str(tmp_path / "all"), "--html", str(page)]) == 0
    shown = " ".join(Page(page).texts)
    assert "the newest is shown, second" in shown
    assert "checkpoints after 3, 6 steps" in shown


def test_report_refuses_to_mix_models(run, tmp_path, capsys):
    shutil.copytree(run / "checkpoint-3", tmp_path / "one")
    model = build("gpt2", "sdpa")
    with betahook.attach(model) as hook:
        model(**inputs("gpt2"))
        hook.step()
        model.save_pretrained(tmp_path / "another")
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 1
    assert "holds checkpoints of different models; give the folder of one run" in capsys.readouterr().err
