"""Files: written beside and renamed, so that whatever fails, older ones are whole."""

import contextlib
import os

import numpy as np
import pytest

from polyattn import cli, nn
from polyattn._base.files import write_file
from polyattn.export import onnx as export

LIKE = np.zeros(1, np.float32)
CONFIG = {
    "model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9, "n_positions": 8,
}  # fmt: skip
posix = pytest.mark.skipif(os.name != "posix", reason="names and permissions of Unix")


def gpt2(seed=0):
    return nn.Transformer.init(
        *(9, 8, 2, 1), like=LIKE, is_causal=True, seed=seed, positions=8, tied=True, fused=True,
        activation="gelu_tanh",
    )  # fmt: skip


def save(path, seed=0):
    path.mkdir(exist_ok=True)
    if not (path / "tokenizer.json").exists():
        (path / "tokenizer.json").write_text("{}")
    nn.save(gpt2(seed), path, CONFIG | {"note": seed})


def export_large(path, seed=0):
    path.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyattn.export.weight_files.LARGEST", 0)
        linear = nn.Linear.init(4, 3, like=LIKE, seed=seed)
        export(linear, {"x": ("B", 4 + 0 * seed)}, file=path / "model.onnx")


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.rglob("*") if not file.is_dir()}


@contextlib.contextmanager
def disk(size):
    """Let no file be longer than this."""
    import resource  # of Unix only

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("write", [save, export_large])
@pytest.mark.parametrize("number", [1, 2])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, write, number):
    def failing(descriptor):
        calls.append(descriptor)
        if len(calls) == number:
            raise KeyboardInterrupt

    write(tmp_path, 1)
    calls, before = [], contents(tmp_path)
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 2)
    assert contents(tmp_path) == before


@posix
@pytest.mark.parametrize("write", [save, export_large])
def test_a_disk_that_is_full_at_any_byte_leaves_what_was_there(tmp_path, write):
    write(tmp_path, 1)
    before = contents(tmp_path)
    sizes = sorted({len(content) for content in before.values()})
    with disk(0), pytest.raises(OSError, match=r"File too large: '.*new\.json'"):
        write_file(tmp_path / "new.json", "{}")
    for size in (0, 1, *[n - 1 for n in sizes if n > 2]):
        with disk(size), pytest.raises(OSError):  # noqa: PT011
            write(tmp_path, 2)
        assert contents(tmp_path) == before, size


@posix
def test_a_link_is_replaced_and_what_it_names_stays(tmp_path):
    save(tmp_path / "cache", 1)
    before = contents(tmp_path / "cache")
    (tmp_path / "snapshot").mkdir()
    for name in before:
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "cache" / name)
    nn.save(gpt2(2), tmp_path / "snapshot", CONFIG)
    assert contents(tmp_path / "cache") == before
    weight = nn.load.model(tmp_path / "snapshot", like=LIKE).embedding.weight
    np.testing.assert_array_equal(weight, gpt2(2).embedding.weight)


@posix
def test_what_is_no_regular_file_is_refused(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    for file in (str(tmp_path / "pipe"), str(tmp_path / "device")):
        for command in (
            ["bench", "--json", file], ["check", "numpy", "--repro", file],
            ["export", file, "--shape", "1,1,2,8"],
        ):  # fmt: skip
            assert cli.main(command) == 2, command
            assert f"a regular file; {file} is a device, a pipe" in capsys.readouterr().err
    (tmp_path / "config.json").symlink_to("/dev/null")
    with pytest.raises(ValueError, match=r"nn\.save needs a regular file; .*config\.json is a dev"):
        nn.save(gpt2(), tmp_path, CONFIG)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"nn\.save needs a regular file; .*tensors is a folder"):
        nn.save(gpt2(), tmp_path, CONFIG)
    (tmp_path / "model.safetensors").rmdir()
    assert {file.name for file in tmp_path.iterdir()} == {"pipe", "device", "config.json"}


def test_saving_removes_an_index_of_other_files(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')
    save(tmp_path, 2)
    assert contents(tmp_path).keys() == {"config.json", "model.safetensors", "tokenizer.json"}
