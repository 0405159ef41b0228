"""Layers of torch, which compute the same here; files of anyone; saving as transformers does."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from arrays import close, draw
from optional import torch
from tiny_models import DECODERS, ENCODERS, FAMILIES, FLOAT32, SENSES, loaded, refused

from polyattn import nn

WIDE = {np.float32: torch.float32, np.float64: torch.float64}


# ---- torch.nn ----------------------------------------------------------------------------------

KEEP = np.array([[True] * 7, [True] * 4 + [False] * 3])


def theirs_of(layer, dtype, *args, **options):
    layer = layer.to(WIDE[dtype]).eval()
    for parameter in layer.parameters():  # biases begin with 0, which would hide them
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        return layer(*map(torch.from_numpy, args), **options)


X, KEY, VALUE = draw(*[(2, 7, 16)] * 3)
NARROW, LEAN = draw((2, 9, 10), (2, 9, 6))


@pytest.mark.parametrize(
    ("given", "bias"),
    [
        ((X, X, X), True),
        ((X, KEY, VALUE), False),
        ((X, NARROW, NARROW), True),
        ((X, NARROW, LEAN), False),
    ],
    ids=["itself", "three", "of another size", "of two sizes"],
)
def test_torch_attention_is_torchs_own(given, bias):
    torch.manual_seed(0)
    sizes = {"kdim": given[1].shape[-1], "vdim": given[2].shape[-1]}
    layer = torch.nn.MultiheadAttention(16, 4, bias=bias, **sizes, batch_first=True)
    expected = theirs_of(layer, np.float32, *given)[0]
    ours = nn.load.torch_attention(layer.state_dict(), 4, like=FLOAT32)
    close(ours(*given), expected)


@pytest.mark.parametrize(
    ("norm_first", "activation", "causal", "dtype"),
    [(False, "relu", False, np.float32), (True, "gelu", True, np.float64)],
)
def test_torch_encoder_layer_is_torchs_own(norm_first, activation, causal, dtype):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        16, 4, 24, activation=activation, batch_first=True, norm_first=norm_first,
        layer_norm_eps=1e-3, bias=not causal,
    )  # fmt: skip
    x = draw((2, 7, 16), dtype=dtype)[0]
    options = {"src_key_padding_mask": torch.from_numpy(~KEEP)}
    if causal:
        options["src_mask"] = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
    expected = theirs_of(layer, dtype, x, **options)
    ours = nn.load.torch_encoder_layer(
        layer.state_dict(), 4, like=np.zeros(1, dtype=dtype), activation=activation,
        norm_first=norm_first, epsilon=1e-3,
    )  # fmt: skip
    found = ours(x, mask=KEEP[:, None, None, :], is_causal=causal)
    assert found.dtype == dtype
    close(found[KEEP], expected[KEEP], 160)


def test_a_prefix_picks_one_layer_of_a_larger_model():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    whole = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = X
    expected = theirs_of(whole, np.float32, x)
    for prefix in ("layers.0.", "layers.1."):
        x = nn.load.torch_encoder_layer(whole.state_dict(), 4, like=x, prefix=prefix)(x)
    close(x, expected, 160)
    with pytest.raises(ValueError, match=r"'layers\.2\.'; the first names are layers\.0"):
        nn.load.torch_encoder_layer(whole.state_dict(), 4, like=x, prefix="layers.2.")


def test_parameters_are_copies():
    source = torch.nn.MultiheadAttention(16, 4)
    layer = nn.load.torch_attention(dict(source.named_parameters()), 4, like=torch.zeros(1))
    assert not any(array.requires_grad for array in layer.parameters().values())
    for array in layer.parameters().values():
        array.zero_()
    assert source.in_proj_weight.abs().max() > 0


def test_every_name_that_does_not_fit_is_listed_at_once():
    state = torch.nn.MultiheadAttention(16, 4).state_dict()
    del state["out_proj.bias"]
    state["in_proj_weight"] = torch.zeros(40, 16)
    state["in_proj_bias"] = torch.zeros(48, dtype=torch.int8)
    state["extra"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"do not fit a torch\.nn\.MultiheadAttention") as caught:
        nn.load.torch_attention(state, 4, like=FLOAT32)
    said = str(caught.value)
    assert "in_proj_weight: expected (48, 16), got (40, 16)" in said
    assert "in_proj_bias: expected float16, bfloat16, float32, float64, got int8" in said
    assert "extra: unknown, (3,) float32" in said
    block = torch.nn.TransformerEncoderLayer(16, 4, 24).state_dict()
    del block["linear2.weight"]
    with pytest.raises(ValueError, match=r"linear2\.weight: missing, expected \(16, 24\)"):
        nn.load.torch_encoder_layer(block, 4, like=FLOAT32)


def test_what_there_is_no_place_for_is_refused_by_name():
    state = torch.nn.MultiheadAttention(16, 4, add_bias_kv=True).state_dict()
    with pytest.raises(ValueError, match="bias_k and bias_v, of add_bias_kv=True"):
        nn.load.torch_attention(state, 4, like=FLOAT32)
    state = torch.nn.MultiheadAttention(16, 4).state_dict()
    with pytest.raises(ValueError, match="5 heads do not divide the layer's size of 16"):
        nn.load.torch_attention(state, 5, like=FLOAT32)
    with pytest.raises(ValueError, match="floating dtype; got int64"):
        nn.load.torch_attention(state, 4, like=np.zeros(1, dtype=np.int64))
    with pytest.raises(ValueError, match=r"no out_proj\.weight of 2 axes.*they have a \(3,\)"):
        nn.load.torch_attention({"a": np.zeros(3)}, 4, like=FLOAT32)


# ---- files -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2(made):
    return made("gpt2", DECODERS["gpt2"])


def test_a_whole_file_precedes_an_index_as_in_transformers(gpt2, whole, tmp_path):
    doubled = {name: 2 * array for name, array in gpt2.state_dict().items()}
    gpt2.save_pretrained(tmp_path, max_shard_size="20KB", state_dict=doubled)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert not same(tmp_path, gpt2)
    shutil.copy(whole / "model.safetensors", tmp_path)
    assert same(tmp_path, gpt2)


def same(folder, model):
    """Return whether the weights of a folder are those of a GPT-2."""
    found = nn.load.model(folder, like=FLOAT32).stack.blocks[1].feed_forward.up.weight
    return np.array_equal(found, model.state_dict()["transformer.h.1.mlp.c_fc.weight"])


@pytest.mark.parametrize("library", ["numpy", "torch"], indirect=True)
def test_a_file_of_bfloat16_is_read_bit_for_bit(gpt2, tmp_path, library):
    to, back = library
    safetensors = pytest.importorskip("safetensors.torch")
    state = {name: array.bfloat16() for name, array in gpt2.transformer.state_dict().items()}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(gpt2.config.to_dict()))
    expected = state["wte.weight"].float().numpy()
    for like in (FLOAT32, FLOAT32.astype(ml_dtypes.bfloat16)):
        model = nn.load.model(tmp_path, like=to(like))
        assert model.embedding.weight.dtype == to(like).dtype
        np.testing.assert_array_equal(back(model.embedding.weight).astype(np.float32), expected)


PICKLE = "pytorch_model.bin"
PACKED = {"h.0.attn.c_attn.qweight": np.zeros((4, 4), np.int32)}


@pytest.mark.parametrize(
    ("weights", "file", "config", "said"),
    [
        ("folder", "", "dict", r"there is no .*model\.safetensors"),
        ("folder", PICKLE + " model.safetensors", None, r"no .*config\.json: pass config="),
        (PICKLE, PICKLE, "dict", r"is not a \.safetensors file"),
        ("folder", PICKLE, None, r"there is pytorch_model\.bin, a pickle"),
        ("folder", "adapter_config.json", "dict", r"an adapter of PEFT, .*merge_and_unload"),
        ("openai/gpt2", "", None, r"snapshot_download\('openai/gpt2'\)"),
        ("gpt2.safetensors", "", None, r"there is no gpt2\.safetensors$"),
        (PACKED, "", "dict", r"c_attn\.qweight is quantized, as GPTQ and AWQ"),
        ({}, "", None, "pass config="),
        ({}, "", "object", r"pass config\.to_dict\(\)"),
        ("model", "", "dict", "weights is of type GPT2LMHeadModel; pass a mapping"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_to_pass(
    weights, file, config, said, tmp_path, gpt2
):
    for name in file.split():
        (tmp_path / name).write_bytes(b"")
    known = {"folder": tmp_path, "model": gpt2, PICKLE: tmp_path / PICKLE}
    weights = known.get(str(weights), weights)
    config = {"dict": gpt2.config.to_dict(), "object": gpt2.config}.get(config)
    with pytest.raises((FileNotFoundError, TypeError, ValueError), match=said):
        nn.load.model(weights, config, like=FLOAT32)


# ---- files and settings of anyone --------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(gpt2, tmp_path_factory):
    """Return the folder of a tiny GPT-2."""
    folder = tmp_path_factory.mktemp("gpt2")
    gpt2.save_pretrained(folder)
    return folder


def copied(folder, to):
    """Return a copy of a model's folder, to be spoilt."""
    return shutil.copytree(folder, to, dirs_exist_ok=True)


def test_weights_have_names_of_text_each_once(gpt2):
    config = gpt2.config.to_dict()
    for load in (
        lambda weights: nn.load.model(weights, config, like=FLOAT32),
        lambda weights: nn.load.torch_attention(weights, 4, like=FLOAT32),
    ):
        with pytest.raises(ValueError, match="weights are arrays by name; got the name 0"):
            load({0: FLOAT32})
        with pytest.raises(TypeError, match=r"lm_head\.weight is of type int, not an array"):
            load({"lm_head.weight": 3, "wte.weight": 4})
    state = gpt2.state_dict() | {"wte.weight": torch.ones(50, 32)}
    with pytest.raises(ValueError, match=r"transformer\.wte\.weight and wte\.weight are one"):
        nn.load.model(state, config, like=FLOAT32)


def indexed(folder, name="model-1.safetensors", **more):
    """Put a folder's weights into one file that an index names; return it and the index."""
    shard = folder / "model-1.safetensors"
    (folder / "model.safetensors").rename(shard)
    names = pytest.importorskip("safetensors.numpy").load_file(shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, name) | more}))
    return shard, index


def test_an_index_names_no_file_outside_its_folder(whole, tmp_path):
    folder = copied(whole, tmp_path / "one")
    shard, index = indexed(folder)
    (tmp_path / "other").mkdir()
    other = shard.rename(tmp_path / "other" / shard.name)
    good = index.read_text()
    for name in (f"../other/{shard.name}", f"..\\other\\{shard.name}", str(other), "C:x", "a/../b"):
        index.write_text(good.replace(shard.name, json.dumps(name)[1:-1]))
        said = refused(folder)
        assert said is not None
        assert str(index) in said
        assert f"{name!r}, which is outside the folder" in said
    # The Hugging Face cache: names in the folder, links to files elsewhere.
    index.write_text(good)
    (folder / shard.name).symlink_to(other)
    assert refused(folder) is None
    # A folder of the folder.
    (folder / "sub").mkdir()
    (folder / shard.name).rename(folder / "sub" / shard.name)
    index.write_text(good.replace(shard.name, f"sub/{shard.name}"))
    assert refused(folder) is None


def test_an_index_says_which_file_has_a_weight(whole, tmp_path):
    folder = copied(whole, tmp_path)
    shard, index = indexed(folder, extra="model-1.safetensors")
    assert refused(folder) == f"{shard} has no extra, which {index} says it has"
    names = json.loads(index.read_text())["weight_map"]
    del names["extra"]
    # Another file that has the same names, with other numbers, is not the model's.
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file(dict.fromkeys([*names, "h.0.attn.bias"], FLOAT32), folder / "z")
    index.write_text(json.dumps({"weight_map": names | {"h.0.attn.bias": "z"}}))
    assert refused(folder) is None
    (folder / "z").unlink()
    with pytest.raises(FileNotFoundError, match=r"z, which .*index\.json names"):
        nn.load.model(folder, like=FLOAT32)


TEXTS = (b"", b"{", b"[]", b"3", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"[" * 10_000, b'{"a":' * 10_000)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_file_of_settings_that_is_damaged_is_named(name, whole, tmp_path):
    folder = copied(whole, tmp_path)
    file = folder / name
    if "index" in name:
        (folder / "model.safetensors").unlink()
    index = (b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}')
    for text in (*TEXTS, *(index if "index" in name else ())):
        file.write_bytes(text)
        assert str(file) in refused(folder), text


def test_weights_that_are_damaged_are_refused_with_their_files_name(whole, tmp_path):
    folder = copied(whole, tmp_path)
    file = folder / "model.safetensors"
    good = file.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    cuts = [good[:length] for length in (0, 5, 50, header - 1, header, len(good) - 1)]
    lengths = [length.to_bytes(8, "little") + good[8:] for length in (0, header, 2**63)]
    one = b'{"dtype":"F32","shape":[%b],"data_offsets":[0,4]}'
    headers = [
        b'{"a":' + one % b"1" + b',"b":' + one % b"1" + b"}",  # overlapping
        b'{"a":' + one % b"-1" + b"}",
        b'{"a":' + one.replace(b"F32", b"F8_E4M3") % b"4" + b"}",
        *TEXTS,
    ]
    headers = [len(text).to_bytes(8, "little") + text + b"\0" * 4 for text in headers]
    for data in (*cuts, *lengths, *headers, good + b"\0"):
        file.write_bytes(data)
        assert str(file) in refused(folder), data[:80]
    rng = np.random.default_rng(0)
    for _ in range(20):
        flipped = bytearray(good)
        flipped[rng.integers(header)] ^= 1 << rng.integers(8)
        file.write_bytes(flipped)
        said = refused(folder)  # A name that is another one, at least.
        assert said is None or str(file) in said or "weights" in said


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_in_a_files_place_is_no_file(name, whole, tmp_path):
    folder = copied(whole, tmp_path)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(FileNotFoundError, match=rf"there is no .*{name}: a folder has this name"):
        nn.load.model(folder, like=FLOAT32)
    (folder / name).rmdir()
    if os.name != "posix":
        return
    os.mkfifo(folder / name)
    with pytest.raises(FileNotFoundError, match=rf"there is no .*{name}: a device or pipe has"):
        nn.load.model(folder, like=FLOAT32)


INDEX, NAME = "model.safetensors.index.json", "\x1b" * 100_000
MANY = {f"h.{n % 2}.\x1b[31m{n}": FLOAT32 for n in range(3000)} | {NAME: FLOAT32}
HOSTILE = {
    "names of weights": ({"model.safetensors": MANY}, "and 3,"),
    "names in an index": ({INDEX: dict.fromkeys(MANY, "z"), "z": {"a": FLOAT32}}, "2,981 more, wh"),
    "the length of a name": ({INDEX: {"a": "x" * 5000}}, "which no file can be: File name too lo"),
    "the name of a file": ({INDEX: {"a": "../" + NAME}}, "outside the folder"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_message_is_short_and_printable_and_names_the_path(name, whole, tmp_path):
    content, said = HOSTILE[name]
    save_file = pytest.importorskip("safetensors.numpy").save_file
    folder = copied(whole, tmp_path)
    (folder / "model.safetensors").unlink()
    for file, value in content.items():
        if file == INDEX:
            (folder / file).write_text(json.dumps({"weight_map": value}))
        else:
            save_file(value, folder / file)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        nn.load.model(folder, like=FLOAT32)
    message = str(caught.value)
    assert said in message
    assert str(folder) in message
    assert len(message) < 5000
    assert message.replace("\n", "").isprintable()


# ---- saving ------------------------------------------------------------------------------------

CAUSAL, BASE = "AutoModelForCausalLM", "AutoModel"
SAVED = [(name, CAUSAL) for name in FAMILIES] + [(name, BASE) for name in ENCODERS]


@pytest.mark.parametrize(("name", "kind"), [*SAVED, ("qwen2", BASE), ("vit", BASE)])
def test_transformers_reads_back_what_was_saved(made, transformers, tmp_path, name, kind):
    theirs = made(name, (DECODERS | ENCODERS | SENSES)[name], kind)
    more = {"logits": False} if name in DECODERS and kind == BASE else {}
    nn.save(loaded(theirs, **more), tmp_path, theirs.config.to_dict())
    again, facts = getattr(transformers, kind).from_pretrained(tmp_path, output_loading_info=True)
    assert not facts["unexpected_keys"]
    assert all("pooler" in name for name in facts["missing_keys"])
    state = again.state_dict()
    for key, array in theirs.state_dict().items():
        if "pooler" not in key:
            np.testing.assert_array_equal(state[key].numpy(), array.numpy(), err_msg=key)


@pytest.mark.parametrize(
    ("library", "dtype"),
    [
        ("torch", np.float32),
        ("torch", ml_dtypes.bfloat16),
        pytest.param("jax", ml_dtypes.bfloat16, marks=pytest.mark.slow),
    ],
    indirect=["library"],
)
def test_models_of_every_library_and_dtype_are_saved_bit_for_bit(made, tmp_path, library, dtype):
    to, back = library
    theirs, like = made("phi3", DECODERS["phi3"], CAUSAL), to(FLOAT32.astype(dtype))
    model = loaded(theirs, like)
    nn.save(model, tmp_path / "new" / "folder", theirs.config.to_dict())
    again = nn.load.model(tmp_path / "new" / "folder", like=like)
    for name, array in again.parameters().items():
        assert array.dtype == model.embedding.weight.dtype
        np.testing.assert_array_equal(back(array), back(model.parameters()[name]), err_msg=name)


def test_a_trained_model_is_saved_with_the_config_of_its_folder(made, tmp_path):
    made("qwen3", DECODERS["qwen3"], CAUSAL).save_pretrained(tmp_path)
    model = nn.load.model(tmp_path, like=torch.zeros(1))
    trained = {name: (2 * a).requires_grad_() for name, a in model.parameters().items()}
    nn.save(model.with_parameters(trained), tmp_path / "trained", tmp_path)
    again = nn.load.model(tmp_path / "trained", like=FLOAT32)
    weight = model.embedding.weight.numpy()
    np.testing.assert_array_equal(again.embedding.weight, 2 * weight)
    config = (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "trained" / "config.json").read_text()) == json.loads(config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, and the model has 3 blocks"),
        ({"intermediate_size": 40}, r"feed_forward\.up\.weight has the shape \(32, 40\); got"),
        ({"rms_norm_eps": 0.5}, r"epsilon=0\.5, .* and the model has .*epsilon=1e-06"),
        ({"tie_word_embeddings": True}, r"unknown: output\.weight"),
        ({"hidden_act": "mish"}, "hidden_act must be one of"),
    ],
)
def test_a_config_of_another_model_is_refused_before_anything_is_written(
    made, tmp_path, change, said
):
    theirs = made("qwen2", DECODERS["qwen2"], CAUSAL)
    model, config = loaded(theirs), theirs.config.to_dict()
    with pytest.raises(ValueError, match=said):
        nn.save(model, tmp_path / "no", config | change)
    with pytest.raises(TypeError, match="config is of type int, not a mapping"):
        nn.save(model, tmp_path / "no", 3)
    assert not (tmp_path / "no").exists()


def test_an_encoder_has_no_logits(made):
    with pytest.raises(ValueError, match="a BERT is an encoder, which has no logits: leave out"):
        loaded(made("bert", ENCODERS["bert"], BASE), logits=True)
