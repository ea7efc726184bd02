"""Rules about sizes that the ranks of an axis must divide, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.texts.rule_plans import codes, diagnostics, message

ATTENTION = ["layers.*.attention.{wq, wk, wv} = colwise", "layers.*.attention.wo = rowwise"]
FEED_FORWARD = ["layers.*.feed_forward.{w1, w3} = colwise", "layers.*.feed_forward.w2 = rowwise"]


def plan(model: str, ranks: int, *rules: str) -> str:
    cluster = f"cluster h100_sxm(hosts = {ranks}, fabric = infiniband_ndr)"
    return f"model {model}\n{cluster}\nmesh (dp_shard = 8, tp = {ranks})\nshard on tp {{ {', '.join(rules)} }}"


@pytest.fixture
def ranks() -> Iterator[Callable[[int], Any]]:
    """`ranks(n)` is a mesh of n ranks, of which only the first exists."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(count: int) -> Any:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
        return init_device_mesh("cpu", (count,), mesh_dim_names=("tp",))

    yield start
    dist.destroy_process_group()


def steps(mesh: Any, styles: dict[str, Any], sequence: int = 8, **sizes: int) -> bool:
    """Whether a small Llama under the styles makes a step on the first rank."""
    import logging

    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    from legoai.specs.models.configs import LlamaConfig
    from legoai.specs.models.llama import Llama

    small = {"dim": 48, "n_layers": 1, "n_heads": 12, "n_kv_heads": 4, "hidden_dim": 96, "vocab_size": 96} | sizes
    model = Llama(LlamaConfig(max_seq_len=16, **small))
    parallelize_module(model, mesh, styles)
    tokens = torch.zeros(2, sequence, dtype=torch.long)
    logging.disable(logging.ERROR)
    try:
        logits = model(tokens)
        if isinstance(logits, DTensor):
            with loss_parallel():
                F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        else:
            logits.sum().backward()
            assert logits.shape == (2, sequence, small["vocab_size"])
    except (RuntimeError, ValueError):
        return False
    finally:
        logging.disable(logging.NOTSET)
    return True


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8])
def test_tp_must_divide_heads_as_in_pytorch(ranks: Callable[[int], Any], count: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles = {f"layers.0.attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    legal = steps(ranks(count), styles | {"layers.0.attention.wo": RowwiseParallel()})
    # 24 heads and 8 key/value heads, against 12 and 4 here.
    assert ("LP401" not in codes(plan('llama3("3b")', 2 * count, *ATTENTION))) == legal


def test_message_states_heads_and_legal_sizes() -> None:
    text = plan('llama3("3b")', 6, *ATTENTION)
    assert message(text, "LP401") == "`tp` = 6 does not divide the 8 key/value heads of `layers.*.attention`"
    found = next(item for item in diagnostics(text) if item.code == "LP401")
    assert found.help == ("legal sizes of `tp` are 1, 2, 4 and 8",)
    assert message(plan('gpt2("xl")', 2, *ATTENTION), "LP401").startswith("`tp` = 2 does not divide the 25 heads")


def test_unsharded_attention_does_not_limit_tp() -> None:
    assert "LP401" not in codes(plan('llama3("3b")', 16, *FEED_FORWARD))


@pytest.mark.parametrize("width", [96, 95])
def test_tp_must_divide_features_as_in_pytorch(ranks: Callable[[int], Any], width: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles = {f"layers.0.feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
    legal = steps(ranks(3), styles | {"layers.0.feed_forward.w2": RowwiseParallel()}, hidden_dim=width)
    # The preset 3b has 8192 hidden features, which 3 does not divide; 8b has 14336, which 7 divides.
    model, count = ('llama3("3b")', 3) if width == 95 else ('llama3("8b")', 7)
    assert ("LP402" not in codes(plan(model, count, *FEED_FORWARD))) == legal


@pytest.mark.parametrize("size", [96, 95])
def test_uneven_vocabulary_is_a_warning(ranks: Callable[[int], Any], size: int) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(use_local_output=False),
    }
    assert steps(ranks(3), styles, vocab_size=size)


def test_message_states_the_padded_vocabulary() -> None:
    text = plan('gpt2("small")', 2, "tok_embeddings = rowwise", "output = colwise(loss_parallel = true)")
    found = [item for item in diagnostics(text) if item.code == "LP403"]
    assert {item.severity for item in found} == {"warning"}
    assert found[0].message == "`tp` = 2 does not divide the 50257 tokens of the vocabulary of `tok_embeddings`"
    assert found[0].label.text == "25129 on most ranks, 25128 on the last"
    assert found[0].help == ("a vocabulary of 50432 would give each rank 25216",)


@pytest.mark.parametrize("sequence", [8, 9])
def test_tp_must_divide_the_sequence_as_in_pytorch(ranks: Callable[[int], Any], sequence: int) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    styles = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.0.attention_norm": SequenceParallel(),
        "layers.0.ffn_norm": SequenceParallel(),
        **{f"layers.0.attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        **{f"layers.0.feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
        "layers.0.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.0.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(use_local_output=False),
    }
    batch = f"batch (global = 64, micro = 1, seq_len = {sequence})\n"
    found = codes(batch + plan('llama3("tiny")', 2, "tok_embeddings = rowwise(output = shard(1))"))
    assert ("LP404" not in found) == steps(ranks(2), styles, sequence)


def test_sequence_is_divided_by_cp_then_tp() -> None:
    cluster = "cluster h100_sxm(hosts = 2, fabric = infiniband_ndr)\n"
    rules = "shard on tp { tok_embeddings = rowwise(output = shard(1)) }\ncontext on cp (balance = none)"
    text = "batch (global = 64, micro = 1, seq_len = 32)\n" + cluster + "mesh (cp = 4, tp = 4)\n" + rules
    assert "LP404" not in codes(text)
    found = next(item for item in diagnostics(text.replace("32", "40")) if item.code == "LP404")
    assert found.help == ("`seq_len` must be a multiple of 16, such as 32",)
    assert "LP404" not in codes(text.replace("32", "42"))  # LP405 says that already


def test_unsharded_sequence_need_not_divide() -> None:
    batch = "batch (global = 64, micro = 1, seq_len = 9)\n"
    assert "LP404" not in codes(batch + plan('llama3("tiny")', 2, *ATTENTION, *FEED_FORWARD))


@pytest.mark.parametrize(("ranks_of_ep", "fits"), [(2, True), (4, True), (8, True), (16, False)])
def test_ep_must_divide_the_experts(ranks_of_ep: int, fits: bool) -> None:
    cluster = "cluster h100_sxm(hosts = 2, fabric = infiniband_ndr)\n"
    mesh = f"mesh (dp_shard = 16, ep = {ranks_of_ep})\n"
    text = 'model mixtral("8x7b")\n' + cluster + mesh + "shard on ep { layers.*.feed_forward.experts = experts }"
    assert ("LP406" not in codes(text)) == fits
