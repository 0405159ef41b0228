"""The how-to pages: their programs run as programs, and their messages are what is raised."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pages
import pytest
from optional import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from polyattn._dispatch import cache, contract, registry

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "how-to"
MANY, SERVICE, TROUBLE = "many-devices.md", "service.md", "troubleshooting.md"


def text(page):
    return (FOLDER / page).read_text(encoding="utf-8")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


def program(page, name, folder):
    """Write a program that a page shows to a folder, and return its path."""
    (code,) = [code for code in blocks(page, "python") if code.startswith(f"# {name}\n")]
    (folder / name).write_text(code, encoding="utf-8")
    return folder / name


def run(folder, *arguments, **environment):
    """Run Python in a folder and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# ---- many devices ----


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_a_ring_of_processes_computes_what_one_process_does(tmp_path):
    program(MANY, "ring.py", tmp_path)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    # The launcher itself uses what is deprecated.
    printed = run(tmp_path, "-W", "default", *launch, "ring.py")
    found = re.findall(r"rank (\d) of 2: (\w+) off by (\S+e[-+]\d\d)", printed)
    assert sorted(x[:2] for x in found) == [(n, x) for n in "01" for x in ("key", "output")]
    assert all(float(off) < 1e-5 for *_, off in found)


EXPLICIT = """
import jax, sharded
from jax.sharding import NamedSharding

sharded.main()
mesh = jax.make_mesh((4,), ("ring",))
x = jax.device_put(jax.numpy.ones((1, 8, 64, 16)), NamedSharding(mesh, sharded.TOKENS))
try:
    jax.jit(sharded.attention)(x, x, x)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
def test_sharded_arrays_give_what_one_device_does(tmp_path):
    program(MANY, "sharded.py", tmp_path)
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    printed = run(tmp_path, "-c", EXPLICIT, XLA_FLAGS=flags).splitlines()
    (shown,) = [block for block in blocks(MANY, "console") if "sharded.py" in block]
    for line, promised in zip(printed[:3], shown.splitlines()[1:], strict=True):
        assert line.partition("off by")[0] == promised.partition("off by")[0]
        assert float(re.search(r"off by (\S+) of", line)[1]) < 1e-5
    (message,) = [block for block in blocks(MANY, "text") if block.startswith("Sharding")]
    assert matches(message, printed[3])


# ---- programs of others ----

IMPORTS = re.findall(
    r"^\| ([^|]+) \| `((?:import|from) [^|]+)` \| ([^|]+) \|$", text("run-here.md"), re.MULTILINE
)


@pytest.mark.slow
@pytest.mark.needs("torch")
@pytest.mark.parametrize("names", sorted({names for _, _, names in IMPORTS}))
def test_the_imports_of_projects_resolve(names, tmp_path):
    lines = [line for _, line, of in IMPORTS if of == names]
    options = shlex.split(found[0]) if (found := re.findall(r"`(--as [^`]+)`", names)) else []
    run_as = ("-W", "default", "-m", "polyattn", "run", *options, sys.executable)
    run(tmp_path, *run_as, "-c", "\n".join(lines))


# ---- a service ----


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A small BERT of random weights with a tokeniser of words, as a folder."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    words = ["[UNK]", "a", "cat", "drinks", "milk", "kitten", "has", "drink"]
    tokenizer = Tokenizer(models.WordLevel(dict(zip(words, range(8), strict=True)), "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=8, num_hidden_layers=2, **sizes)
    model = transformers.BertModel(config).eval()
    model.save_pretrained(folder)
    return folder, model


SENTENCES = ["a cat drinks milk", "milk", "a kitten has a drink of milk"]


WRONG = {"[]": "send a JSON list of sentences", '["milk", ""]': "a text has no tokens", "{": ""}


def test_the_service_answers_over_http(bert, tmp_path, monkeypatch):
    folder, model = bert
    spec = importlib.util.spec_from_file_location("s", program(SERVICE, "service.py", tmp_path))
    service = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(service)
    service.MOST_TOKENS = 5  # in several passes
    started, servers = threading.Event(), []

    class Server(service.ThreadingHTTPServer):
        def serve_forever(self):
            servers.append(self)
            started.set()
            super().serve_forever(poll_interval=0.01)

    monkeypatch.setattr(service, "ThreadingHTTPServer", Server)
    monkeypatch.setattr(service.BaseHTTPRequestHandler, "log_message", lambda *_: None)
    thread = threading.Thread(target=service.serve, args=(service.load(folder), 0))
    thread.start()
    assert started.wait(60)
    ids = [[1, 2, 3, 4], [4], [1, 5, 6, 1, 7, 0, 4]]
    with torch.no_grad():
        sums = [model(torch.tensor([one])).last_hidden_state[0].sum(0) for one in ids]
    expected = torch.nn.functional.normalize(torch.stack(sums), dim=-1)
    address = f"http://127.0.0.1:{servers[0].server_port}"
    try:
        with urlopen(address, json.dumps(SENTENCES).encode()) as answer:
            np.testing.assert_allclose(json.load(answer), expected, atol=1e-5)
        for wrong, why in WRONG.items():
            with pytest.raises(HTTPError, match="400") as caught:
                urlopen(address, wrong.encode())
            assert why in json.load(caught.value)["error"]
            caught.value.close()
    finally:
        servers[0].shutdown()
        thread.join()
        servers[0].server_close()


def test_the_service_imports_no_framework(bert, tmp_path):
    program(SERVICE, "service.py", tmp_path)
    ask = f"import service, sys; service.load({str(bert[0])!r})(['milk'])"
    heavy = "[m for m in ('torch', 'jax', 'transformers', 'cupy') if m in sys.modules]"
    assert run(tmp_path, "-c", f"{ask}; print({heavy})") == "[]\n"


# ---- messages ----


def matches(shown, raised):
    """Whether a message is the one shown, where … stands for anything."""
    parts = map(re.escape, " ".join(shown.split()).split("…"))
    return re.fullmatch(".*".join(parts), " ".join(raised.split())) is not None


def provoked(page):
    """Each call that a page shows with its message."""
    for block in blocks(page, "text"):
        found = re.fullmatch(r">>> (.*?)\n((?:\w+\.)*\w+: .*)", block, re.DOTALL)
        if found:
            yield found[1], found[2]


@pytest.fixture
def without_cupy(monkeypatch):
    """A machine where CuPy is not installed, whatever this one has."""
    genuine = contract.is_installed
    monkeypatch.setattr(contract, "is_installed", lambda name: name != "cupy" and genuine(name))
    monkeypatch.setattr(registry, "_plugins", {})
    cache.forget()
    yield
    cache.forget()


PAGES = ["../../README.md", *sorted(page.name for page in FOLDER.glob("*.md"))]
WITH_ERRORS = [page for page in PAGES if any(provoked(page))]
SLOW = [pytest.param(page, marks=pytest.mark.slow) for page in WITH_ERRORS[1:]]


@pytest.mark.parametrize("page", WITH_ERRORS[:1] + SLOW)
@pytest.mark.usefixtures("without_cupy")
def test_a_page_prints_what_it_shows_and_the_messages_are_those_raised(page):
    page_file = (FOLDER / page).resolve()
    assert pages.surprises(page_file) == []
    names = {"np": np, **pages.run(page_file)[-1].names}
    for call, message in provoked(page):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            eval(call, names)
        raised = f"{type(caught.value).__name__}: {caught.value}"
        assert matches(message, raised), f"{call}\n{raised}"


def test_every_error_that_a_page_shows_is_provoked():
    shown = sum(len(re.findall(r"^>>> ", text(page), re.MULTILINE)) for page in PAGES)
    assert shown == sum(len(list(provoked(page))) for page in PAGES)
