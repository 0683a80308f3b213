"""Serve an export by OpenAI's protocol, one request at a time; for anything bigger, vLLM: docs/SERVE.md.

python -m pod.serve --ckpt exports/chat
python -m pod.serve --ckpt exports/chat --port 8001 --eviction snapkv:budget=1024
python -m pod.serve --ckpt exports/chat --quantization-bits 4
curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "exports/chat", "messages": [{"role": "user", "content": "Who are you?"}], "stream": true}'
"""

import argparse
import sys

from pod.evaluation.command import add_cache
from pod.serving.server import serve
from pod.terminal import exit_status
from pod_kernels import Quantization


@exit_status
def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m pod.serve", description=__doc__.split("\n")[0])
    parser.add_argument("--ckpt", required=True, help="an exported model's directory, which requests name as `model`")
    parser.add_argument("--host", default="localhost", help="where to listen (localhost)")
    parser.add_argument("--port", type=int, default=8000, help="where to listen (8000)")
    parser.add_argument("--device", help="such as cpu or cuda:1 (the first GPU, where there is one)")
    what = "which tokens each request's cache keeps, such as snapkv:budget=256,window=16, one method"
    add_cache(parser, what, several=False)
    options = parser.parse_args(arguments)
    chosen = options.eviction or [None]
    if len(chosen) > 1:
        parser.error("--eviction: one method, a server has one cache for all requests")
    quantization = None if options.quantization_bits is None else Quantization(bits=options.quantization_bits)
    serve(options.ckpt, options.host, options.port, options.device, chosen[0], options.tau, quantization)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
