"""transformers' own OpenAI-compatible server (`transformers serve`) with one PoD model in it, one request at a time."""

import time

from transformers import AutoConfig

from pod.blocks import PodConfigMixin
from pod.cache import PodCache
from pod.evaluation.models import asks_apart, require_model
from pod.eviction import Eviction
from pod.extras import require
from pod.files import opening
from pod.model.families import FAMILIES
from pod.model.inputs import CACHE
from pod.model.weights import pod_base
from pod_kernels import Quantization


def register(
    eviction: Eviction | None = None, tau: float | None = None, quantization: Quantization | None = None
) -> None:
    """Make PoD's models what transformers' server finds by the names in their configs.

    Each of its calls of `generate` gets an empty `PodCache` with these settings.
    """
    from transformers.cli.serving import model_manager

    for causal_lm in FAMILIES.values():

        class Served(causal_lm):
            def generate(self, *args, **kwargs):
                """The model's own, with the server's cache."""
                if kwargs.get(CACHE) is None:
                    cache = PodCache(self.config, eviction=eviction, tau=tau, quantization=quantization)
                    kwargs[CACHE] = cache
                return super().generate(*args, **kwargs)

        Served.__name__ = Served.__qualname__ = causal_lm.__name__
        setattr(model_manager.transformers, causal_lm.__name__, Served)


def serve(
    ckpt: str,
    host: str = "localhost",
    port: int = 8000,
    device: str | None = None,
    eviction: Eviction | None = None,
    tau: float | None = None,
    quantization: Quantization | None = None,
) -> None:
    """Serve an export until the process is stopped.

    Args:
        ckpt: a PoD export, as requests will name it in `model`.
        host, port: where to listen.
        device: "cpu", "cuda:1", ...; the first GPU, where there is one, when None.
        eviction, tau, quantization: of each request's cache, as in `pod.PodCache`.

    Raises:
        ImportError: what transformers' server needs is not installed; names the extra.
        ValueError: no PoD export, a method that evicts before a question is read, or what `PodCache` refuses.
    """
    require("serve", "accelerate", "fastapi", "openai", "uvicorn", what="pod.serve")
    require_model(ckpt)
    if pod_base(ckpt) is not None:
        raise ValueError(
            f"--ckpt {ckpt} is an adapter, and this server loads whole models: write one with "
            f"`python -m pod.export --ckpt {ckpt} --out DIR`"
        )
    with opening(ckpt):
        config = AutoConfig.from_pretrained(ckpt)
    if not isinstance(config, PodConfigMixin):
        raise ValueError(
            f"--ckpt {ckpt} is a {config.model_type} model: `transformers serve {ckpt}` serves it; pod.serve is for "
            "what pod.export or pod.convert made"
        )
    if asks_apart(eviction):
        raise ValueError(
            "query_aware=false evicts before the question is read, and a chat has none apart: leave it out"
        )
    PodCache(config, eviction=eviction, tau=tau, quantization=quantization)  # refuses now what it would at a request
    register(eviction, tau, quantization)
    from torch.cuda import is_available
    from transformers.cli.serve import Serve
    from transformers.cli.serving.model_manager import ModelManager

    # transformers lists what lies in the hub's cache, none of which is served, and fails where there is no such cache.
    served = {"id": ckpt, "object": "model", "created": int(time.time()), "owned_by": "pod"}
    ModelManager.get_gen_models = staticmethod(lambda: [served])
    Serve(ckpt, host=host, port=port, device=device or ("cuda:0" if is_available() else "cpu"))
