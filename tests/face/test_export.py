"""`legoai export`: a checkpoint of any mesh as a folder from which `transformers` makes the same model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from legoai.runtime import RunOptions
from support.commands.command_line import called
from support.models.published import CASES, SIZES, config_of, loaded, logits_of, tensors_of
from support.texts.plans import lowered

pytestmark = pytest.mark.usefixtures("here")

TRAINING = "batch (global = 4, micro = 2, seq_len = 16)\nprecision (param = fp32)\noptimizer adamw(lr = 1e-2)\n"
LLAMA = f'plan small\nmodel llama3("tiny")\ncluster cpu\n{TRAINING}'
FSDP = "mesh (dp_shard = 2)\nfsdp on dp_shard { layers.* = unit, root = unit }\n"
TOKENS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(chr(97 + i * i % 26) for i in range(4000)), encoding="utf-8")
    return tmp_path


def trained(text: str, folder: str, out: Path, data: Path, **options) -> torch.Tensor | None:
    """Train a program on this rank and save it; return the model's predictions if one rank holds it."""
    import os

    os.chdir(folder)
    namespace: dict = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    run = RunOptions(**{"device": "cpu", "log_every": 0, "steps": 1, "data": str(data), "out": out, **options})
    model = namespace["trainer"]().fit(run).training.model
    return logits_of(model.eval(), TOKENS)


def test_exported_checkpoint_of_two_ranks_equals_transformers(gloo, here, capsys):
    text = LLAMA.replace("cpu", "cpu(devices = 2)") + FSDP
    Path("small.plan").write_text(text, encoding="utf-8")
    [logits, _] = gloo(2)(trained, lowered(text).text, str(here), here / "runs" / "small", here / "text.txt")
    status, out, err = called(capsys, "export", "small.plan", "-o", "hub", "--max-shard-size", "1MB")
    assert (status, err.count("tensors\n")) == (0, 4), err
    assert out == "wrote 39 tensors of runs/small/checkpoints/step-1, 3.25439MiB in 4 files, to hub\n"
    torch.testing.assert_close(logits_of(loaded(Path("hub")).float(), TOKENS), logits, rtol=1e-5, atol=1e-5)
    index = json.loads(Path("hub/model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["weight_map"].keys() == tensors_of(Path("hub")).keys()
    assert max(file.stat().st_size for file in Path("hub").iterdir()) < 1_010_000

    assert len({file.stat().st_mode for file in Path("hub").iterdir()}) == 1, "who may read one may read all"
    assert called(capsys, "export", "small.plan", "-o", "hub")[0] == 1, "it is there already"
    status, _, _ = called(capsys, "export", "small.plan", "-o", "half", "--dtype", "bf16",
                          "--checkpoint", "runs/small/checkpoints/step-1")  # fmt: skip
    assert status == 0 and {value.dtype for value in tensors_of(Path("half")).values()} == {torch.bfloat16}
    assert [file.name for file in Path("half").glob("*.safetensors")] == ["model.safetensors"]
    assert config_of(Path("half"))["torch_dtype"] == "bfloat16"

    Path("tokenizers").mkdir()
    tokenized = f'{text}data (source = "text.txt", tokenizer = "tokenizers/mine.json")\n'
    Path("tokenized.plan").write_text(tokenized, encoding="utf-8")
    export = ("export", "tokenized.plan", "--checkpoint", "runs/small", "-o")
    _, _, err = called(capsys, *export, "without")
    assert "warning: the tokenizer of small is not added, as there is no file tokenizers/mine.json" in err
    Path("tokenizers/mine.json").write_text("mine", encoding="utf-8")
    Path("tokenizers/tokenizer.json").write_text("another", encoding="utf-8")
    assert called(capsys, *export, "with")[0] == 0
    assert Path("with/tokenizer.json").read_text(encoding="utf-8") == "mine"

    other = text.replace('"tiny"', '"tiny", hidden_dim = 256')
    Path("other.plan").write_text(other, encoding="utf-8")
    status, _, err = called(capsys, "export", "other.plan", "-o", "other", "--checkpoint", "runs/small")
    assert status == 1 and "error[RUN022]" in err and "[384, 128], which is [256, 128] there" in err
    assert {path.name for path in here.glob("other*")} == {"other.plan"}
    for change, what in (
        ("n_heads = 4, n_kv_heads = 2", "num_attention_heads = 8, and the plan's model 4"),
        ("rope_theta = 1e4", "rope_theta = 500000, and the plan's model 10000"),
    ):
        Path("other.plan").write_text(text.replace('"tiny"', f'"tiny", {change}'), encoding="utf-8")
        status, _, err = called(capsys, "export", "other.plan", "-o", "other", "--checkpoint", "runs/small")
        assert status == 1 and "error[RUN022]" in err and what in err and "help: export it with the plan" in err


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        pytest.param("mixtral", "model.layers.*", marks=pytest.mark.slow),
        pytest.param("llama, tied, wide heads, biases", "model.layers.*", marks=pytest.mark.slow),
        ("gpt2", "transformer.h.*"),
    ],
)
def test_config_file_model_loads_and_exports_published_weights(gloo, here, capsys, name, blocks):
    CASES[name].published().save_pretrained(here / "hub")
    head = f'plan others\nmodel huggingface("hub/config.json")\ncluster cpu(devices = 2)\n{TRAINING}{FSDP}'
    text = f'{head.replace("layers.*", blocks)}weights (huggingface = "hub")\n'
    Path("others.plan").write_text(text, encoding="utf-8")
    [logits, _] = gloo(2)(trained, lowered(text).text, str(here), here / "out", here / "text.txt", save_every=1)
    before = logits_of(loaded(Path("hub")).float(), TOKENS)
    assert not torch.allclose(logits, before, rtol=1e-2), "it has learnt something"
    status, _, err = called(capsys, "export", "others.plan", "-o", "again", "--checkpoint", "out")
    assert status == 0, err
    assert tensors_of(Path("again")).keys() == tensors_of(Path("hub")).keys()
    torch.testing.assert_close(logits_of(loaded(Path("again")).float(), TOKENS), logits, rtol=1e-4, atol=1e-4)
    assert Path("again/generation_config.json").exists()


def test_export_errors_state_the_reason(capsys):
    def exported(plan: str, *more: str) -> tuple[int, str]:
        Path("a.plan").write_text(plan, encoding="utf-8")
        status, _, err = called(capsys, "export", "a.plan", "-o", "hub", *more)
        return status, err

    assert exported(LLAMA)[0] == 1
    assert "error[RUN020]: small has not been run here: there is no folder runs/small" in exported(LLAMA)[1]
    assert "help: train it first with `legoai run a.plan`" in exported(LLAMA)[1]
    missing = exported(LLAMA, "--checkpoint", "runs/other")[1]
    assert "error[RUN020]: --checkpoint runs/other: no complete checkpoint there, and no such folder" in missing
    assert "LP210" in exported(f"{LLAMA}checkpoint {{ layrs.* = full }}\n")[1]
    pictures = 'plan a\nmodel vit("tiny")\ncluster cpu\nbatch (global = 2, micro = 2)\ndata (source = "synthetic")\n'
    assert "error[RUN029]" in exported(pictures)[1]
    small = "dim = 32, n_layers = 1, n_heads = 2, hidden_dim = 64, vocab_size = 256, max_seq_len = 32"
    status, err = exported(LLAMA.replace('llama3("tiny")', f'gpt2("small", {small}, bias = false)'))
    assert status == 1 and "cannot be published: GPT-2 of transformers has biases" in err
    status, err = exported(LLAMA, "--max-shard-size", "much")
    assert status == 2 and "expected a size, such as 5GB" in err


def test_lint_reports_weights_without_a_map(capsys):
    fields = json.dumps({**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    Path("config.json").write_text(fields, encoding="utf-8")
    Path("made.py").write_text("import torch\ndef build(): return torch.nn.Linear(2, 2)\n", encoding="utf-8")
    for model, status in (('huggingface("config.json")', 0), ('python("made:build")', 1), ('llama3("tiny")', 0)):
        text = LLAMA.replace('llama3("tiny")', model) + 'weights (huggingface = "hub")\n'
        Path("a.plan").write_text(text, encoding="utf-8")
        found, out, _ = called(capsys, "lint", "a.plan")
        assert (found, "LP690" in out) == (status, bool(status)), out


@pytest.mark.parametrize("size", ["inf", "nan", "1e400GB", "-5GB", "0", "3s"])
def test_size_of_shards_is_a_number_of_bytes(size: str, capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "export", "small.plan", "-o", "hub", f"--max-shard-size={size}")
    assert (status, out) == (2, "")
    assert f"expected a size, such as 5GB or 512MiB, not {size!r}" in err
