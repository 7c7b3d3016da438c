"""`pagedkv serve`: a model behind OpenAI's HTTP interface."""

import argparse
import ipaddress
import logging
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import uvicorn

from pagedkv.cli.engine_arguments import add_engine_arguments, engine_options, positive, size
from pagedkv.engine import AsyncLLMEngine
from pagedkv.server.app import Server, ServerOptions

_EPILOG = """\
examples:
  pagedkv serve model.gguf --served-model-name smollm2
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": "The capital of France is", "n": 3, "max_tokens": 20}'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = "Serve a model over HTTP, as OpenAI does."
    parser.epilog = _EPILOG
    add_engine_arguments(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine alone)")
    group.add_argument("--port", type=_port, default=8000, help="0 for one that is free (8000)")
    group.add_argument("--served-model-name", metavar="NAME", help="what requests call the model (its file or folder)")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="a key that requests must bring; may be repeated; PAGEDKV_API_KEY has one that no list of processes shows",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=["fair", "fcfs", "priority", "lpm"],
        default="fair",
        help="order of requests: equal shares of clients (default), arrival, priority, cached prefix",
    )
    group.add_argument(
        "--max-queued-requests", type=int, default=256, metavar="N", help="more wait for nobody: 429 (256)"
    )
    group.add_argument("--max-body-bytes", type=size, default=4 << 20, metavar="SIZE", help="longest body (4m)")
    group.add_argument("--shutdown-timeout", type=positive, default=30, metavar="SECONDS", help="grace at the end (30)")
    group.add_argument("--vllm-metrics", action="store_true", help="/metrics under vLLM's names, too")
    group.add_argument("--no-debug-routes", action="store_true", help="no live page at / and no /debug/state")
    group.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    keys = list(arguments.api_key or ())
    if own := os.environ.get("PAGEDKV_API_KEY"):
        keys.append(own)
    if not keys and not _is_loopback(arguments.host):
        logging.getLogger(__name__).warning("%s is reached from outside, and there is no --api-key", arguments.host)
    options = ServerOptions(
        model_name=arguments.served_model_name or Path(arguments.model).stem or arguments.model,
        api_keys=keys,
        max_body_bytes=arguments.max_body_bytes,
        vllm_metrics=arguments.vllm_metrics,
        version=_version(),
        debug_routes=not arguments.no_debug_routes,
    )
    engine = AsyncLLMEngine(
        **engine_options(arguments),
        scheduling_policy=arguments.scheduling_policy,
        max_queued_requests=arguments.max_queued_requests,
    )
    uvicorn.run(
        Server(engine, options).app(),
        host=arguments.host,
        port=arguments.port,
        log_level=arguments.log_level,
        access_log=arguments.log_level == "debug",
        timeout_graceful_shutdown=arguments.shutdown_timeout,
    )
    return 0


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 65535, found {text!r}")
    return int(text)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _version() -> str:
    try:
        return version("pagedkv")
    except PackageNotFoundError:
        return "unknown"
