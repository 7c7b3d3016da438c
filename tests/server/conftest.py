"""A server with a small model and random weights, on a port of its own."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
httpx2 = pytest.importorskip("httpx2")
openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")

from pagedkv import AsyncLLMEngine  # noqa: E402
from pagedkv.server.app import Server, ServerOptions  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


class Bytes:
    """A tokenizer of one token per byte, with a chat template."""

    eos_token_id = None
    chat_template = TEMPLATE

    def __call__(self, text, add_special_tokens=True):
        return type("Encoding", (), {"input_ids": list(text.encode())})

    def decode(self, token_ids, skip_special_tokens):
        return bytes(token_ids).decode(errors="replace")

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, continue_final_message, **options):
        assert not tokenize
        if options:
            raise ValueError(f"unknown options {sorted(options)}")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return text + ("<a>" if add_generation_prompt else "")


def build_model(max_position_embeddings=512):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.25,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def metric_of(url, name, **labels):
    """Return the value of a metric of a server, or the sum over those that have the labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    text = httpx2.get(url + "/metrics", timeout=60).text
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(part in line for part in wanted))


class LiveServer:
    """A server that runs in a thread."""

    def __init__(self, path=None, options=None, shutdown_timeout=5, **engine_options):
        torch.set_num_threads(1)
        engine_options = {"block_size": 8, "max_num_seqs": 16, "scheduling_policy": "fair"} | engine_options
        if path is None:
            self.model = build_model()
            self.engine = AsyncLLMEngine(self.model, Bytes(), **engine_options)
        else:
            self.engine = AsyncLLMEngine(path, **engine_options)
        self.app = Server(self.engine, ServerOptions("tiny", **(options or {}))).app()
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(self.app, log_level="warning", timeout_graceful_shutdown=shutdown_timeout)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    @property
    def scheduler(self):
        return self.engine.engine.scheduler

    def stop(self):
        self._server.should_exit = True
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()

    def client(self, **options):
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=60, **options)

    def post(self, path, body=None, **options):
        content = body if isinstance(body, bytes | str) or body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        return httpx2.post(self.url + path, content=content, headers=headers, timeout=60, **options)

    def get(self, path, **options):
        return httpx2.get(self.url + path, timeout=60, **options)

    def metric(self, name, **labels):
        """Return the value of a metric, or the sum over those that have the labels."""
        return metric_of(self.url, name, **labels)

    def open_stream(self, body, path="/v1/completions"):
        """Send a request over a plain socket, so that the connection can be cut at any time."""
        address = urlsplit(self.url)
        connection = socket.create_connection((address.hostname, address.port))
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def wait_until_idle(self, seconds=20):
        """Wait until no block is held, and check the books."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.scheduler.usage == 0 and not self.scheduler.has_unfinished_requests():
                self.scheduler.check_integrity()
                return
            time.sleep(0.02)
        raise AssertionError(f"blocks are still held: {self.scheduler.snapshot()}")


@pytest.fixture(scope="session")
def server():
    """Return a server that all tests of a session share."""
    with running() as server:
        yield server


@contextlib.contextmanager
def running(**options):
    server = LiveServer(**options)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def serving(model, *words):
    """Run `pagedkv serve` as a process of its own; yield it and its address."""
    # The version is the installed distribution's, which a source tree has not.
    command = "import sys; from pagedkv import cli; cli.version = lambda name: '0'; sys.exit(cli.main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "serve", str(model), "--served-model-name", "tiny", "--port", "0", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PAGEDKV_API_KEY": ""},
    )
    lines = []
    # The pipe is read to its end, or the server would wait for it.
    reader = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        else:
            pytest.fail(f"the server did not start:\n{''.join(lines)}")
        reader.start()
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        if reader.ident is not None:
            reader.join()
        process.stderr.close()


@pytest.fixture(scope="session")
def serve():
    """Return what runs `pagedkv serve` as a process."""
    return serving


@pytest.fixture(scope="session")
def metric():
    """Return what reads a metric of a server that is another process."""
    return metric_of


@pytest.fixture
def start():
    """Return a function that starts servers, which are stopped after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(running(**options))


@pytest.fixture
def client(server):
    """Return the official client of the shared server."""
    with server.client() as client:
        yield client
